// SPDX-License-Identifier: Apache-2.0
//
// Every driver call made to fail: once, and from there on; and then the undo as well.
#include "harness.h"

namespace contract {
namespace {

const std::vector<kvc_run> batch = {{0, 2}, {2, 1}, {4, 3}, {8, 1}};
constexpr uint64_t batch_pages = 7;

bool undone(int status) { return status == KVC_OUT_OF_MEMORY || status == KVC_OUT_OF_MAPS; }

// What the driver says is gone is what the arena says it holds.
void check_books(Device &device, Arena &arena, uint64_t free_before) {
  if (!setting.real()) CHECK_EQ(free_before - device.free_bytes(), arena.held());
}

constexpr uint64_t edge_bytes = 512; // the ends of a run tell whether the right memory is behind it

template <class Look>
void each_edge(Arena &arena, Look look) {
  for (uint32_t plane = 0; plane < arena.shape().planes; ++plane)
    for (const kvc_run &run : batch) {
      look(arena.address(run.first, plane));
      look(arena.address(run.first + run.count, plane) - edge_bytes);
    }
}

void fill(Arena &arena, Memory &memory, uint8_t value) {
  each_edge(arena, [&](uint64_t address) { CHECK(memory.fill(address, edge_bytes, value)); });
}

void check_filled(Arena &arena, Memory &memory, uint8_t value) {
  each_edge(arena, [&](uint64_t address) { CHECK(memory.holds(address, edge_bytes, value)); });
}

// Runs `work` with the nth call of `kind` failing; returns its status.
int with_fault(Device &device, int kind, uint64_t nth, bool on, const std::function<int()> &work) {
  device.fail_call(kind, nth, on);
  const int status = work();
  device.clear_faults();
  return status;
}

void check_quarantine(Device &device, Arena &arena, bool named) {
  const std::vector<kvc_run> fenced = arena.quarantined();
  CHECK(arena.stats().quarantined_bytes != 0);
  if (named) CHECK(!fenced.empty());
  for (const kvc_run &run : fenced) {
    CHECK_EQ(arena.map({run}), KVC_REFUSED);
    CHECK_EQ(arena.unmap({run}), KVC_REFUSED);
  }
  CHECK_EQ(arena.map({{14, 2}}), KVC_OK); // the rest of the arena works
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(live_handles(device), 0);
}

// One map with the nth call failing. False: the call was not reached.
bool try_map(Device &device, Memory &memory, const Shape &shape, int kind, uint64_t nth, bool on) {
  const uint64_t free_before = device.free_bytes();
  Arena arena(device, shape);
  CHECK_EQ(arena.map({{0, 1}, {4, 1}, {5, 1}}), KVC_OK); // so that some pages were used before
  CHECK_EQ(arena.unmap({{0, 1}, {4, 1}, {5, 1}}), KVC_OK);
  CHECK_EQ(arena.acquire(1, 1), KVC_OK); // and some handles are cached
  const kvc_arena_stats before = arena.stats();
  const int status = with_fault(device, kind, nth, on, [&] { return arena.map(batch); });
  check_books(device, arena, free_before);
  if (status == KVC_QUARANTINED) {
    CHECK(on);
    CHECK(arena.bad == arena.quarantined());
    check_quarantine(device, arena, true);
    return true;
  }
  CHECK(status == KVC_OK || undone(status));
  if (status != KVC_OK) {
    CHECK(same(arena.stats(), before) && arena.bad.empty());
    CHECK_EQ(arena.map(batch), KVC_OK); // the retry works
  }
  CHECK_EQ(arena.stats().mapped_pages, batch_pages);
  fill(arena, memory, 5);
  check_filled(arena, memory, 5);
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(live_handles(device), 0);
  return status != KVC_OK;
}

bool try_prepare(Device &device, Memory &memory, const Shape &shape, int kind, uint64_t nth, bool on) {
  const uint64_t free_before = device.free_bytes();
  Arena arena(device, shape);
  CHECK_EQ(arena.map(batch), KVC_OK);
  fill(arena, memory, 6);
  const kvc_arena_stats before = arena.stats();
  const int status = with_fault(device, kind, nth, on, [&] { return arena.prepare(1, batch); });
  check_books(device, arena, free_before);
  if (status == KVC_QUARANTINED) {
    CHECK(on);
    CHECK_EQ(arena.prepare(1, batch), KVC_QUARANTINED); // the first answer again
    check_quarantine(device, arena, true);
    return true;
  }
  if (status == KVC_OK) {
    CHECK_EQ(arena.abort(1), KVC_OK);
  } else {
    CHECK(undone(status));
    CHECK_EQ(arena.prepare(1, batch), status);
    CHECK(same(arena.stats(), before));
  }
  check_filled(arena, memory, 6);
  CHECK_EQ(arena.unmap(batch), KVC_OK);
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(live_handles(device), 0);
  return status != KVC_OK;
}

bool try_abort(Device &device, Memory &memory, const Shape &shape, int kind, uint64_t nth, bool on) {
  const uint64_t free_before = device.free_bytes();
  Arena arena(device, shape);
  CHECK_EQ(arena.map(batch), KVC_OK);
  fill(arena, memory, 7);
  CHECK_EQ(arena.prepare(1, batch), KVC_OK);
  const kvc_arena_stats before = arena.stats();
  const int status = with_fault(device, kind, nth, on, [&] { return arena.abort(1); });
  check_books(device, arena, free_before);
  if (status == KVC_QUARANTINED) {
    CHECK(on);
    CHECK_EQ(arena.abort(1), KVC_OK); // the rest comes back
    CHECK_EQ(arena.stats().prepared_bytes, 0);
    check_quarantine(device, arena, true);
    return true;
  }
  if (status != KVC_OK) {
    CHECK(undone(status));
    CHECK(same(arena.stats(), before));
    CHECK_EQ(arena.abort(1), KVC_OK);
  }
  check_filled(arena, memory, 7);
  CHECK_EQ(arena.destroy(), KVC_OK);
  CHECK_EQ(live_handles(device), 0);
  return status != KVC_OK;
}

using Attempt = bool (*)(Device &, Memory &, const Shape &, int, uint64_t, bool);

void fail_each(Device &device, Memory &memory, const Shape &shape, Attempt attempt, const std::vector<int> &kinds) {
  for (const int kind : kinds)
    for (const bool on : {false, true})
      for (uint64_t nth = 1; attempt(device, memory, shape, kind, nth, on); ++nth) CHECK(nth < 1000);
}

void check_creation(Device &device, uint32_t zero) {
  const uint64_t page = device.granularity();
  const kvc_arena_config config{page, 3, 2, zero, 4 * page, 0};
  for (const int kind : {KVC_CALL_RESERVE, KVC_CALL_CREATE, KVC_CALL_MAP, KVC_CALL_ACCESS})
    for (const bool on : {false, true})
      for (uint64_t nth = 1; nth < 50; ++nth) {
        kvc_arena *arena = nullptr;
        device.fail_call(kind, nth, on);
        const int status = kvc_arena_create(device.get(), &config, &arena, nullptr);
        device.clear_faults();
        if (arena != nullptr) CHECK_EQ(kvc_arena_destroy(arena, nullptr), KVC_OK);
        CHECK_EQ(live_handles(device), 0);
        CHECK_EQ(device.calls(KVC_CALL_RESERVE), device.calls(KVC_CALL_FREE));
        CHECK((status == KVC_OK) == (arena != nullptr));
        if (status == KVC_OK) break;
        CHECK(undone(status));
      }
}

void check_acquire(Device &device) {
  Arena arena(device, {16, 3, KVC_ZERO_NEVER, 0, 0, 1});
  for (uint64_t nth = 1; nth <= 6; ++nth)
    for (const bool on : {false, true}) {
      CHECK_EQ(with_fault(device, KVC_CALL_CREATE, nth, on, [&] { return arena.acquire(2, 2); }), KVC_OUT_OF_MEMORY);
      CHECK_EQ(arena.held(), 0);
      CHECK_EQ(live_handles(device), 0);
    }
  CHECK_EQ(with_fault(device, KVC_CALL_CREATE, 7, true, [&] { return arena.acquire(2, 2); }), KVC_OK);
  CHECK_EQ(live_handles(device), 6);
}

void check_other_codes(Device &device) {
  Arena arena(device, {16, 1, KVC_ZERO_NEVER, 0, 0, 1});
  device.fail_call(KVC_CALL_MAP, 2, false, 9999);
  CHECK_EQ(arena.map(batch), KVC_BROKEN);
  CHECK_EQ(arena.error.driver_code, 9999);
  CHECK_EQ(arena.held(), 0);
  CHECK_EQ(arena.map(batch), KVC_OK);
}

} // namespace

void check_faults() {
  const auto memory = open_memory();
  Device device;
  for (const uint32_t zero : {KVC_ZERO_NEVER, KVC_ZERO_USED, KVC_ZERO_ALL}) {
    for (const uint32_t planes : {1U, 2U}) {
      const Shape shape{16, planes, zero, 0, 1, 1};
      fail_each(device, *memory, shape, try_map, {KVC_CALL_CREATE, KVC_CALL_MAP, KVC_CALL_ACCESS, KVC_CALL_UNMAP});
      fail_each(device, *memory, shape, try_prepare, {KVC_CALL_UNMAP, KVC_CALL_MAP, KVC_CALL_ACCESS});
      fail_each(device, *memory, shape, try_abort, {KVC_CALL_UNMAP, KVC_CALL_MAP, KVC_CALL_ACCESS});
    }
    check_creation(device, zero);
  }
  check_acquire(device);
  check_other_codes(device);
}

void check_undo_failures() {
  Device device;
  for (const uint32_t zero : {KVC_ZERO_NEVER, KVC_ZERO_USED}) {
    { // a map fails, and so does the unmap that would undo it
      const uint64_t free_before = device.free_bytes();
      Arena arena(device, {16, 2, zero, 0, 0, 1});
      CHECK_EQ(arena.map({{12, 2}}), KVC_OK);
      device.fail_call(KVC_CALL_MAP, 6, true);
      device.fail_call(KVC_CALL_UNMAP, 1, false);
      CHECK_EQ(arena.map(batch), KVC_QUARANTINED);
      device.clear_faults();
      CHECK((arena.bad == std::vector<kvc_run>{{4, 3}}));
      CHECK((arena.quarantined() == arena.bad));
      CHECK_EQ(arena.stats().quarantined_bytes, 6 * arena.page_bytes());
      CHECK_EQ(arena.stats().mapped_pages, 2);
      check_books(device, arena, free_before);
      CHECK_EQ(arena.map({{0, 2}, {2, 1}}), KVC_OK); // the others of the batch are as before
      check_quarantine(device, arena, true);
    }
    { // a release fails: the handles are accounted for, no page is fenced
      Arena arena(device, {16, 2, zero, 0, 0, 1});
      CHECK_EQ(arena.map({{0, 2}, {2, 1}}), KVC_OK);
      CHECK_EQ(arena.prepare(1, {{0, 2}, {2, 1}}), KVC_OK);
      CHECK_EQ(with_fault(device, KVC_CALL_RELEASE, 2, false, [&] { return arena.commit(1); }), KVC_QUARANTINED);
      CHECK_EQ(arena.commit(1), KVC_QUARANTINED);
      CHECK_EQ(arena.stats().quarantined_bytes, 2 * arena.page_bytes());
      CHECK_EQ(arena.stats().prepared_bytes, 0);
      CHECK(arena.quarantined().empty());
      CHECK_EQ(arena.map({{0, 2}, {2, 1}}), KVC_OK);
      CHECK_EQ(arena.unmap({{0, 2}}, true), KVC_OK);
      uint64_t released = 9;
      device.fail_call(KVC_CALL_RELEASE, 2, false);
      CHECK_EQ(kvc_arena_trim(arena.get(), 0, 9, &released, nullptr), KVC_QUARANTINED);
      CHECK_EQ(released, 2 * arena.page_bytes());
      check_quarantine(device, arena, false);
    }
    { // a create fails, and so does the release that would undo the ones before
      Arena arena(device, {16, 2, zero, 0, 0, 1});
      device.fail_call(KVC_CALL_CREATE, 4, false);
      device.fail_call(KVC_CALL_RELEASE, 1, false);
      CHECK_EQ(arena.acquire(1, 3), KVC_QUARANTINED);
      CHECK_EQ(arena.stats().quarantined_bytes, arena.page_bytes());
      device.fail_call(KVC_CALL_CREATE, 4, false);
      device.fail_call(KVC_CALL_RELEASE, 1, false);
      CHECK_EQ(arena.map({{0, 1}, {1, 1}, {2, 1}}), KVC_QUARANTINED);
      CHECK(arena.bad.empty());
      check_quarantine(device, arena, false);
    }
  }
  { // destroy says what it could not give back (here: addresses)
    Arena arena(device, {16, 2, KVC_ZERO_NEVER, 0, 0, 1});
    CHECK_EQ(arena.map(batch), KVC_OK);
    CHECK_EQ(arena.acquire(1, 2), KVC_OK);
    CHECK(with_fault(device, KVC_CALL_FREE, 1, false, [&] { return arena.destroy(); }) != KVC_OK);
    CHECK_EQ(live_handles(device), 0);
  }
}

} // namespace contract
