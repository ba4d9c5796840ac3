// SPDX-License-Identifier: Apache-2.0
#include "transactions.h"

#include <algorithm>
#include <cinttypes>

namespace kvc {
namespace {

bool same_runs(const std::vector<kvc_run> &known, const kvc_run *runs, size_t count) {
  return std::equal(known.begin(), known.end(), runs, runs + count,
                    [](const kvc_run &a, const kvc_run &b) { return a.first == b.first && a.count == b.count; });
}

kvc_error again(const char *step, uint64_t tx, int status, int code) {
  if (status == KVC_OK) return success();
  kvc_error error = ended(status, step, "transaction %" PRIu64 " ended like this the first time", tx);
  error.driver_code = code;
  return error;
}

} // namespace

bool Transactions::may_prepare(uint64_t tx, const kvc_run *runs, size_t count, kvc_error &answer) {
  if (tx == 0) return answer = refused("tx", "0 is no transaction number"), false;
  const auto found = records_.find(tx);
  if (found == records_.end()) {
    Record record;
    record.runs.assign(runs, runs + count);
    records_.emplace(tx, std::move(record));
    return true;
  }
  const Record &record = found->second;
  if (record.state == State::aborted_early)
    answer = refused("tx", "transaction %" PRIu64 " was aborted before this prepare came", tx);
  else if (record.state == State::prepared && !same_runs(record.runs, runs, count))
    answer = refused("tx", "transaction %" PRIu64 " is prepared with other runs", tx);
  else
    answer = again("prepare", tx, record.prepare_status, record.code);
  return false;
}

bool Transactions::may_commit(uint64_t tx, kvc_error &answer) {
  const auto found = records_.find(tx);
  if (found == records_.end()) return answer = refused("tx", "transaction %" PRIu64 " is not known", tx), false;
  switch (found->second.state) {
    case State::prepared: return true;
    case State::committed: answer = again("commit", tx, found->second.commit_status, found->second.code); break;
    case State::failed: answer = refused("tx", "transaction %" PRIu64 " could not be prepared", tx); break;
    default: answer = refused("tx", "transaction %" PRIu64 " was aborted", tx);
  }
  return false;
}

bool Transactions::may_abort(uint64_t tx, kvc_error &answer) {
  if (tx == 0) return answer = refused("tx", "0 is no transaction number"), false;
  const auto found = records_.find(tx);
  answer = success();
  if (found == records_.end()) {
    records_.emplace(tx, Record{});
    finish(tx, State::aborted_early);
    return false;
  }
  if (found->second.state == State::prepared) return true;
  if (found->second.state == State::committed) answer = refused("tx", "transaction %" PRIu64 " was committed", tx);
  return false; // aborted or failed: nothing is left to map back
}

void Transactions::failed(uint64_t tx, const kvc_error &error) noexcept {
  Record &record = records_.find(tx)->second;
  record.prepare_status = error.status;
  record.code = error.driver_code;
  finish(tx, State::failed);
}

void Transactions::committed(uint64_t tx, const kvc_error &outcome) noexcept {
  Record &record = records_.find(tx)->second;
  record.commit_status = outcome.status;
  record.code = outcome.driver_code;
  finish(tx, State::committed);
}

void Transactions::finish(uint64_t tx, State state) noexcept {
  Record &record = records_.find(tx)->second;
  record.state = state;
  std::vector<kvc_run>().swap(record.runs);
  uint64_t &oldest = finished_[next_];
  if (oldest != 0) records_.erase(oldest);
  oldest = tx;
  next_ = (next_ + 1) % finished_.size();
}

} // namespace kvc
