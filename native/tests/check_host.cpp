// SPDX-License-Identifier: Apache-2.0
//
// What only the host device has: map entries, a memory file, a capacity shared by processes, and fork.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <new>

#include "harness.h"

namespace contract {
namespace {

// Entries of the kernel's map table inside an address range.
size_t map_entries(uint64_t base, uint64_t bytes) {
  std::ifstream table("/proc/self/maps");
  std::string line;
  size_t count = 0;
  while (std::getline(table, line)) {
    uint64_t first = 0, end = 0;
    if (sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &first, &end) == 2 && first < base + bytes && end > base) ++count;
  }
  return count;
}

// Bytes of real memory in the process's memory file, -1 when it has none.
int64_t file_bytes() {
  for (int descriptor = 0; descriptor < 256; ++descriptor) {
    char path[64], target[256] = {};
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    if (readlink(path, target, sizeof target - 1) < 0 || strstr(target, "memfd:kvcached-host") == nullptr) continue;
    struct stat status {};
    CHECK_EQ(fstat(descriptor, &status), 0);
    return status.st_blocks * 512;
  }
  return -1;
}

// Runs `work` in a forked child; its failures are ours.
void in_child(const std::function<void()> &work) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    work();
    _exit(failures == 0 ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

void check_memory_returns() {
  const auto memory = open_memory();
  Device device;
  CHECK_EQ(strncmp(device.info().uuid, "HOST-0-", 7), 0);
  Arena arena(device, {64, 1, KVC_ZERO_NEVER, 0, 0, 1});
  std::vector<kvc_run> singles;
  for (uint64_t page = 0; page < 32; ++page) singles.push_back({page, 1});
  CHECK_EQ(arena.map(singles), KVC_OK);
  // The kernel sees one mapping where pages of one batch lie side by side, also after handles were reused.
  CHECK_EQ(map_entries(arena.address(0), 32 * arena.page_bytes()), 1);
  CHECK_EQ(arena.unmap(singles, true), KVC_OK);
  CHECK_EQ(arena.map(singles), KVC_OK);
  CHECK_EQ(map_entries(arena.address(0), 32 * arena.page_bytes()), 1);
  CHECK_EQ(arena.unmap(singles), KVC_OK);
  CHECK_EQ(arena.acquire(1, 32), KVC_OK);
  CHECK_EQ(arena.map(singles), KVC_OK);
  CHECK_EQ(map_entries(arena.address(0), 32 * arena.page_bytes()), 1);
  CHECK(memory->fill(arena.address(0), 32 * arena.page_bytes(), 1));
  CHECK_EQ(file_bytes(), 32 * arena.page_bytes());
  CHECK_EQ(arena.unmap({{3, 1}, {7, 1}}, true), KVC_OK);
  CHECK_EQ(file_bytes(), 32 * arena.page_bytes()); // kept
  CHECK_EQ(arena.trim(), 2 * arena.page_bytes());
  CHECK_EQ(file_bytes(), 30 * arena.page_bytes());
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(file_bytes(), 0);
}

// Pages apart from each other need entries of their own: they run out at vm.max_map_count, with memory left.
void check_map_entries() {
  uint64_t limit = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit;
  kvc_device_options wanted = options();
  wanted.ordinal = 7;
  wanted.host_granularity = 4096;
  wanted.host_capacity = 4 * limit * 4096;
  kvc_device *device = nullptr;
  if (limit > 200000) return; // a machine set up so that it does not run out
  CHECK_EQ(kvc_device_open(&wanted, &device, nullptr), KVC_OK);
  const kvc_arena_config config{4096, 4 * limit, 1, KVC_ZERO_NEVER, 0, 0};
  kvc_arena *arena = nullptr;
  CHECK_EQ(kvc_arena_create(device, &config, &arena, nullptr), KVC_OK);
  const auto memory = open_memory();
  kvc_error error{};
  // Four neighbours, one entry for all: taking one out of the middle needs more entries, not fewer.
  const kvc_run merged[] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}};
  CHECK_EQ(kvc_arena_map(arena, merged, 4, nullptr, 0, nullptr, nullptr), KVC_OK);
  std::vector<kvc_run> runs(500);
  uint64_t next = 6;
  int status = KVC_OK;
  while (status == KVC_OK && next < 3 * limit) {
    for (kvc_run &run : runs) run = {next, 1}, next += 2;
    status = kvc_arena_map(arena, runs.data(), runs.size(), nullptr, 0, nullptr, &error);
  }
  CHECK_EQ(status, KVC_OUT_OF_MAPS);
  CHECK(error.driver_code == ENOMEM && next / 2 > limit / 4);
  kvc_arena_stats stats{};
  CHECK_EQ(kvc_arena_get_stats(arena, &stats, nullptr), KVC_OK);
  CHECK_EQ(stats.mapped_pages, 4 + (next - 6) / 2 - 500);
  CHECK_EQ(stats.mapped_bytes, stats.mapped_pages * 4096);
  CHECK_EQ(stats.quarantined_bytes, 0);
  const uint64_t base = kvc_arena_base(arena);
  for (const uint64_t page : {uint64_t{0}, next - 1002}) CHECK(memory->writable(base + page * 4096));
  CHECK(!memory->readable(base + (next - 1000) * 4096)); // the failed batch was undone
  // Up to the very last entry, one by one.
  for (kvc_run one{next, 1}; status == KVC_OUT_OF_MAPS && one.first < 4 * limit; one.first += 2)
    if (kvc_arena_map(arena, &one, 1, nullptr, 0, nullptr, nullptr) != KVC_OK) status = KVC_OK;
  const kvc_run middle[] = {{1, 1}, {6, 1}};
  status = kvc_arena_unmap(arena, middle, 2, 0, nullptr);
  CHECK(status == KVC_OK || status == KVC_OUT_OF_MAPS);
  CHECK(memory->writable(base) && memory->writable(base + 3 * 4096));
  CHECK_EQ(memory->writable(base + 4096), status == KVC_OUT_OF_MAPS);
  // Giving some back makes room again.
  CHECK_EQ(kvc_arena_unmap(arena, runs.data(), 0, 0, nullptr), KVC_OK);
  const kvc_run some[] = {{8, 1}, {10, 1}, {12, 1}}, other{next - 500, 1};
  CHECK_EQ(kvc_arena_unmap(arena, some, 3, 0, nullptr), KVC_OK);
  CHECK_EQ(kvc_arena_map(arena, &other, 1, nullptr, 0, nullptr, nullptr), KVC_OK);
  CHECK_EQ(kvc_arena_destroy(arena, nullptr), KVC_OK);
  CHECK_EQ(kvc_device_close(device, nullptr), KVC_OK);
}

void check_sizes_agree() {
  Device device;
  kvc_device *other = nullptr;
  kvc_error error{};
  kvc_device_options wanted = options();
  wanted.host_capacity += device.granularity();
  CHECK_EQ(kvc_device_open(&wanted, &other, &error), KVC_REFUSED);
  CHECK(strstr(error.message, std::to_string(wanted.host_capacity).c_str()) != nullptr);
  CHECK(strstr(error.message, std::to_string(options().host_capacity).c_str()) != nullptr);
  wanted = options();
  wanted.host_granularity = 2 * device.granularity();
  CHECK_EQ(kvc_device_open(&wanted, &other, &error), KVC_REFUSED);
  wanted.host_dir = "/nowhere/at/all";
  CHECK_EQ(kvc_device_open(&wanted, &other, &error), KVC_REFUSED);
  in_child([&] { // another process, which does not know the card yet
    kvc_device *mine = nullptr;
    kvc_device_options mismatch = options();
    mismatch.host_capacity += device.granularity();
    CHECK_EQ(kvc_device_open(&mismatch, &mine, nullptr), KVC_REFUSED);
    mismatch.host_capacity = 0;
    mismatch.host_granularity = 0;
    CHECK_EQ(kvc_device_open(&mismatch, &mine, nullptr), KVC_OK);
    kvc_device_info info{};
    CHECK_EQ(kvc_device_get_info(mine, &info, nullptr), KVC_OK);
    CHECK_EQ(info.total_bytes, options().host_capacity);
  });
}

// The kernel drops a process's locks on a file when any descriptor of it is closed: closing a device must not do that.
void check_two_devices() {
  Device device;
  const uint64_t free_before = device.free_bytes();
  Arena arena(device, {8, 1, KVC_ZERO_NEVER, 0, 0, 1});
  CHECK_EQ(arena.map({{0, 8}}), KVC_OK);
  { Device second; CHECK_EQ(second.free_bytes(), free_before - 8 * arena.page_bytes()); }
  in_child([&] {
    Device third;
    CHECK_EQ(third.free_bytes(), free_before - 8 * arena.page_bytes());
  });
}

void check_fork() {
  const auto memory = open_memory();
  Device device;
  Arena arena(device, {8, 1, KVC_ZERO_USED, 0, 0, 1});
  CHECK_EQ(arena.map({{0, 2}}), KVC_OK);
  CHECK(memory->fill(arena.address(0), 16, 3));
  in_child([&] {
    kvc_error error{};
    uint64_t word = 0;
    CHECK_EQ(arena.map({{4, 1}}), KVC_REFUSED);
    CHECK(strstr(arena.error.message, "forked") != nullptr);
    CHECK_EQ(arena.unmap({{0, 2}}), KVC_REFUSED);
    CHECK_EQ(kvc_arena_destroy(arena.get(), &error), KVC_REFUSED);
    CHECK_EQ(kvc_device_memory(device.get(), &word, &word, nullptr), KVC_REFUSED);
    CHECK_EQ(kvc_device_close(device.get(), nullptr), KVC_REFUSED);
    const auto eyes = open_memory();
    CHECK(!eyes->readable(arena.address(0))); // not inherited,
    CHECK_EQ(file_bytes(), -1);               // and nothing keeps the parent's memory alive after its death
    Device own; // but it may be a process of the card in its own right
    Arena mine(own, {8, 1, KVC_ZERO_NEVER, 0, 0, 1});
    CHECK_EQ(mine.map({{0, 3}}), KVC_OK);
    CHECK(eyes->holds(mine.address(0), 16, 0));
    CHECK_EQ(own.free_bytes(), own.info().total_bytes - 6 * mine.page_bytes());
  });
  CHECK(memory->holds(arena.address(0), 16, 3));
  CHECK_EQ(arena.map({{4, 1}}), KVC_OK);
  CHECK_EQ(device.free_bytes(), device.info().total_bytes - 4 * arena.page_bytes());
}

// A child that does `take` and stays until it is killed.
pid_t start_holder(const std::function<bool()> &take) {
  int ready[2];
  CHECK_EQ(pipe(ready), 0);
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (write(ready[1], take() ? "y" : "n", 1) == 1) pause();
    _exit(1);
  }
  char answer = 0;
  CHECK(read(ready[0], &answer, 1) == 1 && answer == 'y');
  close(ready[0]), close(ready[1]);
  return child;
}

void end_holder(pid_t child) {
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
}

void check_death() {
  Device device;
  const pid_t child = start_holder([] {
    static Device own; // stays open
    static Arena mine(own, {256, 1, KVC_ZERO_NEVER, 0, 0, 1});
    return mine.map({{0, 100}, {100, 100}}) == KVC_OK;
  });
  CHECK_EQ(device.free_bytes(), 56 * device.granularity());
  Arena arena(device, {256, 1, KVC_ZERO_NEVER, 0, 0, 1});
  CHECK_EQ(arena.map({{0, 57}}), KVC_OUT_OF_MEMORY);
  CHECK_EQ(device.free_bytes(), 56 * device.granularity());
  end_holder(child);
  CHECK_EQ(device.free_bytes(), device.info().total_bytes);
  CHECK_EQ(arena.map({{0, 256}}), KVC_OK);
}

struct Race {
  std::atomic<int> arrived{0}, winners{0}, mistakes{0};
  void meet(int goal) { // all of the processes, once more
    ++arrived;
    while (arrived < goal) sched_yield();
  }
};

bool lock_bytes(int file, off_t first, off_t count) {
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_start = first;
  range.l_len = count;
  return fcntl(file, F_SETLK, &range) == 0;
}

int open_capacity_file() { return open((setting.directory + "/kvcached-host-0.capacity").c_str(), O_RDWR); }

// A process that was stopped in the middle of taking slots delays the others by a bounded time, and nobody gets too much.
void check_stopped_process() {
  Device device;
  const pid_t holder = start_holder([] { return lock_bytes(open_capacity_file(), 0, 1); });
  Arena arena(device, {300, 1, KVC_ZERO_NEVER, 0, 0, 1});
  for (uint64_t page = 0; page < 200; ++page) CHECK_EQ(arena.map({{page, 1}}), KVC_OK);
  CHECK_EQ(arena.map({{200, 57}}), KVC_OUT_OF_MEMORY);
  CHECK_EQ(arena.map({{200, 56}}), KVC_OK);
  CHECK_EQ(device.free_bytes(), 0);
  end_holder(holder);
}

// Hold every other one of the first `count` slots, as a process does whose memory is in pieces.
bool hold_every_other(off_t count) {
  const int file = open_capacity_file();
  bool held = file >= 0;
  for (off_t slot = 1; slot < count; slot += 2) held = lock_bytes(file, 4096 + slot, 1) && held;
  return held;
}

// Two processes want more than half of what is free at the same moment: one gets it, never both, never none. What is free
// lies in pieces, so that each has to put its share together.
void check_race() {
  constexpr uint64_t held = 80, wanted = 100;
  void *shared = mmap(nullptr, sizeof(Race), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Race *race = new (shared) Race;
  const pid_t holder = start_holder([] { return hold_every_other(2 * held); });
  const auto compete = [race] {
    Device device;
    Arena arena(device, {256, 1, KVC_ZERO_NEVER, 0, 0, 1});
    const uint64_t all = device.info().total_bytes - held * device.granularity();
    for (int round = 0; round < 500; ++round) {
      race->meet(8 * round + 2);
      const bool won = arena.acquire(wanted, 1) == KVC_OK;
      if (won) ++race->winners;
      race->meet(8 * round + 4);
      if (race->winners != 1 || device.free_bytes() != all - wanted * device.granularity()) ++race->mistakes;
      race->meet(8 * round + 6);
      if (won) arena.trim(), race->winners = 0;
      race->meet(8 * round + 8);
      if (arena.held() != 0 || device.free_bytes() != all) ++race->mistakes; // a loser keeps nothing
    }
  };
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    compete();
    _exit(0);
  }
  compete();
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  CHECK_EQ(race->mistakes, 0);
  end_holder(holder);
  munmap(shared, sizeof(Race));
}

} // namespace

void check_host() {
  check_memory_returns();
  check_sizes_agree();
  check_two_devices();
  check_fork();
  check_death();
  check_stopped_process();
  check_race();
  check_map_entries();
}

} // namespace contract
