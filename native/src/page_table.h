// SPDX-License-Identifier: Apache-2.0
//
// Which page is in which state, and which handles back which run. Plain data: no driver call, nothing throws after the constructor.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "backend.h"

namespace kvc {

enum class PageState : uint8_t { unmapped = 0, mapped, prepared, quarantined };

class PageTable {
 public:
  PageTable(uint64_t pages, uint32_t planes)
      : pages_(pages), planes_(planes), state_(zeroed<PageState>(pages)), length_(zeroed<uint32_t>(pages)), used_(zeroed<uint8_t>(pages)),
        claimed_(zeroed<uint8_t>(pages)), handles_(zeroed<Handle>(pages * planes)) {}

  uint64_t pages() const { return pages_; }
  PageState state(uint64_t page) const { return state_[page]; }
  // A page that was mapped once.
  bool used(uint64_t page) const { return used_[page] != 0; }
  // The handle of the run that starts at `first`, at `plane`.
  Handle &handle(uint64_t first, uint32_t plane) { return handles_[first * planes_ + plane]; }
  // Pages of the run that starts at `page`; 0 when none does.
  uint64_t length(uint64_t page) const { return length_[page]; }

  // The run exists (mapped, prepared or quarantined) from now on.
  void set(const kvc_run &run, PageState state) {
    for (uint64_t page = run.first; page < run.first + run.count; ++page) state_[page] = state;
    length_[run.first] = state == PageState::unmapped ? 0 : static_cast<uint32_t>(run.count);
  }
  void mark_used(const kvc_run &run) {
    for (uint64_t page = run.first; page < run.first + run.count; ++page) used_[page] = 1;
  }
  // Mark a page as named by the batch in hand. False: it is already.
  bool claim(uint64_t page) { return claimed_[page] != 0 ? false : (claimed_[page] = 1) != 0; }
  void unclaim(uint64_t page) { claimed_[page] = 0; }
  // Call `visit(run)` for every run in `state`, ascending.
  template <class Visit>
  void each(PageState state, Visit visit) const {
    for (uint64_t page = 0; page < pages_; ++page)
      if (length_[page] != 0 && state_[page] == state) visit(kvc_run{page, length_[page]});
  }

 private:
  struct Free {
    void operator()(void *memory) const { free(memory); }
  };
  template <class T>
  using Table = std::unique_ptr<T[], Free>;
  // calloc: pages of the table that are never looked at cost nothing, so neither does a huge range.
  template <class T>
  static Table<T> zeroed(uint64_t count) {
    T *memory = static_cast<T *>(calloc(count, sizeof(T)));
    if (memory == nullptr) throw std::bad_alloc();
    return Table<T>(memory);
  }

  uint64_t pages_;
  uint32_t planes_;
  Table<PageState> state_;
  Table<uint32_t> length_;
  Table<uint8_t> used_;
  Table<uint8_t> claimed_;
  Table<Handle> handles_;
};

} // namespace kvc
