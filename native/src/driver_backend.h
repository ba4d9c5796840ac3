// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA and the HIP backend share: the drivers' virtual memory calls have the same shape under two sets of names.
// The few types are declared here, as the drivers' binary interface fixes them, so that no vendor header is needed.
#pragma once

#include <cstddef>
#include <string>

#include "outcome.h"

namespace kvc {

namespace driver {

struct Location {
  int type; // kDevice
  int id;
};
struct AccessDescription {
  Location location;
  int flags;
};
struct AllocationProperties {
  int type; // kPinned
  int requested_handle_types;
  Location location;
  void *win32_handle_meta_data;
  struct {
    unsigned char compression;
    unsigned char rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDescription) == 12, "the driver's layout");

constexpr int kPinned = 1, kDevice = 1, kReadOnly = 1, kReadWrite = 3, kMinimumGranularity = 0;
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kDeinitialized = 4; // the same numbers in both drivers

// Addresses and handles are 64-bit words in both.
struct Calls {
  int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
  int (*free_range)(uint64_t, size_t);
  int (*create)(uint64_t *, size_t, const AllocationProperties *, unsigned long long);
  int (*release)(uint64_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  int (*set_access)(uint64_t, size_t, const AccessDescription *, size_t);
  int (*unmap)(uint64_t, size_t);
  int (*granularity)(size_t *, const AllocationProperties *, int);
  int (*memory_info)(size_t *, size_t *);
};

// A shared library that stays open for the rest of the process: drivers do not survive being unloaded.
class Library {
 public:
  // Tries the names in turn; `error` says what is missing.
  static Library open(const char *chosen, const char *const *names, kvc_error &error);
  bool is_open() const { return handle_ != nullptr; }
  // Sets *function; NULL and false when the library has no such symbol, and `error` names it.
  template <class Function>
  bool find(const char *name, Function **function, kvc_error &error) const {
    *function = reinterpret_cast<Function *>(symbol(name));
    if (*function == nullptr) error = ended(KVC_UNAVAILABLE, name, "the driver library is too old: it has no %s", name);
    return *function != nullptr;
  }

 private:
  void *symbol(const char *name) const;
  void *handle_ = nullptr;
};

} // namespace driver

class DriverBackend : public Backend {
 public:
  const kvc_device_info &info() const override { return info_; }
  Result memory(uint64_t *free_bytes, uint64_t *total_bytes) override;
  Result reserve(uint64_t bytes, uint64_t *base) override;
  Result free_range(uint64_t base, uint64_t bytes) override;
  Result create(uint64_t bytes, Handle *handle) override;
  Result release(Handle handle, uint64_t bytes) override;
  Result map(uint64_t address, uint64_t bytes, Handle handle) override;
  Result set_access(uint64_t address, uint64_t bytes, Access access) override;
  Result unmap(uint64_t address, uint64_t bytes) override;
  Result failure(kvc_call kind, int code, uint64_t bytes) const override;
  bool gone(int code) const override { return code == driver::kDeinitialized; }

 protected:
  using Names = const char *[KVC_CALL_KINDS];
  DriverBackend(const Names &names, int backend, int ordinal);
  Result of(kvc_call kind, int code, uint64_t bytes) const { return code == 0 ? Result{} : failure(kind, code, bytes); }
  // Resolve the calls under this driver's names.
  bool find_calls(const driver::Library &library, const char *granularity, const char *memory_info, kvc_error &error);
  // Ask for the granularity, then try one mapping. Pre: the device is current.
  bool try_out(kvc_error &error);
  void set_uuid(const char *prefix, const unsigned char (&bytes)[16]);

  const Names &names_;
  driver::Calls calls_{};
  driver::AllocationProperties properties_{};
  kvc_device_info info_{};
};

} // namespace kvc
