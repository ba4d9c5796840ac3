// SPDX-License-Identifier: Apache-2.0
//
// A graphics driver made of host memory, strict about everything that a real one is strict about. stub_cuda.cpp and
// stub_hip.cpp give it the names of their drivers. Tests reach its state through the stub_* functions.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

namespace stub {

enum Code { ok = 0, invalid_value = 1, out_of_memory = 2, deinitialized = 4, no_device = 100, invalid_context = 201, illegal_address = 700, not_supported = 801 };

// What tests can set and ask; the numbers are known to the Python tests too.
enum Option { vmm_supported = 0, rdma_supported = 1, rdma_breaks_access = 2, create_breaks = 3, shut_down = 4, devices = 5, slice = 6 };
enum Question { live_handles = 0, live_bytes = 1, live_mappings = 2, live_ranges = 3, thread_depth = 4, retained = 5, rdma_handles = 6 };

struct Location {
  int type, id;
};
struct Properties {
  int type, requested;
  Location location;
  void *meta;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct Access {
  Location location;
  int flags;
};

struct Physical {
  uint64_t bytes;
  off_t offset;
  int mappings;
  bool released, rdma;
};
struct Mapping {
  uint64_t bytes, handle;
  int flags;
};

class Driver {
 public:
  std::mutex mutex;
  uint64_t capacity = uint64_t{1} << 30, granularity = uint64_t{2} << 20;
  int64_t options[7] = {1, 0, 0, 0, 0, 2, 0};
  int retained_contexts = 0;

  int reserve(uint64_t *base, uint64_t bytes) {
    if (base == nullptr || bytes == 0 || bytes % granularity != 0) return invalid_value;
    void *range = mmap(nullptr, bytes + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return out_of_memory;
    const uint64_t start = reinterpret_cast<uint64_t>(range);
    *base = (start + granularity - 1) / granularity * granularity;
    ranges_[*base] = {bytes, start};
    return ok;
  }

  int free_range(uint64_t base, uint64_t bytes) {
    const auto range = ranges_.find(base);
    if (range == ranges_.end() || range->second.bytes != bytes || any_mapping(base, bytes)) return invalid_value;
    munmap(reinterpret_cast<void *>(range->second.start), bytes + granularity);
    ranges_.erase(range);
    return ok;
  }

  int create(uint64_t *handle, uint64_t bytes, const Properties *wanted) {
    if (handle == nullptr || wanted == nullptr || wanted->type != 1 || wanted->location.type != 1 || wanted->location.id != 0) return invalid_value;
    if (bytes == 0 || bytes % granularity != 0) return invalid_value;
    if (options[create_breaks] != 0) return not_supported;
    if (used_ + bytes > capacity) return out_of_memory;
    if (file_ < 0) file_ = memfd_create("stub", MFD_CLOEXEC);
    if (ftruncate(file_, end_ + static_cast<off_t>(bytes)) != 0) return out_of_memory;
    used_ += bytes;
    *handle = next_handle_++;
    physical_[*handle] = {bytes, end_, 0, false, wanted->rdma != 0};
    end_ += static_cast<off_t>(bytes);
    return ok;
  }

  int release(uint64_t handle) {
    const auto found = physical_.find(handle);
    if (found == physical_.end() || found->second.released) return invalid_value;
    found->second.released = true;
    drop(found);
    return ok;
  }

  int map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle) {
    const auto found = physical_.find(handle);
    if (offset != 0) return not_supported; // as measured on a real one
    if (found == physical_.end() || found->second.released || found->second.bytes != bytes) return invalid_value;
    if (!inside_range(address, bytes) || any_mapping(address, bytes)) return invalid_value;
    if (mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, found->second.offset) == MAP_FAILED) return out_of_memory;
    mappings_[address] = {bytes, handle, 0};
    ++found->second.mappings;
    return ok;
  }

  int set_access(uint64_t address, uint64_t bytes, const Access *wanted, size_t count, bool one_mapping) {
    if (wanted == nullptr || count != 1 || wanted->location.type != 1 || wanted->location.id != 0) return invalid_value;
    if (!covered(address, bytes, 0)) return invalid_value;
    if (one_mapping && mappings_.at(address).bytes != bytes) return invalid_value;
    const int protection = wanted->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    if (wanted->flags != 3 && wanted->flags != 1) return invalid_value;
    for (auto mapping = mappings_.find(address); mapping != mappings_.end() && mapping->first < address + bytes; ++mapping) {
      if (options[rdma_breaks_access] != 0 && physical_.at(mapping->second.handle).rdma) return not_supported;
      mapping->second.flags = wanted->flags;
    }
    return mprotect(at(address), bytes, protection) == 0 ? ok : out_of_memory;
  }

  int unmap(uint64_t address, uint64_t bytes) {
    const auto mapping = mappings_.find(address);
    if (mapping == mappings_.end() || mapping->second.bytes != bytes) return invalid_value;
    if (mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return out_of_memory;
    const auto found = physical_.find(mapping->second.handle);
    mappings_.erase(mapping);
    --found->second.mappings;
    drop(found);
    return ok;
  }

  // A copy by the device: 700 where a kernel would have faulted.
  int copy(void *to, const void *from, uint64_t device_address, uint64_t bytes, int needed) {
    if (!reaches(device_address, bytes, needed)) return illegal_address;
    memcpy(to, from, bytes);
    return ok;
  }

  void memory(size_t *free_bytes, size_t *total) {
    *free_bytes = capacity - used_;
    *total = capacity;
  }

  int64_t ask(int question) {
    int64_t rdma = 0;
    for (const auto &entry : physical_) rdma += entry.second.rdma;
    switch (question) {
      case live_handles: return static_cast<int64_t>(physical_.size());
      case live_bytes: return static_cast<int64_t>(used_);
      case live_mappings: return static_cast<int64_t>(mappings_.size());
      case live_ranges: return static_cast<int64_t>(ranges_.size());
      case retained: return retained_contexts;
      case rdma_handles: return rdma;
      default: return -1;
    }
  }

 private:
  struct Range {
    uint64_t bytes, start;
  };
  static void *at(uint64_t address) { return reinterpret_cast<void *>(address); }

  void drop(std::map<uint64_t, Physical>::iterator found) {
    if (!found->second.released || found->second.mappings != 0) return;
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->second.offset, static_cast<off_t>(found->second.bytes));
    used_ -= found->second.bytes;
    physical_.erase(found);
  }

  bool inside_range(uint64_t address, uint64_t bytes) const {
    auto range = ranges_.upper_bound(address);
    if (range == ranges_.begin()) return false;
    --range;
    return address + bytes <= range->first + range->second.bytes && (address - range->first) % granularity == 0;
  }

  bool any_mapping(uint64_t address, uint64_t bytes) const {
    auto mapping = mappings_.lower_bound(address);
    if (mapping != mappings_.end() && mapping->first < address + bytes) return true;
    if (mapping == mappings_.begin()) return false;
    --mapping;
    return mapping->first + mapping->second.bytes > address;
  }

  // Whole mappings side by side from `address` on, with at least the access `needed`.
  bool covered(uint64_t address, uint64_t bytes, int needed) const {
    const uint64_t end = address + bytes;
    while (address < end) {
      const auto mapping = mappings_.find(address);
      if (mapping == mappings_.end() || (mapping->second.flags & needed) != needed) return false;
      address += mapping->second.bytes;
    }
    return address == end;
  }

  // As covered(), from any address on.
  bool reaches(uint64_t address, uint64_t bytes, int needed) const {
    const uint64_t end = address + bytes;
    while (address < end) {
      auto mapping = mappings_.upper_bound(address);
      if (mapping == mappings_.begin()) return false;
      --mapping;
      if (address >= mapping->first + mapping->second.bytes || (mapping->second.flags & needed) != needed) return false;
      address = mapping->first + mapping->second.bytes;
    }
    return true;
  }

  int file_ = -1;
  off_t end_ = 0;
  uint64_t used_ = 0, next_handle_ = 0x1000;
  std::map<uint64_t, Range> ranges_;
  std::map<uint64_t, Physical> physical_;
  std::map<uint64_t, Mapping> mappings_;
};

inline Driver driver;

inline const char *words(int code) {
  switch (code) {
    case ok: return "no error";
    case invalid_value: return "invalid argument";
    case out_of_memory: return "out of memory";
    case deinitialized: return "driver shutting down";
    case no_device: return "no device";
    case invalid_context: return "invalid device context";
    case illegal_address: return "an illegal memory access was encountered";
    case not_supported: return "operation not supported";
    default: return "unknown error";
  }
}

// One driver call: alone, and refused after the driver was shut down.
template <class Work>
int call(Work work) {
  std::lock_guard<std::mutex> guard(driver.mutex);
  if (driver.options[shut_down] != 0) return deinitialized;
  return work();
}

} // namespace stub

#define STUB_API extern "C" __attribute__((visibility("default")))

STUB_API void stub_size(uint64_t capacity, uint64_t granularity) {
  std::lock_guard<std::mutex> guard(stub::driver.mutex);
  stub::driver.capacity = capacity;
  stub::driver.granularity = granularity;
}
STUB_API void stub_set(int option, int64_t value) {
  std::lock_guard<std::mutex> guard(stub::driver.mutex);
  stub::driver.options[option] = value;
}
