// SPDX-License-Identifier: Apache-2.0
//
// How an arena shows zeros where nothing is mapped, and how it comes down.
#include "arena.h"

namespace kvc {

// ---- zero backing ---------------------------------------------------------------------------------------------------

bool Arena::reads_zero(uint64_t page) const {
  return backing_ == KVC_ZERO_ALL || (backing_ == KVC_ZERO_USED && table_.used(page));
}

kvc_error Arena::open_zero() {
  if (backing_ == KVC_ZERO_NEVER) return success();
  const uint64_t pages = backing_ == KVC_ZERO_ALL ? table_.pages() : 0;
  Journal journal(backend_, 1, pages * planes_ + 1);
  Spans spans(pages * planes_);
  lost_.reserve(1);
  Result result = journal.create(0, page_bytes_, &zero_);
  if (result.ok() && pages != 0) result = zero(journal, 0, kvc_run{0, pages}, spans);
  if (result.ok()) result = spans.set_access(backend_, Access::read_only);
  if (!result.ok()) {
    const kvc_error error = failed(backend_, result);
    return journal.rollback(*this) ? error : not_undone(error);
  }
  stats_.zero_bytes = page_bytes_;
  return success();
}

Result Arena::zero(Journal &journal, size_t index, const kvc_run &run, Spans &spans) {
  for (uint32_t plane = 0; plane < planes_; ++plane)
    for (uint64_t page = run.first; page < run.first + run.count; ++page) {
      const Result result = journal.map(index, address(page, plane), page_bytes_, zero_);
      if (!result.ok()) return result;
      spans.add(address(page, plane), page_bytes_);
    }
  return Result{};
}

Result Arena::unzero(Journal &journal, size_t index, const kvc_run &run) {
  for (uint32_t plane = 0; plane < planes_; ++plane)
    for (uint64_t page = run.first; page < run.first + run.count; ++page) {
      if (!reads_zero(page)) continue;
      const Result result = journal.unmap(index, address(page, plane), page_bytes_, zero_, Access::read_only);
      if (!result.ok()) return result;
    }
  return Result{};
}

// ---- the end --------------------------------------------------------------------------------------------------------

Result Arena::release_run(const kvc_run &run) {
  Result first;
  for (uint32_t plane = 0; plane < planes_; ++plane) {
    const Result result = backend_.release(table_.handle(run.first, plane), class_bytes(run.count));
    if (first.ok()) first = result;
  }
  return first;
}

Result Arena::take_down(const kvc_run &run) {
  Result first;
  for (uint32_t plane = 0; plane < planes_; ++plane) {
    const Result result = backend_.unmap(address(run.first, plane), class_bytes(run.count));
    if (first.ok()) first = result;
  }
  const Result released = release_run(run);
  return first.ok() ? released : first;
}

// What is mapped in a fenced run is not known: try both. As far as the driver lets us.
void Arena::clear(const kvc_run &run) {
  for (uint32_t plane = 0; plane < planes_; ++plane) {
    if (backend_.unmap(address(run.first, plane), class_bytes(run.count)).ok()) continue;
    for (uint64_t page = run.first; page < run.first + run.count; ++page) backend_.unmap(address(page, plane), page_bytes_);
  }
  release_run(run);
}

Result Arena::take_down_zeros() {
  Result first;
  for (uint64_t page = 0; page < table_.pages(); ++page) {
    const PageState state = table_.state(page);
    if (!reads_zero(page) || (state != PageState::unmapped && state != PageState::prepared)) continue;
    for (uint32_t plane = 0; plane < planes_; ++plane) {
      const Result result = backend_.unmap(address(page, plane), page_bytes_);
      if (first.ok()) first = result;
    }
  }
  return first;
}

kvc_error Arena::destroy() {
  const kvc_error outcome = serially([&] {
    Result first;
    const auto note = [&](const Result &result) {
      if (first.ok()) first = result;
    };
    table_.each(PageState::mapped, [&](const kvc_run &run) { note(take_down(run)); });
    table_.each(PageState::quarantined, [&](const kvc_run &run) { clear(run); });
    if (backing_ != KVC_ZERO_NEVER) note(take_down_zeros());
    table_.each(PageState::prepared, [&](const kvc_run &run) { note(release_run(run)); });
    for (auto &entry : cache_)
      for (const Handle handle : entry.second) note(backend_.release(handle, class_bytes(entry.first)));
    for (const Lost &lost : lost_) backend_.release(lost.handle, lost.bytes);
    if (stats_.zero_bytes != 0) note(backend_.release(zero_, page_bytes_));
    note(backend_.free_range(base_, range_bytes_));
    return first.ok() ? success() : failed(backend_, first);
  });
  return backend_.gone(outcome.driver_code) ? success() : outcome;
}

} // namespace kvc
