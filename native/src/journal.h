// SPDX-License-Identifier: Apache-2.0
//
// What a batch has done to the device so far, so that it can be undone in reverse.
#pragma once

#include <vector>

#include "backend.h"

namespace kvc {

// Receives what a rollback leaves behind. No call may throw.
class Salvage {
 public:
  virtual ~Salvage() = default;
  virtual void handle_back(Handle handle, uint64_t bytes) noexcept = 0; // it came from the cache, it returns there
  virtual void handle_lost(Handle handle, uint64_t bytes) noexcept = 0; // its release failed
};

class Journal {
 public:
  // Room for `steps` steps over `runs` runs is taken here; nothing below allocates.
  Journal(Backend &backend, size_t runs, size_t steps);

  // `run` is the index in the batch of the run that the step serves.
  Result create(size_t run, uint64_t bytes, Handle *handle);
  void taken(size_t run, Handle handle, uint64_t bytes);
  Result map(size_t run, uint64_t address, uint64_t bytes, Handle handle);
  // `handle` and `access` are what is mapped there, to map it back.
  Result unmap(size_t run, uint64_t address, uint64_t bytes, Handle handle, Access access);

  // Undo in reverse. A run of which a step cannot be undone is left as it is, handles included. True: all undone.
  bool rollback(Salvage &salvage) noexcept;
  bool stuck(size_t run) const { return stuck_[run]; }

 private:
  enum class Kind { created, taken, mapped, unmapped };
  struct Step {
    Kind kind;
    Access access;
    size_t run;
    uint64_t address;
    uint64_t bytes;
    Handle handle;
  };
  bool undo(const Step &step, Salvage &salvage) noexcept;

  Backend &backend_;
  std::vector<Step> steps_;
  std::vector<char> stuck_;
};

// Address spans that set_access() is called for; spans side by side become one.
class Spans {
 public:
  explicit Spans(size_t room) { spans_.reserve(room); }
  void add(uint64_t address, uint64_t bytes) { spans_.push_back({address, bytes}); }
  Result set_access(Backend &backend, Access access);

 private:
  struct Span {
    uint64_t address, bytes;
  };
  std::vector<Span> spans_;
};

} // namespace kvc
