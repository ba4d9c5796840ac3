// SPDX-License-Identifier: Apache-2.0
//
// The C functions: arguments checked, exceptions stopped, outcomes handed over. No decision about memory is made here.
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>

#include "arena.h"
#include "meter.h"

struct kvc_device {
  explicit kvc_device(std::unique_ptr<kvc::Backend> backend) : meter(std::move(backend)), pid(getpid()) {}
  kvc::Meter meter;
  const pid_t pid;
  std::atomic<size_t> arenas{0};
};

struct kvc_arena {
  kvc_arena(kvc_device *owner, std::unique_ptr<kvc::Arena> inner) : device(owner), arena(std::move(inner)) {}
  kvc_device *const device;
  std::unique_ptr<kvc::Arena> arena;
};

namespace {

int report(const kvc_error &outcome, kvc_error *error) {
  if (error != nullptr) *error = outcome;
  return outcome.status;
}

template <class Work>
int guarded(kvc_error *error, Work work) noexcept {
  try {
    return report(work(), error);
  } catch (const std::bad_alloc &) {
    return report(kvc::ended(KVC_OUT_OF_MEMORY, "operator new", "this process has no memory left; nothing was changed"), error);
  } catch (...) {
    return report(kvc::ended(KVC_BROKEN, "kvcached", "an unexpected C++ exception"), error);
  }
}

// Memory belongs to the process that made it; a child that was forked from it has none.
template <class Work>
int on_device(kvc_device *device, kvc_error *error, Work work) noexcept {
  return guarded(error, [&] {
    if (device == nullptr) return kvc::refused("device", "NULL");
    if (device->pid != getpid())
      return kvc::refused("device", "this process was forked after the device was opened; open it anew in process %d", getpid());
    return work(device->meter);
  });
}

template <class Work>
int on_arena(kvc_arena *arena, kvc_error *error, Work work) noexcept {
  if (arena == nullptr) return report(kvc::refused("arena", "NULL"), error);
  return on_device(arena->device, error, [&](kvc::Meter &) { return work(*arena->arena); });
}

kvc_error missing(const char *argument) { return kvc::refused(argument, "NULL"); }

int open_backend(const kvc_device_options &options, std::unique_ptr<kvc::Backend> &out, kvc_error &error) {
  switch (options.backend) {
    case KVC_HOST: return kvc::open_host(options, out, error);
    case KVC_CUDA: return kvc::open_cuda(options, out, error);
    case KVC_HIP: return kvc::open_hip(options, out, error);
    default: error = kvc::refused("backend", "%d is none", options.backend); return error.status;
  }
}

} // namespace

extern "C" {

int kvc_abi_version(void) { return KVC_ABI_VERSION; }

const char *kvc_status_name(int status) {
  static const char *const names[] = {"OK", "OUT_OF_MEMORY", "REFUSED", "QUARANTINED", "BROKEN", "OUT_OF_MAPS", "UNAVAILABLE"};
  return status >= 0 && status < static_cast<int>(sizeof names / sizeof *names) ? names[status] : "not a status";
}

int kvc_device_open(const kvc_device_options *options, kvc_device **out, kvc_error *error) {
  return guarded(error, [&] {
    if (options == nullptr || out == nullptr) return missing("options, out");
    kvc_error outcome = kvc::success();
    std::unique_ptr<kvc::Backend> backend;
    if (open_backend(*options, backend, outcome) == KVC_OK) *out = new kvc_device(std::move(backend));
    return outcome;
  });
}

int kvc_device_close(kvc_device *device, kvc_error *error) {
  const int status = on_device(device, error, [&](kvc::Meter &) {
    const size_t arenas = device->arenas;
    return arenas == 0 ? kvc::success() : kvc::refused("device", "%zu of its arenas are not destroyed", arenas);
  });
  if (status == KVC_OK) delete device;
  return status;
}

int kvc_device_get_info(kvc_device *device, kvc_device_info *out, kvc_error *error) {
  return on_device(device, error, [&](kvc::Meter &meter) {
    if (out == nullptr) return missing("out");
    *out = meter.info();
    return kvc::success();
  });
}

int kvc_device_memory(kvc_device *device, uint64_t *free_bytes, uint64_t *total_bytes, kvc_error *error) {
  return on_device(device, error, [&](kvc::Meter &meter) {
    if (free_bytes == nullptr || total_bytes == nullptr) return missing("free_bytes, total_bytes");
    kvc::Current current(meter);
    if (!current.result().ok()) return kvc::failed(meter, current.result());
    const kvc::Result result = meter.memory(free_bytes, total_bytes);
    return result.ok() ? kvc::success() : kvc::failed(meter, result);
  });
}

int kvc_device_fail(kvc_device *device, int kind, uint64_t nth, int from_there_on, int driver_code, kvc_error *error) {
  return on_device(device, error, [&](kvc::Meter &meter) {
    if (kind < 0 || kind >= KVC_CALL_KINDS) return kvc::refused("kind", "%d is none", kind);
    meter.fail(static_cast<kvc_call>(kind), nth, from_there_on != 0, driver_code);
    return kvc::success();
  });
}

int kvc_device_calls(kvc_device *device, uint64_t *counts, uint64_t *nanoseconds, kvc_error *error) {
  return on_device(device, error, [&](kvc::Meter &meter) {
    for (int kind = 0; kind < KVC_CALL_KINDS; ++kind) {
      if (counts != nullptr) counts[kind] = meter.count(static_cast<kvc_call>(kind));
      if (nanoseconds != nullptr) nanoseconds[kind] = meter.nanoseconds(static_cast<kvc_call>(kind));
    }
    return kvc::success();
  });
}

int kvc_arena_create(kvc_device *device, const kvc_arena_config *config, kvc_arena **out, kvc_error *error) {
  return on_device(device, error, [&](kvc::Meter &meter) {
    if (config == nullptr || out == nullptr) return missing("config, out");
    auto holder = std::make_unique<kvc_arena>(device, nullptr);
    const kvc_error outcome = kvc::Arena::create(meter, *config, holder->arena);
    if (outcome.status != KVC_OK) return outcome;
    device->arenas += 1;
    *out = holder.release();
    return outcome;
  });
}

int kvc_arena_destroy(kvc_arena *arena, kvc_error *error) {
  bool done = false;
  const int status = on_arena(arena, error, [&](kvc::Arena &inner) {
    const kvc_error outcome = inner.destroy();
    done = true;
    return outcome;
  });
  if (done) {
    arena->device->arenas -= 1;
    delete arena;
  }
  return status;
}

uint64_t kvc_arena_base(const kvc_arena *arena) { return arena == nullptr ? 0 : arena->arena->base(); }

int kvc_arena_get_stats(kvc_arena *arena, kvc_arena_stats *out, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) {
    if (out == nullptr) return missing("out");
    *out = inner.stats();
    return kvc::success();
  });
}

int kvc_arena_acquire(kvc_arena *arena, uint64_t run_pages, uint64_t runs, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) { return inner.acquire(run_pages, runs); });
}

int kvc_arena_trim(kvc_arena *arena, uint64_t run_pages, uint64_t runs, uint64_t *released_bytes, kvc_error *error) {
  uint64_t released = 0;
  const int status = on_arena(arena, error, [&](kvc::Arena &inner) { return inner.trim(run_pages, runs, &released); });
  if (released_bytes != nullptr) *released_bytes = released;
  return status;
}

int kvc_arena_map(kvc_arena *arena, const kvc_run *runs, size_t count, kvc_run *bad, size_t bad_room, size_t *bad_count,
                  kvc_error *error) {
  kvc::BadRuns list{bad, bad == nullptr ? 0 : bad_room, 0};
  const int status = on_arena(arena, error, [&](kvc::Arena &inner) {
    return runs == nullptr && count != 0 ? missing("runs") : inner.map(runs, count, list);
  });
  if (bad_count != nullptr) *bad_count = list.count;
  return status;
}

int kvc_arena_unmap_prepare(kvc_arena *arena, uint64_t tx, const kvc_run *runs, size_t count, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) {
    return runs == nullptr && count != 0 ? missing("runs") : inner.prepare(tx, runs, count);
  });
}

int kvc_arena_unmap_commit(kvc_arena *arena, uint64_t tx, int keep, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) { return inner.commit(tx, keep != 0); });
}

int kvc_arena_unmap_abort(kvc_arena *arena, uint64_t tx, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) { return inner.abort(tx); });
}

int kvc_arena_unmap(kvc_arena *arena, const kvc_run *runs, size_t count, int keep, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) {
    return runs == nullptr && count != 0 ? missing("runs") : inner.unmap(runs, count, keep != 0);
  });
}

int kvc_arena_quarantined(kvc_arena *arena, kvc_run *out, size_t room, size_t *count, kvc_error *error) {
  return on_arena(arena, error, [&](kvc::Arena &inner) {
    if (count == nullptr) return missing("count");
    *count = inner.quarantined(out, out == nullptr ? 0 : room);
    return kvc::success();
  });
}

} // extern "C"
