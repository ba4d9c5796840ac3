// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <algorithm>
#include <cinttypes>

#include "arena_config.h"

namespace kvc {
namespace {

const char *name(PageState state) {
  switch (state) {
    case PageState::mapped: return "mapped";
    case PageState::prepared: return "prepared for unmapping";
    case PageState::quarantined: return "quarantined";
    default: return "not mapped";
  }
}

// So that nothing has to allocate once the driver was called. Grows by doubling: small batches do not copy each time.
template <class T>
void make_room(std::vector<T> &list, size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::max(2 * list.capacity(), list.size() + more));
}

} // namespace

Arena::Arena(Backend &backend, const kvc_arena_config &config)
    : backend_(backend), page_bytes_(config.page_bytes), planes_(config.planes),
      backing_(static_cast<kvc_zero_backing>(config.zero_backing)), stride_(plane_stride(config)), range_bytes_(range_bytes(config)),
      table_(config.pages, config.planes), transactions_(history(config)) {
  stats_.reserved_bytes = range_bytes_;
}

kvc_error Arena::create(Backend &backend, const kvc_arena_config &config, std::unique_ptr<Arena> &out) {
  const kvc_error bad = check_config(config, backend.info().granularity);
  if (bad.status != KVC_OK) return bad;
  std::unique_ptr<Arena> arena(new Arena(backend, config));
  const kvc_error error = arena->serially([&] {
    const Result reserved = backend.reserve(arena->range_bytes_, &arena->base_);
    if (!reserved.ok()) return failed(backend, reserved);
    kvc_error zero;
    try {
      zero = arena->open_zero();
    } catch (const std::bad_alloc &) { // before its first driver call
      backend.free_range(arena->base_, arena->range_bytes_);
      throw;
    }
    if (zero.status != KVC_OK) backend.free_range(arena->base_, arena->range_bytes_);
    return zero;
  });
  if (error.status == KVC_OK) out = std::move(arena);
  return error;
}

kvc_arena_stats Arena::stats() {
  Lock guard(lock_);
  return stats_;
}

size_t Arena::quarantined(kvc_run *out, size_t room) {
  Lock guard(lock_);
  size_t count = 0;
  if (stats_.quarantined_bytes == 0) return 0;
  table_.each(PageState::quarantined, [&](const kvc_run &run) {
    if (count < room) out[count] = run;
    ++count;
  });
  return count;
}

// ---- states ---------------------------------------------------------------------------------------------------------

kvc_error Arena::check(const kvc_run *runs, size_t count, PageState wanted) {
  kvc_error error = success();
  uint64_t claimed = 0;
  size_t looked_at = 0;
  while (looked_at < count && error.status == KVC_OK) error = check_one(runs[looked_at++], wanted, &claimed);
  for (size_t i = 0; i < looked_at; ++i) {
    const uint64_t pages = i + 1 < looked_at ? runs[i].count : claimed;
    for (uint64_t page = runs[i].first; page < runs[i].first + pages; ++page) table_.unclaim(page);
  }
  return error;
}

// *claimed: how many pages of this run were marked.
kvc_error Arena::check_one(const kvc_run &run, PageState wanted, uint64_t *claimed) {
  *claimed = 0;
  if (run.count == 0) return refused("runs", "a run at page %" PRIu64 " has no pages", run.first);
  if (run.first >= table_.pages() || run.count > table_.pages() - run.first)
    return refused("runs", "pages %" PRIu64 " + %" PRIu64 " lie outside the %" PRIu64 " pages of the arena", run.first, run.count,
                   table_.pages());
  for (uint64_t page = run.first; page < run.first + run.count; ++page, ++*claimed) {
    if (table_.state(page) != wanted) return refused("runs", "page %" PRIu64 " is %s", page, name(table_.state(page)));
    if (!table_.claim(page)) return refused("runs", "page %" PRIu64 " is named twice", page);
  }
  if (wanted == PageState::mapped && table_.length(run.first) != run.count)
    return refused("runs", "pages %" PRIu64 " + %" PRIu64 " are not one mapped run", run.first, run.count);
  return success();
}

uint64_t *Arena::bytes_in(PageState state) {
  switch (state) {
    case PageState::mapped: return &stats_.mapped_bytes;
    case PageState::prepared: return &stats_.prepared_bytes;
    case PageState::quarantined: return &stats_.quarantined_bytes;
    default: return nullptr;
  }
}

void Arena::move(const kvc_run &run, PageState to) {
  const PageState from = table_.state(run.first);
  const uint64_t bytes = class_bytes(run.count) * planes_;
  if (uint64_t *left = bytes_in(from)) *left -= bytes;
  if (uint64_t *entered = bytes_in(to)) *entered += bytes;
  if (from == PageState::mapped) stats_.mapped_pages -= run.count;
  if (to == PageState::mapped) stats_.mapped_pages += run.count;
  if (to == PageState::mapped) table_.mark_used(run);
  table_.set(run, to);
}

void Arena::handle_back(Handle handle, uint64_t bytes) noexcept {
  cache_.find(bytes / page_bytes_)->second.push_back(handle); // it came from there, so there is room
  stats_.cached_bytes += bytes;
}

void Arena::handle_lost(Handle handle, uint64_t bytes) noexcept {
  lost_.push_back({handle, bytes}); // room was made before the batch began
  stats_.quarantined_bytes += bytes;
}

// ---- handles --------------------------------------------------------------------------------------------------------

// Upper bound of the steps that a batch takes, its zero pages included.
size_t Arena::steps(const kvc_run *runs, size_t count) const {
  size_t pages = 0;
  if (backing_ != KVC_ZERO_NEVER)
    for (size_t i = 0; i < count; ++i) pages += runs[i].count;
  return (2 * count + pages) * planes_;
}

kvc_error Arena::acquire(uint64_t run_pages, uint64_t runs) {
  return serially([&] {
    if (run_pages == 0 || run_pages > table_.pages()) return refused("run_pages", "%" PRIu64 " is not 1 .. %" PRIu64, run_pages, table_.pages());
    if (runs > table_.pages() / run_pages) return refused("runs", "%" PRIu64 " runs are more than the range has room for", runs);
    const size_t handles = runs * planes_;
    std::vector<Handle> &cached = cache_[run_pages];
    const size_t before = cached.size();
    make_room(cached, handles);
    make_room(lost_, handles);
    Journal journal(backend_, 1, handles);
    for (size_t i = 0; i < handles; ++i) {
      Handle handle = 0;
      const Result result = journal.create(0, class_bytes(run_pages), &handle);
      if (!result.ok()) {
        cached.resize(before);
        const kvc_error error = failed(backend_, result);
        return journal.rollback(*this) ? error : not_undone(error);
      }
      cached.push_back(handle);
    }
    std::reverse(cached.begin() + static_cast<ptrdiff_t>(before), cached.end()); // taken from the end: in order of creation
    stats_.cached_bytes += handles * class_bytes(run_pages);
    return success();
  });
}

kvc_error Arena::trim(uint64_t run_pages, uint64_t runs, uint64_t *released_bytes) {
  *released_bytes = 0;
  return serially([&] {
    make_room(lost_, 1);
    uint64_t left = runs > UINT64_MAX / planes_ ? UINT64_MAX : runs * planes_;
    for (auto entry = cache_.rbegin(); entry != cache_.rend(); ++entry) {
      if (run_pages != 0 && entry->first != run_pages) continue;
      const uint64_t bytes = class_bytes(entry->first);
      for (; left != 0 && !entry->second.empty(); --left) {
        const Handle handle = entry->second.back();
        entry->second.pop_back();
        stats_.cached_bytes -= bytes;
        const Result result = backend_.release(handle, bytes);
        if (!result.ok()) {
          handle_lost(handle, bytes);
          return not_undone(failed(backend_, result));
        }
        *released_bytes += bytes;
      }
    }
    return success();
  });
}

// A handle for every run and plane. Plane by plane: on the host, neighbours in memory are then neighbours in the file.
Result Arena::furnish(Journal &journal, const kvc_run *runs, size_t count) {
  for (uint32_t plane = 0; plane < planes_; ++plane)
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bytes = class_bytes(runs[i].count);
      Handle &handle = table_.handle(runs[i].first, plane);
      const auto entry = cache_.find(runs[i].count);
      if (entry != cache_.end() && !entry->second.empty()) {
        handle = entry->second.back();
        entry->second.pop_back();
        stats_.cached_bytes -= bytes;
        journal.taken(i, handle, bytes);
        continue;
      }
      const Result result = journal.create(i, bytes, &handle);
      if (!result.ok()) return result;
    }
  return Result{};
}

// ---- mapping --------------------------------------------------------------------------------------------------------

kvc_error Arena::map(const kvc_run *runs, size_t count, BadRuns &bad) {
  bad.count = 0;
  return serially([&] {
    const kvc_error refusal = check(runs, count, PageState::unmapped);
    if (refusal.status != KVC_OK) return refusal;
    Journal journal(backend_, count, steps(runs, count));
    make_room(lost_, count * planes_);
    Spans spans(count * planes_);
    Result result = furnish(journal, runs, count);
    if (result.ok()) result = place(journal, runs, count, spans);
    if (!result.ok()) return undo(journal, result, runs, count, &bad);
    for (size_t i = 0; i < count; ++i) move(runs[i], PageState::mapped);
    return success();
  });
}

Result Arena::place(Journal &journal, const kvc_run *runs, size_t count, Spans &spans) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bytes = class_bytes(runs[i].count);
    Result result = unzero(journal, i, runs[i]);
    for (uint32_t plane = 0; plane < planes_ && result.ok(); ++plane) {
      const uint64_t at = address(runs[i].first, plane);
      result = journal.map(i, at, bytes, table_.handle(runs[i].first, plane));
      spans.add(at, bytes);
    }
    if (!result.ok()) return result;
  }
  return spans.set_access(backend_, Access::read_write);
}

// Undo a failed batch. Runs that are stuck are fenced off; the others are in the state in which the batch found them.
kvc_error Arena::undo(Journal &journal, const Result &cause, const kvc_run *runs, size_t count, BadRuns *bad) {
  const bool all = journal.rollback(*this);
  for (size_t i = 0; i < count; ++i) {
    if (!journal.stuck(i)) continue;
    move(runs[i], PageState::quarantined);
    if (bad == nullptr) continue;
    if (bad->count < bad->room) bad->out[bad->count] = runs[i];
    ++bad->count;
  }
  const kvc_error error = failed(backend_, cause);
  return all ? error : not_undone(error);
}

// ---- unmapping ------------------------------------------------------------------------------------------------------

Result Arena::lift(Journal &journal, const kvc_run *runs, size_t count) {
  size_t pages = 0;
  for (size_t i = 0; i < count; ++i) pages += runs[i].count;
  Spans zeros(backing_ == KVC_ZERO_NEVER ? 0 : pages * planes_);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bytes = class_bytes(runs[i].count);
    Result result;
    for (uint32_t plane = 0; plane < planes_ && result.ok(); ++plane)
      result = journal.unmap(i, address(runs[i].first, plane), bytes, table_.handle(runs[i].first, plane), Access::read_write);
    if (result.ok() && backing_ != KVC_ZERO_NEVER) result = zero(journal, i, runs[i], zeros);
    if (!result.ok()) return result;
  }
  return zeros.set_access(backend_, Access::read_only);
}

// mapped -> prepared
kvc_error Arena::take_off(const kvc_run *runs, size_t count) {
  const kvc_error refusal = check(runs, count, PageState::mapped);
  if (refusal.status != KVC_OK) return refusal;
  Journal journal(backend_, count, steps(runs, count));
  const Result result = lift(journal, runs, count);
  if (!result.ok()) return undo(journal, result, runs, count, nullptr);
  for (size_t i = 0; i < count; ++i) move(runs[i], PageState::prepared);
  return success();
}

// prepared -> unmapped
kvc_error Arena::let_go(const kvc_run *runs, size_t count, bool keep) {
  kvc_error outcome = success();
  for (size_t i = 0; i < count && keep; ++i) make_room(cache_[runs[i].count], count * planes_);
  make_room(lost_, count * planes_);
  for (uint32_t plane = planes_; plane-- > 0;)
    for (size_t i = count; i-- > 0;) { // backwards: the cache gives the last handle first
      const uint64_t bytes = class_bytes(runs[i].count);
      const Handle handle = table_.handle(runs[i].first, plane);
      const Result result = keep ? Result{} : backend_.release(handle, bytes);
      if (keep) handle_back(handle, bytes);
      if (result.ok()) continue;
      handle_lost(handle, bytes);
      if (outcome.status == KVC_OK) outcome = not_undone(failed(backend_, result));
    }
  for (size_t i = 0; i < count; ++i) move(runs[i], PageState::unmapped);
  return outcome;
}

kvc_error Arena::prepare(uint64_t tx, const kvc_run *runs, size_t count) {
  return serially([&] {
    kvc_error outcome;
    if (!transactions_.may_prepare(tx, runs, count, outcome)) return outcome;
    try {
      outcome = take_off(runs, count);
    } catch (const std::bad_alloc &) { // taken before the first driver call: nothing has changed
      outcome = ended(KVC_OUT_OF_MEMORY, "operator new", "this process has no memory left");
    }
    if (outcome.status == KVC_OK)
      transactions_.prepared(tx);
    else
      transactions_.failed(tx, outcome);
    return outcome;
  });
}

kvc_error Arena::commit(uint64_t tx, bool keep) {
  return serially([&] {
    kvc_error outcome;
    if (!transactions_.may_commit(tx, outcome)) return outcome;
    const std::vector<kvc_run> &runs = transactions_.runs(tx);
    outcome = let_go(runs.data(), runs.size(), keep);
    transactions_.committed(tx, outcome);
    return outcome;
  });
}

kvc_error Arena::abort(uint64_t tx) {
  return serially([&] {
    kvc_error outcome;
    if (!transactions_.may_abort(tx, outcome)) return outcome;
    std::vector<kvc_run> &runs = transactions_.runs(tx);
    Journal journal(backend_, runs.size(), steps(runs.data(), runs.size()));
    Spans spans(runs.size() * planes_);
    const Result result = place(journal, runs.data(), runs.size(), spans);
    if (!result.ok()) {
      outcome = undo(journal, result, runs.data(), runs.size(), nullptr);
      const auto fenced = [&](const kvc_run &run) { return table_.state(run.first) == PageState::quarantined; };
      runs.erase(std::remove_if(runs.begin(), runs.end(), fenced), runs.end());
      return outcome;
    }
    for (const kvc_run &run : runs) move(run, PageState::mapped);
    transactions_.aborted(tx);
    return success();
  });
}

kvc_error Arena::unmap(const kvc_run *runs, size_t count, bool keep) {
  return serially([&] {
    const kvc_error outcome = take_off(runs, count);
    return outcome.status == KVC_OK ? let_go(runs, count, keep) : outcome;
  });
}

} // namespace kvc
