// SPDX-License-Identifier: Apache-2.0
#include "journal.h"

#include <algorithm>

namespace kvc {

Journal::Journal(Backend &backend, size_t runs, size_t steps) : backend_(backend), stuck_(runs, 0) { steps_.reserve(steps); }

Result Journal::create(size_t run, uint64_t bytes, Handle *handle) {
  const Result result = backend_.create(bytes, handle);
  if (result.ok()) steps_.push_back({Kind::created, Access::read_write, run, 0, bytes, *handle});
  return result;
}

void Journal::taken(size_t run, Handle handle, uint64_t bytes) {
  steps_.push_back({Kind::taken, Access::read_write, run, 0, bytes, handle});
}

Result Journal::map(size_t run, uint64_t address, uint64_t bytes, Handle handle) {
  const Result result = backend_.map(address, bytes, handle);
  if (result.ok()) steps_.push_back({Kind::mapped, Access::read_write, run, address, bytes, handle});
  return result;
}

Result Journal::unmap(size_t run, uint64_t address, uint64_t bytes, Handle handle, Access access) {
  const Result result = backend_.unmap(address, bytes);
  if (result.ok()) steps_.push_back({Kind::unmapped, access, run, address, bytes, handle});
  return result;
}

bool Journal::rollback(Salvage &salvage) noexcept {
  bool all = true;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    if (stuck_[step->run]) continue;
    all = undo(*step, salvage) && all;
  }
  steps_.clear();
  return all;
}

bool Journal::undo(const Step &step, Salvage &salvage) noexcept {
  switch (step.kind) {
    case Kind::created:
      if (backend_.release(step.handle, step.bytes).ok()) return true;
      salvage.handle_lost(step.handle, step.bytes);
      return false;
    case Kind::taken:
      salvage.handle_back(step.handle, step.bytes);
      return true;
    case Kind::mapped:
      if (backend_.unmap(step.address, step.bytes).ok()) return true;
      break;
    case Kind::unmapped:
      if (backend_.map(step.address, step.bytes, step.handle).ok() && backend_.set_access(step.address, step.bytes, step.access).ok())
        return true;
      break;
  }
  stuck_[step.run] = 1;
  return false;
}

Result Spans::set_access(Backend &backend, Access access) {
  std::sort(spans_.begin(), spans_.end(), [](const Span &a, const Span &b) { return a.address < b.address; });
  for (size_t i = 0; i < spans_.size();) {
    Span whole = spans_[i++];
    while (backend.spans_mappings() && i < spans_.size() && spans_[i].address == whole.address + whole.bytes) whole.bytes += spans_[i++].bytes;
    const Result result = backend.set_access(whole.address, whole.bytes, access);
    if (!result.ok()) return result;
  }
  return Result{};
}

} // namespace kvc
