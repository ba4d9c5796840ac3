// SPDX-License-Identifier: Apache-2.0
//
// The stub driver under HIP's names. A thread has a current device; memory calls insist that it is the right one.
#include <cstdio>

#include "stub_driver.h"

using stub::driver;

namespace {

thread_local int current_device = 1; // another than the one under test: it must be chosen, and restored

template <class Work>
int on_device(Work work) {
  return stub::call([&] { return current_device != 0 ? int{stub::invalid_context} : work(); });
}

} // namespace

// The depth is how far the thread is from the device that it had at first.
STUB_API int64_t stub_get(int question) {
  if (question == stub::thread_depth) return current_device == 1 ? 0 : 1;
  std::lock_guard<std::mutex> guard(driver.mutex);
  return driver.ask(question);
}

STUB_API int hipInit(unsigned) {
  return stub::call([] { return driver.options[stub::devices] == 0 ? stub::no_device : stub::ok; });
}
STUB_API const char *hipGetErrorString(int code) { return stub::words(code); }
STUB_API int hipDriverGetVersion(int *out) { return *out = 60000000, stub::ok; }
STUB_API int hipGetDeviceCount(int *out) { return *out = static_cast<int>(driver.options[stub::devices]), stub::ok; }
STUB_API int hipDeviceGet(int *out, int ordinal) { return *out = ordinal, stub::ok; }
STUB_API int hipDeviceGetName(char *out, int room, int) { return snprintf(out, static_cast<size_t>(room), "stub card"), stub::ok; }
STUB_API int hipDeviceTotalMem(size_t *out, int) { return *out = driver.capacity, stub::ok; }
STUB_API int hipDeviceGetUuid(unsigned char *out, int) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<unsigned char>(i);
  return stub::ok;
}
STUB_API int hipGetDevice(int *out) {
  return stub::call([&] { return *out = current_device, stub::ok; });
}
STUB_API int hipSetDevice(int device) {
  return stub::call([&] { return current_device = device, stub::ok; });
}
STUB_API int hipMemGetInfo(size_t *free_bytes, size_t *total) {
  return on_device([&] { return driver.memory(free_bytes, total), int{stub::ok}; });
}
STUB_API int hipMemGetAllocationGranularity(size_t *out, const stub::Properties *, int) {
  return stub::call([&] { return *out = driver.granularity, driver.options[stub::vmm_supported] != 0 ? stub::ok : stub::not_supported; });
}
STUB_API int hipMemAddressReserve(uint64_t *base, size_t bytes, size_t, void *, unsigned long long) {
  return on_device([&] { return driver.reserve(base, bytes); });
}
STUB_API int hipMemAddressFree(uint64_t base, size_t bytes) {
  return on_device([&] { return driver.free_range(base, bytes); });
}
STUB_API int hipMemCreate(uint64_t *handle, size_t bytes, const stub::Properties *wanted, unsigned long long) {
  return on_device([&] { return driver.create(handle, bytes, wanted); });
}
STUB_API int hipMemRelease(uint64_t handle) {
  return on_device([&] { return driver.release(handle); });
}
STUB_API int hipMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  return on_device([&] { return driver.map(address, bytes, offset, handle); });
}
STUB_API int hipMemSetAccess(uint64_t address, size_t bytes, const stub::Access *wanted, size_t count) {
  return on_device([&] { return driver.set_access(address, bytes, wanted, count, true); });
}
STUB_API int hipMemUnmap(uint64_t address, size_t bytes) {
  return on_device([&] { return driver.unmap(address, bytes); });
}
STUB_API int hipMemcpyDtoH(void *to, uint64_t from, size_t bytes) {
  return on_device([&] { return driver.copy(to, reinterpret_cast<void *>(from), from, bytes, 1); });
}
STUB_API int hipMemcpyHtoD(uint64_t to, const void *from, size_t bytes) {
  return on_device([&] { return driver.copy(reinterpret_cast<void *>(to), from, to, bytes, 3); });
}
