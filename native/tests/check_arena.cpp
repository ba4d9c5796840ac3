// SPDX-License-Identifier: Apache-2.0
//
// Memory, refusals, transactions, zero backing, threads, out of memory.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "harness.h"

namespace contract {

void check_memory() {
  const auto memory = open_memory();
  Device device;
  CHECK(strlen(device.info().uuid) > 8 && device.granularity() % 4096 == 0);
  for (const uint32_t planes : {1U, 3U}) {
    Arena arena(device, {16, planes, KVC_ZERO_NEVER, 0, planes > 1 ? 2U : 0U, 1});
    CHECK_EQ(kvc_arena_base(arena.get()) % device.granularity(), 0);
    CHECK_EQ(arena.held(), 0);
    const kvc_arena_stats empty = arena.stats();
    CHECK_EQ(arena.map({{2, 3}, {5, 1}, {9, 2}}), KVC_OK);
    CHECK_EQ(arena.stats().mapped_pages, 6);
    CHECK_EQ(arena.stats().mapped_bytes, 6 * planes * arena.page_bytes());
    // Fresh memory reads as zero, whole, and no two places show the same memory.
    for (uint32_t plane = 0; plane < planes; ++plane)
      for (const uint64_t page : {2, 3, 4, 5, 9, 10}) CHECK(memory->holds(arena.address(page, plane), arena.page_bytes(), 0));
    for (uint32_t plane = 0; plane < planes; ++plane)
      for (const uint64_t page : {2, 3, 4, 5, 9, 10})
        CHECK(memory->fill(arena.address(page, plane), arena.page_bytes(), static_cast<uint8_t>(1 + page + 20 * plane)));
    for (uint32_t plane = 0; plane < planes; ++plane)
      for (const uint64_t page : {2, 3, 4, 5, 9, 10})
        CHECK(memory->holds(arena.address(page, plane), arena.page_bytes(), static_cast<uint8_t>(1 + page + 20 * plane)));
    if (setting.may_touch_holes()) CHECK(!memory->readable(arena.address(1)) && !memory->readable(arena.address(6)));
    // A kept handle comes back with what was in it; a released one never does.
    CHECK_EQ(arena.unmap({{5, 1}}, true), KVC_OK);
    CHECK_EQ(arena.stats().cached_bytes, planes * arena.page_bytes());
    if (setting.may_touch_holes()) CHECK(!memory->readable(arena.address(5)));
    const uint64_t created = device.calls(KVC_CALL_CREATE);
    CHECK_EQ(arena.map({{12, 1}}), KVC_OK);
    CHECK_EQ(device.calls(KVC_CALL_CREATE), created);
    CHECK(memory->holds(arena.address(12), arena.page_bytes(), 6));
    CHECK_EQ(arena.unmap({{2, 3}, {9, 2}, {12, 1}}), KVC_OK);
    CHECK(same(arena.stats(), empty));
    CHECK_EQ(arena.map({{2, 3}, {12, 1}}), KVC_OK);
    for (uint32_t plane = 0; plane < planes; ++plane)
      for (const uint64_t page : {2, 3, 4, 12}) CHECK(memory->holds(arena.address(page, plane), arena.page_bytes(), 0));
    // Neighbours of one batch are made accessible by one call where the driver has it so.
    const uint64_t accesses = device.calls(KVC_CALL_ACCESS);
    CHECK_EQ(arena.map({{8, 1}, {6, 2}, {5, 1}}), KVC_OK);
    CHECK_EQ(device.calls(KVC_CALL_ACCESS) - accesses, (setting.backend == KVC_HIP ? 3 : 1) * planes);
    CHECK_EQ(arena.acquire(2, 3), KVC_OK);
    CHECK_EQ(arena.stats().cached_bytes, 6 * planes * arena.page_bytes());
    uint64_t released = 0;
    CHECK_EQ(kvc_arena_trim(arena.get(), 2, 1, &released, nullptr), KVC_OK);
    CHECK_EQ(released, 2 * planes * arena.page_bytes());
    CHECK_EQ(kvc_arena_trim(arena.get(), 1, 9, &released, nullptr), KVC_OK);
    CHECK_EQ(released, 0);
    CHECK_EQ(arena.destroy(), KVC_OK);
    CHECK_EQ(live_handles(device), 0);
  }
  CHECK_EQ(device.calls(KVC_CALL_RESERVE), device.calls(KVC_CALL_FREE));
}

namespace {

void check_bad_configs(Device &device) {
  const uint64_t page = device.granularity();
  const kvc_arena_config bad[] = {
      {page / 2, 4, 1, 0, 0, 0},       {page + 4096 / 2, 4, 1, 0, 0, 0}, {0, 4, 1, 0, 0, 0},
      {page, 0, 1, 0, 0, 0},           {page, UINT64_MAX / page, 1, 0, 0, 0}, {page, 4, 0, 0, 0, 0},
      {page, 4, 2, 0, 3 * page, 0},    {page, 4, 2, 0, 4 * page + 4096 / 2, 0}, {page, 4, 1, 3, 0, 0},
      {page, 4, UINT32_MAX, 0, uint64_t{1} << 40, 0}, {page, 4, 1, 0, 0, UINT64_MAX}, {UINT64_MAX - page + 1, 1, 1, 0, 0, 0},
  };
  for (const kvc_arena_config &config : bad) {
    kvc_arena *arena = nullptr;
    kvc_error error{};
    CHECK_EQ(kvc_arena_create(device.get(), &config, &arena, &error), KVC_REFUSED);
    CHECK(arena == nullptr && error.status == KVC_REFUSED && error.message[0] != 0 && error.call[0] != 0);
  }
  CHECK_EQ(device.calls(KVC_CALL_RESERVE), device.calls(KVC_CALL_FREE));
}

} // namespace

void check_refusals() {
  Device device;
  CHECK_EQ(kvc_abi_version(), KVC_ABI_VERSION);
  CHECK(strcmp(kvc_status_name(KVC_QUARANTINED), "QUARANTINED") == 0 && kvc_status_name(99) != nullptr && kvc_status_name(-1) != nullptr);
  check_bad_configs(device);
  Arena arena(device, {16, 2, KVC_ZERO_NEVER, 0, 0, 1});
  CHECK_EQ(arena.map({{0, 2}, {4, 4}}), KVC_OK);
  CHECK_EQ(arena.prepare(7, {{0, 2}}), KVC_OK);
  const kvc_arena_stats before = arena.stats();
  const uint64_t calls = device.calls(KVC_CALL_MAP) + device.calls(KVC_CALL_UNMAP) + device.calls(KVC_CALL_CREATE);
  const std::vector<std::vector<kvc_run>> bad_maps = {
      {{10, 0}}, {{16, 1}}, {{15, 2}}, {{UINT64_MAX, 2}}, {{1, UINT64_MAX}}, {{4, 1}}, {{3, 2}}, {{0, 1}}, {{10, 2}, {11, 1}}, {{12, 1}, {10, 2}, {12, 1}}, {{10, 1}, {4, 1}},
  };
  for (const auto &runs : bad_maps) CHECK_EQ(arena.map(runs), KVC_REFUSED);
  const std::vector<std::vector<kvc_run>> bad_unmaps = {
      {{10, 1}}, {{4, 2}}, {{5, 3}}, {{3, 5}}, {{4, 5}}, {{0, 2}}, {{4, 4}, {4, 4}}, {{4, 4}, {10, 1}}, {{4, 0}}, {{20, 1}},
  };
  for (const auto &runs : bad_unmaps) {
    CHECK_EQ(arena.unmap(runs), KVC_REFUSED);
    CHECK(arena.error.message[0] != 0);
  }
  CHECK_EQ(arena.acquire(0, 1), KVC_REFUSED);
  CHECK_EQ(arena.acquire(17, 1), KVC_REFUSED);
  CHECK_EQ(arena.acquire(1, UINT64_MAX), KVC_REFUSED);
  CHECK_EQ(kvc_arena_map(arena.get(), nullptr, 3, nullptr, 0, nullptr, nullptr), KVC_REFUSED);
  CHECK_EQ(kvc_arena_map(nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr), KVC_REFUSED);
  CHECK_EQ(kvc_device_close(nullptr, nullptr), KVC_REFUSED);
  CHECK_EQ(kvc_device_close(device.get(), nullptr), KVC_REFUSED);
  CHECK_EQ(kvc_device_fail(device.get(), KVC_CALL_KINDS, 1, 0, 0, nullptr), KVC_REFUSED);
  CHECK(same(arena.stats(), before));
  CHECK_EQ(device.calls(KVC_CALL_MAP) + device.calls(KVC_CALL_UNMAP) + device.calls(KVC_CALL_CREATE), calls);
  // An empty batch is no mistake, and what was refused can be done right afterwards.
  CHECK_EQ(arena.map({}), KVC_OK);
  CHECK_EQ(arena.unmap({}), KVC_OK);
  CHECK_EQ(arena.map({{10, 2}, {12, 1}}), KVC_OK);
  CHECK_EQ(arena.unmap({{4, 4}}), KVC_OK);
}

void check_transactions() {
  const auto memory = open_memory();
  Device device;
  for (const uint32_t zero : {KVC_ZERO_NEVER, KVC_ZERO_USED, KVC_ZERO_ALL}) {
    Arena arena(device, {16, 2, zero, 4, 0, 1});
    CHECK_EQ(arena.map({{0, 1}, {1, 1}, {2, 2}, {8, 1}}), KVC_OK);
    const kvc_arena_stats mapped = arena.stats();
    CHECK(memory->fill(arena.address(2, 1), 2 * arena.page_bytes(), 42));
    CHECK_EQ(arena.prepare(0, {{0, 1}}), KVC_REFUSED);
    CHECK_EQ(arena.commit(1), KVC_REFUSED); // not known
    // prepare, abort: as before, contents too; repeats do nothing.
    CHECK_EQ(arena.prepare(1, {{0, 1}, {2, 2}}), KVC_OK);
    const uint64_t calls = device.calls(KVC_CALL_UNMAP);
    CHECK_EQ(arena.prepare(1, {{0, 1}, {2, 2}}), KVC_OK);
    CHECK_EQ(arena.prepare(1, {{0, 1}}), KVC_REFUSED); // the same number for something else
    CHECK_EQ(device.calls(KVC_CALL_UNMAP), calls);
    CHECK_EQ(arena.stats().prepared_bytes, 6 * arena.page_bytes());
    CHECK_EQ(arena.stats().mapped_pages, 2);
    if (zero == KVC_ZERO_NEVER && setting.may_touch_holes()) CHECK(!memory->readable(arena.address(2, 1)));
    if (zero != KVC_ZERO_NEVER) CHECK(memory->holds(arena.address(2, 1), 2 * arena.page_bytes(), 0));
    CHECK_EQ(arena.map({{0, 1}}), KVC_REFUSED);
    CHECK_EQ(arena.abort(1), KVC_OK);
    CHECK_EQ(arena.abort(1), KVC_OK);
    CHECK(same(arena.stats(), mapped));
    CHECK(memory->holds(arena.address(2, 1), 2 * arena.page_bytes(), 42));
    CHECK_EQ(arena.commit(1), KVC_REFUSED); // after abort
    CHECK_EQ(arena.prepare(1, {{0, 1}, {2, 2}}), KVC_OK); // a late repeat: the first answer, nothing done
    CHECK(same(arena.stats(), mapped));
    // prepare, commit.
    CHECK_EQ(arena.prepare(2, {{2, 2}}), KVC_OK);
    CHECK_EQ(arena.prepare(3, {{0, 1}, {1, 1}}), KVC_OK);
    CHECK_EQ(arena.commit(2, true), KVC_OK);
    CHECK_EQ(arena.commit(2, true), KVC_OK);
    CHECK_EQ(arena.abort(2), KVC_REFUSED); // after commit
    CHECK_EQ(arena.stats().cached_bytes, 4 * arena.page_bytes());
    CHECK_EQ(arena.commit(3), KVC_OK);
    CHECK_EQ(arena.prepare(3, {{0, 1}, {1, 1}}), KVC_OK);
    CHECK_EQ(arena.stats().prepared_bytes, 0);
    CHECK_EQ(arena.held(), 6 * arena.page_bytes() + arena.stats().zero_bytes);
    // abort before prepare; a failed prepare.
    CHECK_EQ(arena.abort(4), KVC_OK);
    CHECK_EQ(arena.prepare(4, {{8, 1}}), KVC_REFUSED);
    CHECK_EQ(arena.prepare(5, {{0, 1}}), KVC_REFUSED); // not mapped
    CHECK_EQ(arena.map({{0, 1}}), KVC_OK);
    CHECK_EQ(arena.prepare(5, {{0, 1}}), KVC_REFUSED); // the first answer again, although it would work now
    CHECK_EQ(arena.commit(5), KVC_REFUSED);
    CHECK_EQ(arena.abort(5), KVC_OK);
    CHECK_EQ(arena.stats().mapped_pages, 2);
    // The history is bounded (4), prepared ones stay.
    CHECK_EQ(arena.prepare(6, {{8, 1}}), KVC_OK);
    for (uint64_t tx = 100; tx < 110; ++tx) CHECK_EQ(arena.abort(tx), KVC_OK);
    CHECK_EQ(arena.commit(2, true), KVC_REFUSED); // forgotten
    CHECK_EQ(arena.prepare(108, {{0, 1}}), KVC_REFUSED);
    CHECK_EQ(arena.prepare(101, {{0, 1}}), KVC_OK); // forgotten, so it is new
    CHECK_EQ(arena.abort(101), KVC_OK);
    CHECK_EQ(arena.commit(6), KVC_OK);
    CHECK_EQ(arena.prepare(9, {{0, 1}}), KVC_OK); // left prepared: destroy releases it
    CHECK_EQ(arena.destroy(), KVC_OK);
    CHECK_EQ(live_handles(device), 0);
  }
}

void check_zero_backing() {
  const auto memory = open_memory();
  Device device;
  for (const uint32_t zero : {KVC_ZERO_USED, KVC_ZERO_ALL}) {
    Arena arena(device, {8, 2, zero, 0, 0, 1});
    CHECK_EQ(arena.stats().zero_bytes, arena.page_bytes());
    CHECK_EQ(arena.held(), arena.page_bytes());
    for (uint32_t plane = 0; plane < 2; ++plane) {
      if (zero == KVC_ZERO_ALL) CHECK(memory->holds(arena.address(0, plane), 8 * arena.page_bytes(), 0));
      if (zero == KVC_ZERO_USED && setting.may_touch_holes()) CHECK(!memory->readable(arena.address(3, plane)));
      if (zero == KVC_ZERO_ALL && setting.may_touch_holes()) CHECK(!memory->writable(arena.address(3, plane)));
    }
    for (int round = 0; round < 3; ++round) {
      CHECK_EQ(arena.map({{2, 2}, {5, 1}}), KVC_OK);
      CHECK(memory->fill(arena.address(2, 1), 2 * arena.page_bytes(), 9) && memory->fill(arena.address(5), arena.page_bytes(), 8));
      CHECK(memory->holds(arena.address(2, 1), 2 * arena.page_bytes(), 9) && memory->holds(arena.address(5), arena.page_bytes(), 8));
      CHECK_EQ(arena.unmap({{2, 2}, {5, 1}}, round == 1), KVC_OK);
      for (uint32_t plane = 0; plane < 2; ++plane) {
        CHECK(memory->holds(arena.address(2, plane), 2 * arena.page_bytes(), 0) && memory->holds(arena.address(5, plane), arena.page_bytes(), 0));
        if (setting.may_touch_holes()) CHECK(!memory->writable(arena.address(2, plane)));
        if (zero == KVC_ZERO_USED && setting.may_touch_holes()) CHECK(!memory->readable(arena.address(4, plane)));
      }
    }
    // What was one run may come back in other pieces.
    CHECK_EQ(arena.map({{3, 1}, {4, 2}}), KVC_OK);
    CHECK(memory->holds(arena.address(2, 1), arena.page_bytes(), 0));
    CHECK_EQ(arena.destroy(), KVC_OK);
    CHECK_EQ(live_handles(device), 0);
    CHECK_EQ(device.calls(KVC_CALL_MAP), device.calls(KVC_CALL_UNMAP));
  }
}

void check_threads() {
  Device device;
  Arena one(device, {8, 1, KVC_ZERO_NEVER, 0, 0, 1}), two(device, {8, 1, KVC_ZERO_USED, 0, 0, 1});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads; // each is new to the device, and makes no device current itself
  for (const uint64_t first : {0, 4})
    for (Arena *arena : {&one, &two})
      threads.emplace_back([&wrong, first, arena] {
        const auto memory = open_memory();
        Arena *shared = arena;
        const uint64_t bytes = std::min<uint64_t>(3 * shared->page_bytes(), 100 * 1000);
        for (int round = 0; round < 20; ++round) {
          const kvc_run runs[] = {{first, 1}, {first + 1, 2}};
          const uint8_t seed = static_cast<uint8_t>(first + 1);
          if (kvc_arena_map(shared->get(), runs, 2, nullptr, 0, nullptr, nullptr) != KVC_OK) ++wrong;
          if (!memory->fill(shared->address(first), bytes, seed)) ++wrong;
          if (!memory->holds(shared->address(first), bytes, seed)) ++wrong;
          if (kvc_arena_unmap(shared->get(), runs, 2, round % 2, nullptr) != KVC_OK) ++wrong;
        }
      });
  for (std::thread &thread : threads) thread.join();
  CHECK_EQ(wrong, 0);
  CHECK_EQ(one.stats().mapped_bytes + two.stats().mapped_bytes, 0);
}

void check_out_of_memory() {
  Device device;
  const uint64_t free_before = device.free_bytes();
  // Few and large handles, so that a real card fills up quickly.
  const uint64_t total_pages = 2 * device.info().total_bytes / device.granularity();
  const uint64_t step = std::max<uint64_t>(1, device.info().total_bytes / device.granularity() / 64);
  Arena arena(device, {total_pages, 1, KVC_ZERO_NEVER, 0, 0, 1});
  uint64_t page = 0;
  int status = KVC_OK;
  while (page + step <= total_pages && (status = arena.map({{page, step}})) == KVC_OK) page += step;
  CHECK_EQ(status, KVC_OUT_OF_MEMORY);
  CHECK(arena.error.bytes == step * arena.page_bytes() && arena.error.driver_code != 0 && arena.error.message[0] != 0);
  CHECK_EQ(arena.stats().mapped_bytes, page * arena.page_bytes());
  CHECK_EQ(arena.acquire(step, 2), KVC_OUT_OF_MEMORY);
  CHECK_EQ(arena.held(), page * arena.page_bytes());
  // After something was given back, what failed works.
  CHECK_EQ(arena.unmap({{0, step}, {step, step}}), KVC_OK);
  CHECK_EQ(arena.map({{page, step}}), KVC_OK);
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(live_handles(device), 0);
  if (!setting.real()) CHECK_EQ(device.free_bytes(), free_before); // a real card is shared
}

} // namespace contract
