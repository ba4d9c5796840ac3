// SPDX-License-Identifier: Apache-2.0
//
// Host memory as a device. A handle is an offset in the process's memory file; mapping is a fixed shared mapping of it.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>

#include "host_card.h"

namespace kvc {
namespace {

constexpr int kReservedFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr const char *kCallNames[KVC_CALL_KINDS] = {"mmap (reserve)", "take capacity", "mmap", "mprotect", "mmap (unmap)", "fallocate", "munmap"};

constexpr size_t kSpares = 4;

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

bool put(uint64_t address, uint64_t bytes, int flags, int file, uint64_t offset) {
  return mmap(pointer(address), bytes, PROT_NONE, flags | MAP_FIXED, file, static_cast<off_t>(offset)) != MAP_FAILED;
}

// A few map entries kept for bad times. When the kernel's table is full it refuses even the mmap() that would make it
// shorter; giving up a spare entry for that moment lets an undo or an unmap go through.
class SpareEntries {
 public:
  SpareEntries() { refill(); }
  ~SpareEntries() { drop(); }
  SpareEntries(const SpareEntries &) = delete;
  SpareEntries &operator=(const SpareEntries &) = delete;

  // Runs `work` again with the spares given up. If they cannot be had back afterwards, `revert` takes back what it did;
  // a revert that returns false leaves it. False: it did not work or was taken back, and errno is set.
  template <class Work, class Revert>
  bool help(Work work, Revert revert) {
    std::lock_guard<std::mutex> guard(mutex_);
    drop();
    const bool worked = work();
    const int error = worked ? ENOMEM : errno;
    if (refill() || !worked) return errno = error, worked;
    drop(); // else there is no entry for going back
    const bool kept = !revert();
    refill();
    return errno = error, kept;
  }

 private:
  // Shared mappings of nothing, each of its own: the kernel cannot merge them with a neighbour.
  bool refill() {
    for (void *&spare : spares_)
      if (spare == MAP_FAILED) spare = mmap(nullptr, 4096, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return std::none_of(std::begin(spares_), std::end(spares_), [](void *spare) { return spare == MAP_FAILED; });
  }
  void drop() {
    for (void *&spare : spares_) {
      if (spare != MAP_FAILED) munmap(spare, 4096);
      spare = MAP_FAILED;
    }
  }
  std::mutex mutex_;
  void *spares_[kSpares] = {MAP_FAILED, MAP_FAILED, MAP_FAILED, MAP_FAILED};
};

class HostBackend final : public Backend {
 public:
  HostBackend(HostCard &card, int ordinal) : card_(card) {
    info_.backend = KVC_HOST;
    info_.ordinal = ordinal;
    info_.map_granularity_known = 1;
    info_.granularity = card.granularity();
    info_.total_bytes = card.capacity();
    snprintf(info_.uuid, sizeof info_.uuid, "HOST-%d-%" PRIx64 "-%" PRIx64, ordinal, card.device(), card.inode());
    snprintf(info_.name, sizeof info_.name, "host memory");
  }

  const kvc_device_info &info() const override { return info_; }

  Result memory(uint64_t *free_bytes, uint64_t *total_bytes) override {
    *total_bytes = card_.capacity();
    *free_bytes = card_.free_slots() * card_.granularity();
    return Result{};
  }

  Result enter(int64_t *) override { return Result{}; }
  void leave(int64_t) override {}

  Result reserve(uint64_t bytes, uint64_t *base) override {
    const uint64_t step = info_.granularity;
    void *range = mmap(nullptr, bytes + step, PROT_NONE, kReservedFlags, -1, 0);
    if (range == MAP_FAILED) return failure(KVC_CALL_RESERVE, errno, bytes);
    const uint64_t start = reinterpret_cast<uint64_t>(range);
    *base = (start + step - 1) / step * step;
    if (*base != start) munmap(range, *base - start);
    if (*base != start + step) munmap(pointer(*base + bytes), start + step - *base);
    return Result{};
  }

  Result free_range(uint64_t base, uint64_t bytes) override {
    return munmap(pointer(base), bytes) == 0 ? Result{} : failure(KVC_CALL_FREE, errno, bytes);
  }

  Result create(uint64_t bytes, Handle *handle) override {
    const int error = card_.take(bytes / info_.granularity);
    if (error != 0) return failure(KVC_CALL_CREATE, error, bytes);
    *handle = card_.next_offset(bytes);
    return Result{};
  }

  // The memory leaves before the slots do: what is held never exceeds what is locked.
  Result release(Handle handle, uint64_t bytes) override {
    if (fallocate(card_.memory(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle), static_cast<off_t>(bytes)) != 0)
      return failure(KVC_CALL_RELEASE, errno, bytes);
    const int error = card_.give(bytes / info_.granularity);
    return error == 0 ? Result{} : failure(KVC_CALL_RELEASE, error, bytes);
  }

  // In good times the spares stay untouched by map(): if they cannot be had back afterwards, the table is full.
  Result map(uint64_t address, uint64_t bytes, Handle handle) override {
    const auto work = [&] { return put(address, bytes, MAP_SHARED, card_.memory(), handle); };
    const auto revert = [&] { return put(address, bytes, kReservedFlags, -1, 0); };
    if (work() || (errno == ENOMEM && spares_.help(work, revert))) return Result{};
    return failure(KVC_CALL_MAP, errno, bytes);
  }

  // A forked child does not inherit the mapping, as it would not inherit a GPU's.
  Result set_access(uint64_t address, uint64_t bytes, Access access) override {
    const int protection = access == Access::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
    const bool done = madvise(pointer(address), bytes, MADV_DONTFORK) == 0 && mprotect(pointer(address), bytes, protection) == 0;
    return done ? Result{} : failure(KVC_CALL_ACCESS, errno, bytes);
  }

  Result unmap(uint64_t address, uint64_t bytes) override {
    const auto work = [&] { return put(address, bytes, kReservedFlags, -1, 0); };
    if (work() || (errno == ENOMEM && spares_.help(work, [] { return false; }))) return Result{};
    return failure(KVC_CALL_UNMAP, errno, bytes);
  }

  Result failure(kvc_call kind, int code, uint64_t bytes) const override {
    Result result;
    result.code = code == 0 ? ENOMEM : code;
    result.call = kCallNames[kind];
    result.bytes = bytes;
    const bool entries = kind == KVC_CALL_MAP || kind == KVC_CALL_ACCESS || kind == KVC_CALL_UNMAP || kind == KVC_CALL_FREE;
    result.status = result.code != ENOMEM ? KVC_BROKEN : entries ? KVC_OUT_OF_MAPS : KVC_OUT_OF_MEMORY;
    return result;
  }

  const char *describe(int code) const override { return strerror(code); }

  bool gone(int) const override { return false; }

 private:
  HostCard &card_;
  SpareEntries spares_;
  kvc_device_info info_{};
};

} // namespace

int open_host(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error) {
  HostCard *card = HostCard::open(options, error);
  if (card == nullptr) return error.status;
  out = std::make_unique<HostBackend>(*card, options.ordinal);
  return KVC_OK;
}

} // namespace kvc
