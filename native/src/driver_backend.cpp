// SPDX-License-Identifier: Apache-2.0
#include "driver_backend.h"

#include <dlfcn.h>

#include <cinttypes>
#include <cstdio>

namespace kvc {
namespace driver {

Library Library::open(const char *chosen, const char *const *names, kvc_error &error) {
  Library library;
  const char *const only[] = {chosen, nullptr};
  const char *first_reason = nullptr;
  char reason[160] = "";
  for (const char *const *name = chosen != nullptr ? only : names; *name != nullptr && !library.is_open(); ++name) {
    library.handle_ = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
    if (library.is_open() || first_reason != nullptr) continue;
    first_reason = dlerror();
    snprintf(reason, sizeof reason, "%s", first_reason == nullptr ? *name : first_reason);
  }
  if (!library.is_open()) error = ended(KVC_UNAVAILABLE, "dlopen", "no driver on this machine: %s", reason);
  return library;
}

void *Library::symbol(const char *name) const { return dlsym(handle_, name); }

} // namespace driver

using driver::AccessDescription;

DriverBackend::DriverBackend(const Names &names, int backend, int ordinal) : names_(names) {
  properties_.type = driver::kPinned;
  properties_.location = {driver::kDevice, ordinal};
  info_.backend = backend;
  info_.ordinal = ordinal;
}

bool DriverBackend::find_calls(const driver::Library &library, const char *granularity, const char *memory_info, kvc_error &error) {
  return library.find(names_[KVC_CALL_RESERVE], &calls_.reserve, error) && library.find(names_[KVC_CALL_FREE], &calls_.free_range, error) &&
         library.find(names_[KVC_CALL_CREATE], &calls_.create, error) && library.find(names_[KVC_CALL_RELEASE], &calls_.release, error) &&
         library.find(names_[KVC_CALL_MAP], &calls_.map, error) && library.find(names_[KVC_CALL_ACCESS], &calls_.set_access, error) &&
         library.find(names_[KVC_CALL_UNMAP], &calls_.unmap, error) && library.find(granularity, &calls_.granularity, error) &&
         library.find(memory_info, &calls_.memory_info, error);
}

bool DriverBackend::try_out(kvc_error &error) {
  size_t granularity = 0;
  const int code = calls_.granularity(&granularity, &properties_, driver::kMinimumGranularity);
  if (code != 0 || granularity == 0)
    return error = ended(KVC_UNAVAILABLE, "granularity", "the driver does not say its allocation granularity: %s", describe(code)), false;
  info_.granularity = granularity;
  info_.map_granularity_known = 1;
  Result failed_step;
  if (can_map(*this, failed_step)) return true;
  error = ended(KVC_UNAVAILABLE, failed_step.call, "the driver offers virtual memory management, but a trial mapping failed: %s",
                describe(failed_step.code));
  error.driver_code = failed_step.code;
  error.bytes = failed_step.bytes;
  return false;
}

void DriverBackend::set_uuid(const char *prefix, const unsigned char (&bytes)[16]) {
  int at = snprintf(info_.uuid, sizeof info_.uuid, "%s-", prefix);
  for (int i = 0; i < 16; ++i) {
    const bool dash = i == 4 || i == 6 || i == 8 || i == 10;
    at += snprintf(info_.uuid + at, sizeof info_.uuid - static_cast<size_t>(at), dash ? "-%02x" : "%02x", bytes[i]);
  }
}

Result DriverBackend::memory(uint64_t *free_bytes, uint64_t *total_bytes) {
  size_t free_now = 0, total = 0;
  const int code = calls_.memory_info(&free_now, &total);
  if (code != 0) {
    Result result = failure(KVC_CALL_CREATE, code, 0);
    result.call = "memory info";
    return result;
  }
  *free_bytes = free_now;
  *total_bytes = total;
  return Result{};
}

Result DriverBackend::reserve(uint64_t bytes, uint64_t *base) {
  return of(KVC_CALL_RESERVE, calls_.reserve(base, bytes, 0, 0, 0), bytes);
}

Result DriverBackend::free_range(uint64_t base, uint64_t bytes) { return of(KVC_CALL_FREE, calls_.free_range(base, bytes), bytes); }

Result DriverBackend::create(uint64_t bytes, Handle *handle) {
  return of(KVC_CALL_CREATE, calls_.create(handle, bytes, &properties_, 0), bytes);
}

Result DriverBackend::release(Handle handle, uint64_t bytes) { return of(KVC_CALL_RELEASE, calls_.release(handle), bytes); }

Result DriverBackend::map(uint64_t address, uint64_t bytes, Handle handle) {
  return of(KVC_CALL_MAP, calls_.map(address, bytes, 0, handle, 0), bytes);
}

Result DriverBackend::set_access(uint64_t address, uint64_t bytes, Access access) {
  const AccessDescription wanted{properties_.location, access == Access::read_write ? driver::kReadWrite : driver::kReadOnly};
  return of(KVC_CALL_ACCESS, calls_.set_access(address, bytes, &wanted, 1), bytes);
}

Result DriverBackend::unmap(uint64_t address, uint64_t bytes) { return of(KVC_CALL_UNMAP, calls_.unmap(address, bytes), bytes); }

Result DriverBackend::failure(kvc_call kind, int code, uint64_t bytes) const {
  Result result;
  result.code = code == 0 ? driver::kOutOfMemory : code;
  result.status = result.code == driver::kOutOfMemory ? KVC_OUT_OF_MEMORY : KVC_BROKEN;
  result.call = names_[kind];
  result.bytes = bytes;
  return result;
}

} // namespace kvc
