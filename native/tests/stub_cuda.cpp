// SPDX-License-Identifier: Apache-2.0
//
// The stub driver under CUDA's names. Memory calls need a current context, as strict readers of the manual expect.
#include <cstdio>
#include <vector>

#include "stub_driver.h"

using stub::driver;

namespace {

thread_local std::vector<void *> contexts;
char primary_context;

template <class Work>
int in_context(Work work) {
  return stub::call([&] { return contexts.empty() || contexts.back() != &primary_context ? int{stub::invalid_context} : work(); });
}

void identify(unsigned char *out, unsigned char seed) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<unsigned char>(seed + i);
}

} // namespace

STUB_API int64_t stub_get(int question) {
  if (question == stub::thread_depth) return static_cast<int64_t>(contexts.size());
  std::lock_guard<std::mutex> guard(driver.mutex);
  return driver.ask(question);
}

STUB_API int cuInit(unsigned) {
  return stub::call([] { return driver.options[stub::devices] == 0 ? stub::no_device : stub::ok; });
}
STUB_API int cuGetErrorString(int code, const char **out) { return *out = stub::words(code), stub::ok; }
STUB_API int cuDriverGetVersion(int *out) { return *out = 13000, stub::ok; }
STUB_API int cuDeviceGetCount(int *out) { return *out = static_cast<int>(driver.options[stub::devices]), stub::ok; }
STUB_API int cuDeviceGet(int *out, int ordinal) { return *out = ordinal, stub::ok; }
STUB_API int cuDeviceGetName(char *out, int room, int) { return snprintf(out, static_cast<size_t>(room), "stub card"), stub::ok; }
STUB_API int cuDeviceTotalMem_v2(size_t *out, int) { return *out = driver.capacity, stub::ok; }
STUB_API int cuDeviceGetUuid(unsigned char *out, int) { return identify(out, 0x10), stub::ok; }
STUB_API int cuDeviceGetUuid_v2(unsigned char *out, int) {
  return identify(out, driver.options[stub::slice] != 0 ? 0x40 : 0x10), stub::ok;
}
STUB_API int cuDeviceGetAttribute(int *out, int which, int) {
  return stub::call([&] {
    *out = which == 102 ? static_cast<int>(driver.options[stub::vmm_supported]) : which == 110 ? static_cast<int>(driver.options[stub::rdma_supported]) : 0;
    return stub::ok;
  });
}
STUB_API int cuDevicePrimaryCtxRetain(void **out, int) {
  return stub::call([&] { return *out = &primary_context, ++driver.retained_contexts, stub::ok; });
}
STUB_API int cuDevicePrimaryCtxRelease_v2(int) {
  return stub::call([] { return --driver.retained_contexts, stub::ok; });
}
STUB_API int cuCtxPushCurrent_v2(void *context) {
  return stub::call([&] { return contexts.push_back(context), stub::ok; });
}
STUB_API int cuCtxPopCurrent_v2(void **out) {
  if (contexts.empty()) return stub::invalid_context;
  *out = contexts.back();
  contexts.pop_back();
  return stub::ok;
}
STUB_API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  return in_context([&] { return driver.memory(free_bytes, total), int{stub::ok}; });
}
STUB_API int cuMemGetAllocationGranularity(size_t *out, const stub::Properties *, int) {
  return stub::call([&] { return *out = driver.granularity, stub::ok; });
}
STUB_API int cuMemAddressReserve(uint64_t *base, size_t bytes, size_t, uint64_t, unsigned long long) {
  return in_context([&] { return driver.reserve(base, bytes); });
}
STUB_API int cuMemAddressFree(uint64_t base, size_t bytes) {
  return in_context([&] { return driver.free_range(base, bytes); });
}
STUB_API int cuMemCreate(uint64_t *handle, size_t bytes, const stub::Properties *wanted, unsigned long long) {
  return in_context([&] { return driver.create(handle, bytes, wanted); });
}
STUB_API int cuMemRelease(uint64_t handle) {
  return in_context([&] { return driver.release(handle); });
}
STUB_API int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  return in_context([&] { return driver.map(address, bytes, offset, handle); });
}
STUB_API int cuMemSetAccess(uint64_t address, size_t bytes, const stub::Access *wanted, size_t count) {
  return in_context([&] { return driver.set_access(address, bytes, wanted, count, false); });
}
STUB_API int cuMemUnmap(uint64_t address, size_t bytes) {
  return in_context([&] { return driver.unmap(address, bytes); });
}
STUB_API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  return in_context([&] { return driver.copy(to, reinterpret_cast<void *>(from), from, bytes, 1); });
}
STUB_API int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  return in_context([&] { return driver.copy(reinterpret_cast<void *>(to), from, to, bytes, 3); });
}
