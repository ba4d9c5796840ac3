// SPDX-License-Identifier: Apache-2.0
//
// The porting page: all that an arena needs from a device. A new device is one file that implements this class.
//
// RULES FOR ALL PRIMITIVES
//  - A failed primitive had no effect. It says so by a Result whose status is not KVC_OK; none throws.
//  - Addresses and sizes are multiples of info().granularity, except where a primitive says otherwise.
//  - All but info(), failure(), describe() and gone() are called between enter() and leave() on the same thread.
//  - Any thread may call; calls on different addresses and handles may run side by side.
#pragma once

#include <cstdint>
#include <memory>

#include "kvcached.h"

namespace kvc {

using Handle = uint64_t;

enum class Access { read_only, read_write };

struct Result {
  int status = KVC_OK;
  int code = 0;          // the driver's own
  const char *call = ""; // the driver's own name, a literal
  uint64_t bytes = 0;
  bool ok() const { return status == KVC_OK; }
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Pre: none. Post: constant from the opening on.
  virtual const kvc_device_info &info() const = 0;

  // Free and total bytes now, every process counted.
  virtual Result memory(uint64_t *free_bytes, uint64_t *total_bytes) = 0;

  // Make the device current for this thread. Post (OK): *previous is what leave() needs to restore.
  virtual Result enter(int64_t *previous) = 0;
  virtual void leave(int64_t previous) = 0;

  // Post: [*base, *base + bytes) belongs to the caller and is mapped nowhere; touching it faults.
  virtual Result reserve(uint64_t bytes, uint64_t *base) = 0;
  // Pre: exactly one reserved range, nothing mapped in it.
  virtual Result free_range(uint64_t base, uint64_t bytes) = 0;

  // Post: physical memory of exactly `bytes` bytes that no other process can read, all zeros, mapped nowhere.
  virtual Result create(uint64_t bytes, Handle *handle) = 0;
  // Pre: mapped nowhere, `bytes` as created. Post: the memory is free for every process.
  virtual Result release(Handle handle, uint64_t bytes) = 0;

  // Pre: the range lies in a reserved one and nothing is mapped there; `bytes` is the size of the whole handle.
  // Post: mapped; not accessible before set_access(). A handle may be mapped at several places.
  virtual Result map(uint64_t address, uint64_t bytes, Handle handle) = 0;
  // Pre: whole mappings side by side; only one unless spans_mappings().
  virtual bool spans_mappings() const { return true; }
  virtual Result set_access(uint64_t address, uint64_t bytes, Access access) = 0;
  // Pre: exactly one mapping. Post: touching it faults.
  virtual Result unmap(uint64_t address, uint64_t bytes) = 0;

  // What a call of `kind` that failed with `code` returns: the one place that tells classes of failure apart.
  // Code 0 stands for the driver's own out of memory.
  virtual Result failure(kvc_call kind, int code, uint64_t bytes) const = 0;
  // A few words for a code. Never NULL.
  virtual const char *describe(int code) const = 0;
  // The driver was shut down before us (end of the process): it has freed everything itself.
  virtual bool gone(int code) const = 0;
};

// Open a backend; on failure returns the error's status and leaves `out` alone.
int open_host(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error);
int open_cuda(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error);
int open_hip(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error);

// The device is current while this object lives.
class Current {
 public:
  explicit Current(Backend &backend) : backend_(backend), result_(backend.enter(&previous_)) {}
  ~Current() {
    if (result_.ok()) backend_.leave(previous_);
  }
  Current(const Current &) = delete;
  Current &operator=(const Current &) = delete;
  const Result &result() const { return result_; }

 private:
  Backend &backend_;
  int64_t previous_ = 0;
  Result result_;
};

// True when one handle of the device's granularity can be created, mapped, made accessible and taken down again.
// `failed` is the first step that did not work.
bool can_map(Backend &backend, Result &failed);

} // namespace kvc
