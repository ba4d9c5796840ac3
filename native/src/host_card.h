// SPDX-License-Identifier: Apache-2.0
//
// One card made of host memory, as this process sees it: how much of it exists and who holds how much.
//
// The capacity is a file that all processes of the card open: a header, then one lock byte per slot of `granularity` bytes.
// Holding a slot is holding the kernel's POSIX record lock on its byte. The kernel drops it when the process dies and does
// not pass it on to a forked child. It also drops ALL locks of a process on a file as soon as the process closes ANY
// descriptor of that file: so a process opens it once and never closes it, and nothing else may open it in a pool's process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "outcome.h"

namespace kvc {

class HostCard {
 public:
  // The card of this process for the file that `options` name; opened at the first call, never closed.
  // NULL: `error` says why.
  static HostCard *open(const kvc_device_options &options, kvc_error &error);

  uint64_t granularity() const { return granularity_; }
  uint64_t capacity() const { return slots_ * granularity_; }
  uint64_t device() const { return device_; }
  uint64_t inode() const { return inode_; }

  // All `count` slots or none. Returns 0, or an errno: ENOMEM when the card is full.
  int take(uint64_t count) noexcept;
  // Pre: this process holds at least `count`. Slots are alike, so it does not matter which go.
  int give(uint64_t count) noexcept;
  // Slots that nobody holds. Another process may take one at any time.
  uint64_t free_slots() noexcept;

  // The process's memory file. Offsets are handed out once and never again: neighbours in time are neighbours in the file.
  int memory() const { return memory_; }
  uint64_t next_offset(uint64_t bytes) noexcept { return next_offset_.fetch_add(bytes); }

 private:
  class Turn;
  HostCard() = default;
  static HostCard *find(uint64_t device, uint64_t inode);
  static HostCard *make(const kvc_device_options &options, const char *path, kvc_error &error);
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();
  kvc_error open_files(const kvc_device_options &options, const char *path);
  kvc_error agree(const kvc_device_options &options);
  kvc_error check(const kvc_device_options &options) const;
  int take_within(uint64_t first, uint64_t end, uint64_t wanted, uint64_t *taken) noexcept;
  int take_gap(uint64_t first, uint64_t end, uint64_t *next, uint64_t *taken) noexcept;
  int give_locked(uint64_t count) noexcept;
  int lock(short kind, uint64_t first, uint64_t count) const noexcept;
  bool somebody_else(uint64_t first, uint64_t end, uint64_t *theirs, uint64_t *theirs_end) const noexcept;
  uint64_t held_by_others(uint64_t first, uint64_t end) const noexcept;

  int file_ = -1;
  int memory_ = -1;
  pid_t pid_ = 0;
  uint64_t device_ = 0, inode_ = 0;
  uint64_t slots_ = 0, granularity_ = 0;
  std::atomic<uint64_t> next_offset_{0};
  std::mutex mutex_;
  std::vector<char> own_;  // 1: this process holds the slot
  uint64_t held_ = 0;      // how many it holds
  uint64_t own_end_ = 0;   // no slot from here on is its own
  uint64_t cursor_ = 0;    // where the last take ended
  bool turn_missed_ = false;
  HostCard *next_ = nullptr;
};

} // namespace kvc
