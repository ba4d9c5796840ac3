// SPDX-License-Identifier: Apache-2.0
#include "host_card.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace kvc {
namespace {

constexpr uint64_t kMagic = 0x31504143'43564bULL; // "KVCCAP1"
constexpr const char *kOfAnother = ": ask for that, or end its users and delete its folder (KVCACHED_HOST_DIR)";
constexpr off_t kTurnByte = 0;
constexpr off_t kFirstSlot = 4096;
constexpr uint64_t kDefaultGranularity = uint64_t{2} << 20;
constexpr off_t kMemoryFileBytes = off_t{1} << 62; // sparse: only touched pages exist
constexpr long kPause_ns = 100 * 1000;
constexpr int kTurnPauses = 1000;    // 100 ms
constexpr int kAgreePauses = 20000;  // 2 s

struct Header {
  uint64_t magic;
  uint64_t capacity;
  uint64_t granularity;
};

// Process-wide on purpose: POSIX record locks belong to the process, so its cards must too. Entries are never removed.
std::mutex table_mutex;
std::atomic<HostCard *> table_head{nullptr};

int record_lock(int file, int command, struct flock *range) {
  int result;
  do result = fcntl(file, command, range);
  while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

struct flock bytes_from(short kind, off_t first, off_t count) {
  struct flock range {};
  range.l_type = kind;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = count;
  return range;
}

bool taken_by_another(int error) { return error == EAGAIN || error == EACCES; }

} // namespace

// Processes take slots one after the other, so that two that together want too much do not both fail. Waiting is bounded:
// a stopped process that has the turn delays others by that much and no more. Going on without it is safe, only less fair.
class HostCard::Turn {
 public:
  Turn(int file, int pauses) : file_(file) {
    for (int i = 0; !mine_ && i <= pauses; ++i) {
      struct flock range = bytes_from(F_WRLCK, kTurnByte, 1);
      mine_ = record_lock(file_, F_SETLK, &range) == 0;
      const struct timespec pause {0, kPause_ns};
      if (!mine_) nanosleep(&pause, nullptr);
    }
  }
  ~Turn() {
    struct flock range = bytes_from(F_UNLCK, kTurnByte, 1);
    if (mine_) record_lock(file_, F_SETLK, &range);
  }
  Turn(const Turn &) = delete;
  Turn &operator=(const Turn &) = delete;
  bool mine() const { return mine_; }

 private:
  int file_;
  bool mine_ = false;
};

// ---- opening --------------------------------------------------------------------------------------------------------

HostCard *HostCard::open(const kvc_device_options &options, kvc_error &error) {
  if (options.host_dir == nullptr || options.host_dir[0] == 0) return error = refused("host_dir", "a host card needs a directory"), nullptr;
  if (options.ordinal < 0) return error = refused("ordinal", "%d", options.ordinal), nullptr;
  char path[4096];
  if (snprintf(path, sizeof path, "%s/kvcached-host-%d.capacity", options.host_dir, options.ordinal) >= static_cast<int>(sizeof path))
    return error = refused("host_dir", "the path is too long"), nullptr;
  static const int registered = pthread_atfork(&HostCard::before_fork, &HostCard::after_fork_in_parent, &HostCard::after_fork_in_child);
  if (registered != 0) return error = ended(KVC_BROKEN, "pthread_atfork", "it returned %d", registered), nullptr;
  std::lock_guard<std::mutex> guard(table_mutex);
  struct stat known {};
  HostCard *card = stat(path, &known) == 0 ? find(known.st_dev, known.st_ino) : nullptr;
  if (card == nullptr) return make(options, path, error);
  error = card->check(options);
  return error.status == KVC_OK ? card : nullptr;
}

HostCard *HostCard::find(uint64_t device, uint64_t inode) {
  HostCard *card = table_head;
  while (card != nullptr && (card->device_ != device || card->inode_ != inode || card->pid_ != getpid())) card = card->next_;
  return card;
}

HostCard *HostCard::make(const kvc_device_options &options, const char *path, kvc_error &error) {
  auto *card = new HostCard();
  error = card->open_files(options, path);
  if (error.status == KVC_OK) {
    if (HostCard *raced = find(card->device_, card->inode_)) { // its descriptor must stay open: see above
      close(card->memory_);
      delete card;
      error = raced->check(options);
      return error.status == KVC_OK ? raced : nullptr;
    }
    error = card->agree(options);
    if (error.status == KVC_OK) {
      card->own_.assign(card->slots_, 0);
      card->next_ = table_head;
      table_head = card;
      return card;
    }
    close(card->memory_);
    close(card->file_); // no other card object has this file
  }
  delete card;
  return nullptr;
}

kvc_error HostCard::open_files(const kvc_device_options &options, const char *path) {
  struct stat directory {}, file {};
  if (stat(options.host_dir, &directory) != 0 || !S_ISDIR(directory.st_mode)) return refused("host_dir", "%.150s is not a directory", options.host_dir);
  // The memory first: a dying process closes in this order, so its memory is free before its slots are.
  char name[64];
  snprintf(name, sizeof name, "kvcached-host-%d", options.ordinal);
  memory_ = memfd_create(name, MFD_CLOEXEC);
  if (memory_ < 0) return ended(KVC_UNAVAILABLE, "memfd_create", "%s", strerror(errno));
  if (ftruncate(memory_, kMemoryFileBytes) != 0) {
    const int code = errno;
    close(memory_);
    return ended(KVC_UNAVAILABLE, "ftruncate", "the process's memory file: %s", strerror(code));
  }
  const bool fresh = access(path, F_OK) != 0;
  file_ = ::open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file_ < 0 || fstat(file_, &file) != 0) {
    const int code = errno;
    close(memory_);
    if (file_ >= 0) close(file_);
    return ended(KVC_UNAVAILABLE, "open", "%.150s: %s", path, strerror(code));
  }
  // Whoever shares the directory shares the card.
  if (fresh && file.st_uid == geteuid()) fchmod(file_, directory.st_mode & 0666);
  device_ = file.st_dev;
  inode_ = file.st_ino;
  pid_ = getpid();
  return success();
}

// The first process writes the header, the others check theirs against it.
kvc_error HostCard::agree(const kvc_device_options &options) {
  Turn turn(file_, kAgreePauses);
  if (!turn.mine()) return ended(KVC_UNAVAILABLE, "fcntl", "another process has held the host card's capacity file for 2 s");
  Header header{};
  const ssize_t got = pread(file_, &header, sizeof header, 0);
  if (got == 0) {
    header = {kMagic, options.host_capacity, options.host_granularity == 0 ? kDefaultGranularity : options.host_granularity};
    const uint64_t step = header.granularity;
    if (step < 4096 || (step & (step - 1)) != 0) return refused("host_granularity", "%" PRIu64 " is not a power of two from 4096 on", step);
    if (header.capacity < step) return refused("host_capacity", "%" PRIu64 " bytes are less than one page of %" PRIu64, header.capacity, step);
    if (pwrite(file_, &header, sizeof header, 0) != sizeof header) return ended(KVC_UNAVAILABLE, "pwrite", "the capacity file: %s", strerror(errno));
  } else if (got != sizeof header || header.magic != kMagic) {
    return refused("host_dir", "the capacity file in it is not one of ours");
  }
  granularity_ = header.granularity;
  slots_ = header.capacity / header.granularity;
  return check(options);
}

kvc_error HostCard::check(const kvc_device_options &options) const {
  if (options.host_granularity != 0 && options.host_granularity != granularity_)
    return refused("host_granularity", "%" PRIu64 " asked for, the card was made with %" PRIu64 "%s", options.host_granularity, granularity_, kOfAnother);
  if (options.host_capacity != 0 && options.host_capacity / granularity_ != slots_)
    return refused("host_capacity", "%" PRIu64 " bytes asked for, the card was made with %" PRIu64 "%s", options.host_capacity, capacity(), kOfAnother);
  return success();
}

void HostCard::before_fork() { table_mutex.lock(); }
void HostCard::after_fork_in_parent() { table_mutex.unlock(); }

// A child must not keep the parent's memory alive after the parent's slots are gone.
void HostCard::after_fork_in_child() {
  for (HostCard *card = table_head; card != nullptr; card = card->next_) {
    if (card->memory_ >= 0) close(card->memory_);
    card->memory_ = -1;
  }
  table_mutex.unlock();
}

// ---- slots ----------------------------------------------------------------------------------------------------------

int HostCard::lock(short kind, uint64_t first, uint64_t count) const noexcept {
  struct flock range = bytes_from(kind, kFirstSlot + static_cast<off_t>(first), static_cast<off_t>(count));
  return record_lock(file_, F_SETLK, &range);
}

// One stretch of slots inside [first, end) that another process holds; not always the lowest.
bool HostCard::somebody_else(uint64_t first, uint64_t end, uint64_t *theirs, uint64_t *theirs_end) const noexcept {
  struct flock range = bytes_from(F_WRLCK, kFirstSlot + static_cast<off_t>(first), static_cast<off_t>(end - first));
  if (record_lock(file_, F_GETLK, &range) != 0 || range.l_type == F_UNLCK) return false;
  const off_t from = range.l_start - kFirstSlot;
  *theirs = std::max(first, static_cast<uint64_t>(std::max<off_t>(from, 0)));
  *theirs_end = range.l_len == 0 ? end : std::min(end, static_cast<uint64_t>(from + range.l_len));
  return true;
}

uint64_t HostCard::held_by_others(uint64_t first, uint64_t end) const noexcept {
  uint64_t held = 0, theirs = 0, theirs_end = 0;
  while (first < end && somebody_else(first, end, &theirs, &theirs_end)) {
    held += theirs_end - theirs + held_by_others(first, theirs);
    first = theirs_end;
  }
  return held;
}

uint64_t HostCard::free_slots() noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t held = held_ + held_by_others(0, slots_);
  return held < slots_ ? slots_ - held : 0;
}

int HostCard::take(uint64_t count) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  if (count > slots_ - held_) return ENOMEM;
  Turn turn(file_, turn_missed_ ? 0 : kTurnPauses); // whoever was waited for once in vain is not waited for again
  turn_missed_ = !turn.mine();
  uint64_t taken = 0;
  const uint64_t start = cursor_ < slots_ ? cursor_ : 0;
  int error = take_within(start, slots_, count, &taken);
  if (error == 0 && taken < count) error = take_within(0, start, count, &taken);
  if (error == 0 && taken == count) return 0;
  const int undone = give_locked(taken);
  if (undone != 0) return undone;
  return error == 0 ? ENOMEM : error;
}

// Adds to *taken until it is `wanted` or nothing in [first, end) is free.
int HostCard::take_within(uint64_t first, uint64_t end, uint64_t wanted, uint64_t *taken) noexcept {
  while (first < end && *taken < wanted) {
    const void *gap = memchr(&own_[first], 0, end - first);
    if (gap == nullptr) return 0;
    first = static_cast<uint64_t>(static_cast<const char *>(gap) - own_.data());
    uint64_t stop = std::min(end, first + (wanted - *taken));
    if (const void *mine = memchr(&own_[first], 1, stop - first)) stop = static_cast<uint64_t>(static_cast<const char *>(mine) - own_.data());
    const int error = take_gap(first, stop, &first, taken);
    if (error != 0) return error;
  }
  return 0;
}

// Lock the longest free stretch from `first` on, or step over the one that another process holds there.
int HostCard::take_gap(uint64_t first, uint64_t end, uint64_t *next, uint64_t *taken) noexcept {
  while (true) {
    const int error = lock(F_WRLCK, first, end - first);
    if (error == 0) {
      memset(&own_[first], 1, end - first);
      held_ += end - first;
      *taken += end - first;
      own_end_ = std::max(own_end_, end);
      *next = cursor_ = end;
      return 0;
    }
    if (!taken_by_another(error)) return error;
    uint64_t theirs = 0, theirs_end = 0;
    if (!somebody_else(first, end, &theirs, &theirs_end)) continue; // given back in between
    if (theirs == first) {
      *next = theirs_end;
      return 0;
    }
    end = theirs; // shorter each time round
  }
}

int HostCard::give(uint64_t count) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  return give_locked(count);
}

// From the end: what this process keeps stays in one piece.
int HostCard::give_locked(uint64_t count) noexcept {
  while (count > 0) {
    const void *last = memrchr(own_.data(), 1, own_end_);
    if (last == nullptr) return EINVAL;
    const uint64_t end = static_cast<uint64_t>(static_cast<const char *>(last) - own_.data()) + 1;
    const uint64_t least = end > count ? end - count : 0;
    const void *foreign = memrchr(&own_[least], 0, end - least);
    const uint64_t first = foreign == nullptr ? least : static_cast<uint64_t>(static_cast<const char *>(foreign) - own_.data()) + 1;
    const int error = lock(F_UNLCK, first, end - first);
    if (error != 0) return error;
    memset(&own_[first], 0, end - first);
    held_ -= end - first;
    own_end_ = cursor_ = first;
    count -= end - first;
  }
  return 0;
}

} // namespace kvc
