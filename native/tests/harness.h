// SPDX-License-Identifier: Apache-2.0
//
// What the contract checks stand on: a device under test, arenas on it, and a way to look at its memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcached.h"

inline bool operator==(const kvc_run &a, const kvc_run &b) { return a.first == b.first && a.count == b.count; }

namespace contract {

extern int failures;
void fail(const char *file, int line, const std::string &what);

#define CHECK(condition) \
  do { \
    if (!(condition)) contract::fail(__FILE__, __LINE__, #condition); \
  } while (false)

// Compare two integers and print both when they differ.
#define CHECK_EQ(actual, wanted) contract::check_equal(__FILE__, __LINE__, #actual, static_cast<int64_t>(actual), static_cast<int64_t>(wanted))
void check_equal(const char *file, int line, const char *what, int64_t actual, int64_t wanted);

// How the program was started.
struct Setting {
  int backend = KVC_HOST;
  std::string library;   // stub driver; empty: the real one
  std::string directory; // host
  uint64_t capacity = uint64_t{512} << 20;
  uint64_t granularity = 0; // 0: the device's own (2 MiB)
  bool stub() const { return backend != KVC_HOST && !library.empty(); }
  bool real() const { return backend != KVC_HOST && library.empty(); }
  // Touching what is not mapped is safe to try (on a real card it may end the context).
  bool may_touch_holes() const { return !real(); }
};
extern Setting setting;

kvc_device_options options();

// Device memory as a program sees it. read() and write() are false where the access would fault.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual bool read(uint64_t address, void *out, size_t bytes) = 0;
  virtual bool write(uint64_t address, const void *data, size_t bytes) = 0;
  bool readable(uint64_t address);
  bool writable(uint64_t address); // leaves a changed byte
  bool fill(uint64_t address, uint64_t bytes, uint8_t value);
  // All `bytes` are readable and have this value.
  bool holds(uint64_t address, uint64_t bytes, uint8_t value);
};
std::unique_ptr<Memory> open_memory();

class Device {
 public:
  Device();
  ~Device();
  kvc_device *get() const { return device_; }
  uint64_t granularity() const { return info_.granularity; }
  const kvc_device_info &info() const { return info_; }
  void fail_call(int kind, uint64_t nth, bool from_there_on = false, int code = 0);
  void clear_faults();
  uint64_t calls(int kind);
  uint64_t free_bytes();

 private:
  kvc_device *device_ = nullptr;
  kvc_device_info info_{};
};

struct Shape {
  uint64_t pages = 16;
  uint32_t planes = 1;
  uint32_t zero = KVC_ZERO_NEVER;
  uint64_t history = 0;
  uint64_t pages_between_planes = 0; // more than the range needs
  uint64_t granules_per_page = 1;
};

class Arena {
 public:
  Arena(Device &device, const Shape &shape);
  ~Arena();
  kvc_arena *get() const { return arena_; }
  const Shape &shape() const { return shape_; }
  uint64_t page_bytes() const { return page_bytes_; }
  uint64_t address(uint64_t page, uint32_t plane = 0) const;
  int map(const std::vector<kvc_run> &runs);
  int unmap(const std::vector<kvc_run> &runs, bool keep = false);
  int prepare(uint64_t tx, const std::vector<kvc_run> &runs);
  int commit(uint64_t tx, bool keep = false);
  int abort(uint64_t tx);
  int acquire(uint64_t run_pages, uint64_t runs);
  uint64_t trim();
  kvc_arena_stats stats();
  uint64_t held(); // bytes
  std::vector<kvc_run> quarantined();
  // Give it up. A second call does nothing.
  int destroy();

  kvc_error error{};        // of the last call
  std::vector<kvc_run> bad; // of the last map()

 private:
  Shape shape_;
  uint64_t page_bytes_ = 0, stride_ = 0;
  kvc_arena *arena_ = nullptr;
};

bool same(const kvc_arena_stats &a, const kvc_arena_stats &b);
// Bytes that the driver has handed out and not got back: handles created and not released, all of one class.
uint64_t live_handles(Device &device);

// The checks, one function per chapter of the contract.
void check_memory();
void check_refusals();
void check_transactions();
void check_zero_backing();
void check_threads();
void check_out_of_memory();
void check_faults();
void check_undo_failures();
void check_own_memory_failures();
void check_host();
void check_stub();

} // namespace contract
