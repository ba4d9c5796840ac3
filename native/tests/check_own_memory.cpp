// SPDX-License-Identifier: Apache-2.0
//
// The process's own memory runs out in the middle of a call: nothing has changed, and no exception comes out.
#include <cstdlib>
#include <new>

#include "harness.h"

namespace {
thread_local uint64_t allocations_left = UINT64_MAX; // UINT64_MAX: no end

void *allocate(size_t bytes) {
  if (allocations_left != UINT64_MAX && allocations_left-- == 0) {
    allocations_left = 0;
    throw std::bad_alloc();
  }
  void *memory = malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
} // namespace

void *operator new(size_t bytes) { return allocate(bytes); }
void *operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void *memory) noexcept { free(memory); }
void operator delete[](void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }
void operator delete[](void *memory, size_t) noexcept { free(memory); }

namespace contract {
namespace {

// Runs `work` with ever more allocations allowed until it succeeds; in between nothing may have changed.
void starve(Arena &arena, const char *what, const std::function<int()> &work) {
  const kvc_arena_stats before = arena.stats();
  for (uint64_t allowed = 0; allowed < 100; ++allowed) {
    allocations_left = allowed;
    const int status = work();
    allocations_left = UINT64_MAX;
    if (status == KVC_OK) return;
    CHECK_EQ(status, KVC_OUT_OF_MEMORY);
    CHECK(same(arena.stats(), before));
  }
  fail(__FILE__, __LINE__, std::string(what) + " needs more than 100 allocations");
}

// Accounting for a handle that cannot be released must not need memory either.
void starve_undo(Device &device) {
  Arena arena(device, {16, 2, KVC_ZERO_NEVER, 0, 0, 1});
  const kvc_run runs[] = {{0, 1}, {1, 1}};
  int status = KVC_OUT_OF_MEMORY;
  for (uint64_t allowed = 0; status != KVC_QUARANTINED && allowed < 100; ++allowed) {
    device.fail_call(KVC_CALL_CREATE, 3);
    device.fail_call(KVC_CALL_RELEASE, 1);
    allocations_left = allowed;
    status = kvc_arena_map(arena.get(), runs, 2, nullptr, 0, nullptr, nullptr);
    allocations_left = UINT64_MAX;
    device.clear_faults();
  }
  CHECK_EQ(status, KVC_QUARANTINED);
  CHECK_EQ(arena.stats().quarantined_bytes, arena.page_bytes());
}

} // namespace

void check_own_memory_failures() {
  Device device;
  starve_undo(device);
  const kvc_run runs[] = {{0, 2}, {4, 1}, {5, 1}};
  for (const uint32_t zero : {KVC_ZERO_NEVER, KVC_ZERO_USED}) {
    Arena arena(device, {16, 2, zero, 0, 0, 1});
    starve(arena, "acquire", [&] { return kvc_arena_acquire(arena.get(), 1, 2, nullptr); });
    starve(arena, "map", [&] { return kvc_arena_map(arena.get(), runs, 3, nullptr, 0, nullptr, nullptr); });
    uint64_t tx = 1; // a prepare that failed is remembered, so each try is a new one
    starve(arena, "prepare", [&] { return kvc_arena_unmap_prepare(arena.get(), ++tx, runs, 3, nullptr); });
    starve(arena, "abort", [&] { return kvc_arena_unmap_abort(arena.get(), tx, nullptr); });
    starve(arena, "prepare", [&] { return kvc_arena_unmap_prepare(arena.get(), ++tx, runs, 3, nullptr); });
    starve(arena, "commit", [&] { return kvc_arena_unmap_commit(arena.get(), tx, 1, nullptr); });
    starve(arena, "trim", [&] { return kvc_arena_trim(arena.get(), 0, 99, nullptr, nullptr); });
    starve(arena, "abort early", [&] { return kvc_arena_unmap_abort(arena.get(), 99, nullptr); });
    CHECK_EQ(arena.map({{0, 2}}), KVC_OK);
    kvc_arena *other = nullptr;
    const kvc_arena_config config{arena.page_bytes(), 4, 1, zero, 0, 0};
    starve(arena, "create", [&] { return kvc_arena_create(device.get(), &config, &other, nullptr); });
    CHECK_EQ(kvc_arena_destroy(other, nullptr), KVC_OK);
  }
  CHECK_EQ(live_handles(device), 0);
  CHECK_EQ(device.calls(KVC_CALL_RESERVE), device.calls(KVC_CALL_FREE));
}

} // namespace contract
