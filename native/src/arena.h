// SPDX-License-Identifier: Apache-2.0
//
// A reserved range and its physical backing: all-or-nothing batches over one backend. Contract: kvcached.h.
#pragma once

#include <map>
#include <mutex>

#include "journal.h"
#include "page_table.h"
#include "transactions.h"

namespace kvc {

// Where a failed map() reports the runs it had to fence off.
struct BadRuns {
  kvc_run *out;
  size_t room;
  size_t count;
};

class Arena final : private Salvage {
 public:
  // Checks `config` against the backend. Throws std::bad_alloc only.
  static kvc_error create(Backend &backend, const kvc_arena_config &config, std::unique_ptr<Arena> &out);

  uint64_t base() const { return base_; }
  kvc_arena_stats stats();
  kvc_error acquire(uint64_t run_pages, uint64_t runs);
  kvc_error trim(uint64_t run_pages, uint64_t runs, uint64_t *released_bytes);
  kvc_error map(const kvc_run *runs, size_t count, BadRuns &bad);
  kvc_error prepare(uint64_t tx, const kvc_run *runs, size_t count);
  kvc_error commit(uint64_t tx, bool keep);
  kvc_error abort(uint64_t tx);
  kvc_error unmap(const kvc_run *runs, size_t count, bool keep);
  size_t quarantined(kvc_run *out, size_t room);
  // Takes everything down as far as the driver lets it. The object is empty afterwards.
  kvc_error destroy();

 private:
  using Lock = std::lock_guard<std::mutex>;
  Arena(Backend &backend, const kvc_arena_config &config);

  uint64_t address(uint64_t page, uint32_t plane) const { return base_ + plane * stride_ + page * page_bytes_; }
  uint64_t class_bytes(uint64_t run_pages) const { return run_pages * page_bytes_; }
  bool reads_zero(uint64_t page) const;
  size_t steps(const kvc_run *runs, size_t count) const;
  template <class Work>
  kvc_error serially(Work work);

  kvc_error check(const kvc_run *runs, size_t count, PageState wanted);
  kvc_error check_one(const kvc_run &run, PageState wanted, uint64_t *claimed);
  uint64_t *bytes_in(PageState state);
  void move(const kvc_run &run, PageState to);

  kvc_error open_zero();
  Result zero(Journal &journal, size_t index, const kvc_run &run, Spans &spans);
  Result unzero(Journal &journal, size_t index, const kvc_run &run);
  Result furnish(Journal &journal, const kvc_run *runs, size_t count);
  Result place(Journal &journal, const kvc_run *runs, size_t count, Spans &spans);
  Result lift(Journal &journal, const kvc_run *runs, size_t count);
  kvc_error undo(Journal &journal, const Result &cause, const kvc_run *runs, size_t count, BadRuns *bad);
  kvc_error take_off(const kvc_run *runs, size_t count);
  kvc_error let_go(const kvc_run *runs, size_t count, bool keep);
  Result release_run(const kvc_run &run);
  Result take_down(const kvc_run &run);
  void clear(const kvc_run &run);
  Result take_down_zeros();

  void handle_back(Handle handle, uint64_t bytes) noexcept override;
  void handle_lost(Handle handle, uint64_t bytes) noexcept override;

  struct Lost {
    Handle handle;
    uint64_t bytes;
  };

  Backend &backend_;
  const uint64_t page_bytes_;
  const uint32_t planes_;
  const kvc_zero_backing backing_;
  const uint64_t stride_;
  const uint64_t range_bytes_;
  std::mutex lock_;
  uint64_t base_ = 0;
  Handle zero_ = 0;
  PageTable table_;
  Transactions transactions_;
  std::map<uint64_t, std::vector<Handle>> cache_; // by run length in pages
  std::vector<Lost> lost_;
  kvc_arena_stats stats_{};
};

// One thread at a time, with the device current.
template <class Work>
kvc_error Arena::serially(Work work) {
  Lock guard(lock_);
  Current current(backend_);
  if (!current.result().ok()) return failed(backend_, current.result());
  return work();
}

} // namespace kvc
