// SPDX-License-Identifier: Apache-2.0
//
// A layer between arenas and any backend: counts and times the driver calls, and makes them fail on demand.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "backend.h"

namespace kvc {

class Meter final : public Backend {
 public:
  explicit Meter(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  // Fail the nth call of `kind` from now (0: none), only that one or all from it on. Code 0: out of memory.
  void fail(kvc_call kind, uint64_t nth, bool from_there_on, int code);
  uint64_t count(kvc_call kind) const { return counters_[kind].calls; }
  uint64_t nanoseconds(kvc_call kind) const { return counters_[kind].nanoseconds; }

  const kvc_device_info &info() const override { return inner_->info(); }
  Result memory(uint64_t *free_bytes, uint64_t *total_bytes) override { return inner_->memory(free_bytes, total_bytes); }
  Result enter(int64_t *previous) override { return inner_->enter(previous); }
  void leave(int64_t previous) override { inner_->leave(previous); }
  Result reserve(uint64_t bytes, uint64_t *base) override;
  Result free_range(uint64_t base, uint64_t bytes) override;
  Result create(uint64_t bytes, Handle *handle) override;
  Result release(Handle handle, uint64_t bytes) override;
  Result map(uint64_t address, uint64_t bytes, Handle handle) override;
  bool spans_mappings() const override { return inner_->spans_mappings(); }
  Result set_access(uint64_t address, uint64_t bytes, Access access) override;
  Result unmap(uint64_t address, uint64_t bytes) override;
  Result failure(kvc_call kind, int code, uint64_t bytes) const override { return inner_->failure(kind, code, bytes); }
  const char *describe(int code) const override { return inner_->describe(code); }
  bool gone(int code) const override { return inner_->gone(code); }

 private:
  struct Counter {
    std::atomic<uint64_t> calls{0};
    std::atomic<uint64_t> nanoseconds{0};
  };
  struct Fault {
    std::atomic<bool> armed{false};
    uint64_t countdown = 0;
    bool from_there_on = false;
    int code = 0;
  };
  template <class Call>
  Result metered(kvc_call kind, uint64_t bytes, Call call);
  bool strikes(Fault &fault, int *code);

  std::unique_ptr<Backend> inner_;
  std::array<Counter, KVC_CALL_KINDS> counters_;
  std::array<Fault, KVC_CALL_KINDS> faults_;
  std::mutex faults_lock_;
};

} // namespace kvc
