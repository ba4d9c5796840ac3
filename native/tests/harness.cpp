// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace contract {

int failures = 0;
Setting setting;

void fail(const char *file, int line, const std::string &what) {
  ++failures;
  if (failures <= 40) fprintf(stderr, "FAILED %s:%d: %s\n", file, line, what.c_str());
}

void check_equal(const char *file, int line, const char *what, int64_t actual, int64_t wanted) {
  if (actual != wanted) fail(file, line, std::string(what) + " is " + std::to_string(actual) + ", not " + std::to_string(wanted));
}

kvc_device_options options() {
  kvc_device_options result{};
  result.backend = setting.backend;
  if (setting.backend == KVC_HOST) {
    result.host_capacity = setting.capacity;
    result.host_granularity = setting.granularity;
    result.host_dir = setting.directory.c_str();
  }
  result.driver_library = setting.library.empty() ? nullptr : setting.library.c_str();
  return result;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

namespace {

// Host memory, touched by the kernel on our behalf: it says EFAULT where we would die.
class HostMemory final : public Memory {
 public:
  HostMemory() { CHECK(pipe(ends_) == 0); }
  ~HostMemory() override { close(ends_[0]), close(ends_[1]); }
  bool read(uint64_t address, void *out, size_t bytes) override {
    return pass(reinterpret_cast<void *>(address), static_cast<char *>(out), bytes);
  }
  bool write(uint64_t address, const void *data, size_t bytes) override {
    return pass(data, reinterpret_cast<char *>(address), bytes);
  }

 private:
  bool pass(const void *from, char *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const size_t step = std::min<size_t>(4096, bytes - done);
      if (::write(ends_[1], static_cast<const char *>(from) + done, step) != static_cast<ssize_t>(step)) return false;
      if (::read(ends_[0], to + done, step) != static_cast<ssize_t>(step)) {
        char drain[4096];
        CHECK(::read(ends_[0], drain, step) == static_cast<ssize_t>(step));
        return false;
      }
      done += step;
    }
    return true;
  }
  int ends_[2] = {-1, -1};
};

class DriverMemory final : public Memory {
 public:
  DriverMemory() {
    const bool cuda = setting.backend == KVC_CUDA;
    const char *name = cuda ? "libcuda.so.1" : "libamdhip64.so";
    void *library = dlopen(setting.library.empty() ? name : setting.library.c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    find(library, cuda ? "cuMemcpyDtoH_v2" : "hipMemcpyDtoH", &to_host_);
    find(library, cuda ? "cuMemcpyHtoD_v2" : "hipMemcpyHtoD", &to_device_);
    if (!cuda) {
      find(library, "hipSetDevice", &set_device_);
      return;
    }
    int (*retain)(void **, int) = nullptr;
    find(library, "cuDevicePrimaryCtxRetain", &retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", &release_);
    find(library, "cuCtxPushCurrent_v2", &push_);
    find(library, "cuCtxPopCurrent_v2", &pop_);
    CHECK_EQ(retain(&context_, 0), 0);
  }
  ~DriverMemory() override {
    if (release_ != nullptr) release_(0);
  }
  bool read(uint64_t address, void *out, size_t bytes) override {
    return current([&] { return to_host_(out, address, bytes); });
  }
  bool write(uint64_t address, const void *data, size_t bytes) override {
    return current([&] { return to_device_(address, data, bytes); });
  }

 private:
  template <class Function>
  void find(void *library, const char *name, Function **out) {
    *out = reinterpret_cast<Function *>(dlsym(library, name));
    CHECK(*out != nullptr);
  }
  bool current(const std::function<int()> &work) {
    if (set_device_ != nullptr) {
      set_device_(0);
      const int code = work();
      set_device_(1);
      return code == 0;
    }
    void *ours = nullptr;
    CHECK_EQ(push_(context_), 0);
    const int code = work();
    CHECK_EQ(pop_(&ours), 0);
    return code == 0;
  }
  int (*to_host_)(void *, uint64_t, size_t) = nullptr;
  int (*to_device_)(uint64_t, const void *, size_t) = nullptr;
  int (*set_device_)(int) = nullptr;
  int (*push_)(void *) = nullptr;
  int (*pop_)(void **) = nullptr;
  int (*release_)(int) = nullptr;
  void *context_ = nullptr;
};

} // namespace

std::unique_ptr<Memory> open_memory() {
  if (setting.backend == KVC_HOST) return std::make_unique<HostMemory>();
  return std::make_unique<DriverMemory>();
}

bool Memory::readable(uint64_t address) {
  char byte = 0;
  return read(address, &byte, 1);
}

bool Memory::writable(uint64_t address) {
  const char byte = 1;
  return write(address, &byte, 1);
}

bool Memory::fill(uint64_t address, uint64_t bytes, uint8_t value) {
  const std::vector<uint8_t> data(bytes, value);
  return write(address, data.data(), bytes);
}

bool Memory::holds(uint64_t address, uint64_t bytes, uint8_t value) {
  std::vector<uint8_t> data(bytes, static_cast<uint8_t>(~value));
  if (!read(address, data.data(), bytes)) return false;
  return data.front() == value && memcmp(data.data(), data.data() + 1, bytes - 1) == 0; // each byte equals its neighbour
}

// ---- device ---------------------------------------------------------------------------------------------------------

Device::Device() {
  const kvc_device_options wanted = options();
  kvc_error error{};
  if (kvc_device_open(&wanted, &device_, &error) != KVC_OK) {
    fprintf(stderr, "the device cannot be opened: %s (%s)\n", error.message, error.call);
    _exit(2);
  }
  CHECK_EQ(kvc_device_get_info(device_, &info_, &error), KVC_OK);
}

Device::~Device() {
  kvc_error error{};
  CHECK_EQ(kvc_device_close(device_, &error), KVC_OK);
}

void Device::fail_call(int kind, uint64_t nth, bool from_there_on, int code) {
  CHECK_EQ(kvc_device_fail(device_, kind, nth, from_there_on, code, nullptr), KVC_OK);
}

void Device::clear_faults() {
  for (int kind = 0; kind < KVC_CALL_KINDS; ++kind) fail_call(kind, 0);
}

uint64_t Device::calls(int kind) {
  uint64_t counts[KVC_CALL_KINDS] = {};
  CHECK_EQ(kvc_device_calls(device_, counts, nullptr, nullptr), KVC_OK);
  return counts[kind];
}

uint64_t Device::free_bytes() {
  uint64_t free_now = 0, total = 0;
  CHECK_EQ(kvc_device_memory(device_, &free_now, &total, nullptr), KVC_OK);
  return free_now;
}

uint64_t live_handles(Device &device) { return device.calls(KVC_CALL_CREATE) - device.calls(KVC_CALL_RELEASE); }

// ---- arena ----------------------------------------------------------------------------------------------------------

Arena::Arena(Device &device, const Shape &shape) : shape_(shape) {
  page_bytes_ = shape.granules_per_page * device.granularity();
  stride_ = (shape.pages + shape.pages_between_planes) * page_bytes_;
  const kvc_arena_config config{page_bytes_, shape.pages, shape.planes, shape.zero, stride_, shape.history};
  if (kvc_arena_create(device.get(), &config, &arena_, &error) != KVC_OK) fail(__FILE__, __LINE__, std::string("create: ") + error.message);
}

Arena::~Arena() {
  if (arena_ != nullptr) CHECK_EQ(destroy(), KVC_OK);
}

uint64_t Arena::address(uint64_t page, uint32_t plane) const { return kvc_arena_base(arena_) + plane * stride_ + page * page_bytes_; }

int Arena::map(const std::vector<kvc_run> &runs) {
  bad.assign(runs.size(), kvc_run{});
  size_t count = 0;
  const int status = kvc_arena_map(arena_, runs.data(), runs.size(), bad.data(), bad.size(), &count, &error);
  bad.resize(count);
  return status;
}

int Arena::unmap(const std::vector<kvc_run> &runs, bool keep) { return kvc_arena_unmap(arena_, runs.data(), runs.size(), keep, &error); }
int Arena::prepare(uint64_t tx, const std::vector<kvc_run> &runs) {
  return kvc_arena_unmap_prepare(arena_, tx, runs.data(), runs.size(), &error);
}
int Arena::commit(uint64_t tx, bool keep) { return kvc_arena_unmap_commit(arena_, tx, keep, &error); }
int Arena::abort(uint64_t tx) { return kvc_arena_unmap_abort(arena_, tx, &error); }
int Arena::acquire(uint64_t run_pages, uint64_t runs) { return kvc_arena_acquire(arena_, run_pages, runs, &error); }

uint64_t Arena::trim() {
  uint64_t released = 0;
  CHECK_EQ(kvc_arena_trim(arena_, 0, UINT64_MAX, &released, &error), KVC_OK);
  return released;
}

kvc_arena_stats Arena::stats() {
  kvc_arena_stats result{};
  CHECK_EQ(kvc_arena_get_stats(arena_, &result, &error), KVC_OK);
  return result;
}

uint64_t Arena::held() {
  const kvc_arena_stats now = stats();
  return now.mapped_bytes + now.prepared_bytes + now.cached_bytes + now.zero_bytes + now.quarantined_bytes;
}

std::vector<kvc_run> Arena::quarantined() {
  std::vector<kvc_run> runs(shape_.pages);
  size_t count = 0;
  CHECK_EQ(kvc_arena_quarantined(arena_, runs.data(), runs.size(), &count, &error), KVC_OK);
  runs.resize(count);
  return runs;
}

int Arena::destroy() {
  if (arena_ == nullptr) return KVC_OK;
  kvc_arena *gone = arena_;
  arena_ = nullptr;
  return kvc_arena_destroy(gone, &error);
}

bool same(const kvc_arena_stats &a, const kvc_arena_stats &b) { return memcmp(&a, &b, sizeof a) == 0; }

} // namespace contract
