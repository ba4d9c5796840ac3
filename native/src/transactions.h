// SPDX-License-Identifier: Apache-2.0
//
// What became of each unmap transaction: the rules for repeats, late prepares and unknown numbers. No driver call here.
#pragma once

#include <unordered_map>
#include <vector>

#include "outcome.h"

namespace kvc {

class Transactions {
 public:
  // `history` finished transactions are remembered; prepared ones always are.
  explicit Transactions(size_t history) : finished_(history, 0) {}

  // Each question: may the step be performed now? If not, `answer` is what to tell the caller (OK for a repeat).
  // may_prepare() also opens the record, which the caller settles by prepared() or failed().
  bool may_prepare(uint64_t tx, const kvc_run *runs, size_t count, kvc_error &answer);
  bool may_commit(uint64_t tx, kvc_error &answer);
  bool may_abort(uint64_t tx, kvc_error &answer);

  std::vector<kvc_run> &runs(uint64_t tx) { return records_.at(tx).runs; }
  void prepared(uint64_t tx) noexcept { records_.find(tx)->second.state = State::prepared; }
  void failed(uint64_t tx, const kvc_error &error) noexcept;
  void committed(uint64_t tx, const kvc_error &outcome) noexcept;
  void aborted(uint64_t tx) noexcept { finish(tx, State::aborted); }

 private:
  enum class State { opened, prepared, failed, committed, aborted, aborted_early };
  struct Record {
    State state = State::opened;
    int prepare_status = KVC_OK;
    int commit_status = KVC_OK;
    int code = 0;
    std::vector<kvc_run> runs;
  };
  void finish(uint64_t tx, State state) noexcept;

  std::unordered_map<uint64_t, Record> records_;
  std::vector<uint64_t> finished_; // ring of numbers, 0 = empty
  size_t next_ = 0;
};

} // namespace kvc
