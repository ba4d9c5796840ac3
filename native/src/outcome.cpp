// SPDX-License-Identifier: Apache-2.0
#include "outcome.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace kvc {
namespace {

kvc_error blank(int status, const char *call) {
  kvc_error error{};
  error.status = status;
  snprintf(error.call, sizeof error.call, "%s", call);
  return error;
}

const char *sentence(int status) {
  switch (status) {
    case KVC_OUT_OF_MEMORY: return "the device has no memory left";
    case KVC_OUT_OF_MAPS: return "the kernel's map entries ran out (vm.max_map_count)";
    case KVC_UNAVAILABLE: return "the device cannot be used";
    case KVC_REFUSED: return "the call is not allowed";
    default: return "the driver call failed";
  }
}

} // namespace

kvc_error success() { return kvc_error{}; }

kvc_error refused(const char *argument, const char *format, ...) {
  kvc_error error = blank(KVC_REFUSED, argument);
  va_list list;
  va_start(list, format);
  vsnprintf(error.message, sizeof error.message, format, list);
  va_end(list);
  return error;
}

kvc_error ended(int status, const char *call, const char *format, ...) {
  kvc_error error = blank(status, call);
  va_list list;
  va_start(list, format);
  vsnprintf(error.message, sizeof error.message, format, list);
  va_end(list);
  return error;
}

kvc_error failed(const Backend &backend, const Result &result) {
  kvc_error error = blank(result.status, result.call);
  error.driver_code = result.code;
  error.bytes = result.bytes;
  snprintf(error.message, sizeof error.message, "%s: %s", sentence(result.status), backend.describe(result.code));
  return error;
}

kvc_error not_undone(const kvc_error &cause) {
  kvc_error error = cause;
  error.status = KVC_QUARANTINED;
  snprintf(error.message, sizeof error.message, "undoing a failed call failed too, what it concerns is fenced off (%.120s)", cause.message);
  return error;
}

bool can_map(Backend &backend, Result &failed) {
  const uint64_t bytes = backend.info().granularity;
  uint64_t base = 0;
  Handle handle = 0;
  bool reserved = false, created = false, mapped = false;
  auto step = [&](bool &done, const Result &result) {
    done = result.ok();
    if (!done) failed = result;
    return done;
  };
  bool works = step(reserved, backend.reserve(bytes, &base)) && step(created, backend.create(bytes, &handle)) &&
               step(mapped, backend.map(base, bytes, handle));
  bool accessible = false;
  works = works && step(accessible, backend.set_access(base, bytes, Access::read_write));
  bool down = true;
  if (mapped) works = step(down, backend.unmap(base, bytes)) && works;
  if (created) works = step(down, backend.release(handle, bytes)) && works;
  if (reserved) works = step(down, backend.free_range(base, bytes)) && works;
  return works;
}

} // namespace kvc
