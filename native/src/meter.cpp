// SPDX-License-Identifier: Apache-2.0
#include "meter.h"

#include <chrono>

namespace kvc {

void Meter::fail(kvc_call kind, uint64_t nth, bool from_there_on, int code) {
  std::lock_guard<std::mutex> guard(faults_lock_);
  Fault &fault = faults_[kind];
  fault.countdown = nth;
  fault.from_there_on = from_there_on;
  fault.code = code;
  fault.armed = nth != 0;
}

bool Meter::strikes(Fault &fault, int *code) {
  if (!fault.armed) return false;
  std::lock_guard<std::mutex> guard(faults_lock_);
  if (!fault.armed) return false;
  if (fault.countdown > 1) {
    --fault.countdown;
    return false;
  }
  *code = fault.code;
  fault.armed = fault.from_there_on;
  return true;
}

template <class Call>
Result Meter::metered(kvc_call kind, uint64_t bytes, Call call) {
  int code = 0;
  if (strikes(faults_[kind], &code)) return inner_->failure(kind, code, bytes);
  const auto start = std::chrono::steady_clock::now();
  const Result result = call();
  const auto spent = std::chrono::steady_clock::now() - start;
  if (!result.ok()) return result;
  counters_[kind].calls += 1;
  counters_[kind].nanoseconds += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  return result;
}

Result Meter::reserve(uint64_t bytes, uint64_t *base) {
  return metered(KVC_CALL_RESERVE, bytes, [&] { return inner_->reserve(bytes, base); });
}
Result Meter::free_range(uint64_t base, uint64_t bytes) {
  return metered(KVC_CALL_FREE, bytes, [&] { return inner_->free_range(base, bytes); });
}
Result Meter::create(uint64_t bytes, Handle *handle) {
  return metered(KVC_CALL_CREATE, bytes, [&] { return inner_->create(bytes, handle); });
}
Result Meter::release(Handle handle, uint64_t bytes) {
  return metered(KVC_CALL_RELEASE, bytes, [&] { return inner_->release(handle, bytes); });
}
Result Meter::map(uint64_t address, uint64_t bytes, Handle handle) {
  return metered(KVC_CALL_MAP, bytes, [&] { return inner_->map(address, bytes, handle); });
}
Result Meter::set_access(uint64_t address, uint64_t bytes, Access access) {
  return metered(KVC_CALL_ACCESS, bytes, [&] { return inner_->set_access(address, bytes, access); });
}
Result Meter::unmap(uint64_t address, uint64_t bytes) {
  return metered(KVC_CALL_UNMAP, bytes, [&] { return inner_->unmap(address, bytes); });
}

} // namespace kvc
