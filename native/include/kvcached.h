/* SPDX-License-Identifier: Apache-2.0
 *
 * kvcached.h: the data plane's contract. Reserve device addresses, back them with physical memory, take it away again.
 *
 * RULES FOR ALL CALLS
 *  - A call returns a kvc_status. No call throws, prints, aborts, reads the environment, starts a thread or calls back.
 *  - On anything but KVC_OK the kvc_error (may be NULL) names the driver call that failed, its code and the size asked for.
 *  - Every call makes the device current for the calling thread and restores what was current: any thread may call.
 *  - An arena's calls are serialised by a lock inside the arena; calls on different arenas run side by side.
 *  - A call takes a batch. A batch is all or nothing: on KVC_OUT_OF_MEMORY and KVC_REFUSED nothing has changed.
 *  - Byte sizes are in bytes, page numbers are zero-based. Pointers given in are not kept after the call returns.
 *  - A device and its arenas belong to the process that opened it: in a forked child every call on them is KVC_REFUSED.
 *  - No call waits for work queued on the device. Unmapping what queued work still reads is the caller's bug.
 *
 * WORDS
 *  page     the unit of mapping: page_bytes, a multiple of the device's granularity.
 *  run      `count` adjacent pages starting at `first`, backed by ONE handle per plane; unmapped only as a whole.
 *  plane    one of the `planes` places at which a page number is mapped: plane k of page p lies at
 *           base + k * plane_stride_bytes + p * page_bytes. A run is mapped at every plane or at none.
 *  class    the handles of one run length: count * page_bytes bytes each.
 *  cached   handles that the arena holds and that are mapped nowhere; map() takes these before it creates new ones.
 */
#ifndef KVCACHED_H
#define KVCACHED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVC_ABI_VERSION 1
#define KVC_API __attribute__((visibility("default")))

typedef enum kvc_status {
  KVC_OK = 0,
  KVC_OUT_OF_MEMORY = 1, /* the device has no memory left; everything was undone; retry later */
  KVC_REFUSED = 2,       /* the caller's mistake (range, state, argument); nothing was changed */
  KVC_QUARANTINED = 3,   /* a failure whose undo failed too: the named runs are fenced off, their handles kept. No run is
                            named when only handles that are mapped nowhere could not be released: they stay accounted for */
  KVC_BROKEN = 4,        /* the driver failed otherwise (context lost, bad value); what had been done was undone */
  KVC_OUT_OF_MAPS = 5,   /* host backend: the kernel's map entries ran out (vm.max_map_count); everything was undone */
  KVC_UNAVAILABLE = 6    /* this backend cannot run here: no driver library, no device; the error says what is missing */
} kvc_status;

typedef enum kvc_backend { KVC_HOST = 0, KVC_CUDA = 1, KVC_HIP = 2 } kvc_backend;

typedef enum kvc_zero_backing {
  KVC_ZERO_NEVER = 0, /* an unmapped page faults */
  KVC_ZERO_USED = 1,  /* a page that was mapped once reads as zero when unmapped (one shared read-only zero handle) */
  KVC_ZERO_ALL = 2    /* the whole range reads as zero from the start */
} kvc_zero_backing;

/* The kinds of driver call that are counted and can be made to fail. */
typedef enum kvc_call {
  KVC_CALL_RESERVE = 0,
  KVC_CALL_CREATE = 1,
  KVC_CALL_MAP = 2,
  KVC_CALL_ACCESS = 3,
  KVC_CALL_UNMAP = 4,
  KVC_CALL_RELEASE = 5,
  KVC_CALL_FREE = 6, /* give the reserved range back */
  KVC_CALL_KINDS = 7
} kvc_call;

typedef struct kvc_device kvc_device;
typedef struct kvc_arena kvc_arena;

typedef struct kvc_error {
  int32_t status;      /* kvc_status, again */
  int32_t driver_code; /* the driver's own code, errno on the host backend, 0 when no driver call failed */
  uint64_t bytes;      /* size that the failing call asked for, 0 when it has none */
  char call[48];       /* name of the failing driver call, or of the argument that was refused */
  char message[208];   /* one sentence for a person, no newline */
} kvc_error;

typedef struct kvc_device_options {
  int32_t backend;             /* kvc_backend */
  int32_t ordinal;             /* CUDA, HIP: device number as the driver counts; host: number of the host card */
  uint64_t host_capacity;      /* host: bytes of the card, shared by all processes that name the same host_dir and ordinal;
                                  0 = as the first process said. REFUSED when it differs */
  uint64_t host_granularity;   /* host: bytes, a power of two >= 4096; 0 = as the first process said, which means 2 MiB */
  const char *host_dir;        /* host: directory for the capacity file; must exist. NULL on CUDA and HIP. No other code
                                  of the process may open and close that file: it would drop the process's locks on it */
  const char *driver_library;  /* path of the driver library to open instead of the system's (tests); NULL = default */
} kvc_device_options;

typedef struct kvc_device_info {
  int32_t backend;
  int32_t ordinal;
  int32_t driver_version;
  int32_t map_granularity_known; /* 1: granularity was asked of the driver */
  uint64_t granularity;          /* bytes; page_bytes must be a multiple */
  uint64_t total_bytes;
  char uuid[64];                 /* "GPU-..." (MIG: its own), "HOST-<ordinal>-<device>-<inode>" of the capacity file */
  char name[128];
} kvc_device_info;

typedef struct kvc_arena_config {
  uint64_t page_bytes;         /* multiple of granularity */
  uint64_t pages;              /* page numbers 0 .. pages-1 */
  uint32_t planes;             /* >= 1 */
  uint32_t zero_backing;       /* kvc_zero_backing */
  uint64_t plane_stride_bytes; /* >= pages * page_bytes, multiple of page_bytes; ignored when planes == 1 */
  uint64_t history;            /* how many finished transactions are remembered for repeated calls; 0 = 256 */
} kvc_arena_config;

typedef struct kvc_run {
  uint64_t first;
  uint64_t count;
} kvc_run;

typedef struct kvc_arena_stats {
  uint64_t mapped_bytes;      /* handles mapped, all planes */
  uint64_t prepared_bytes;    /* unmapped by prepare(), handles kept for abort() */
  uint64_t cached_bytes;      /* handles mapped nowhere, kept for reuse */
  uint64_t zero_bytes;        /* the shared zero handle */
  uint64_t quarantined_bytes; /* handles whose state is not certain */
  uint64_t mapped_pages;      /* page numbers mapped */
  uint64_t reserved_bytes;    /* the address range */
} kvc_arena_stats;

KVC_API int kvc_abi_version(void);
/* Name of a status, for messages; never NULL. */
KVC_API const char *kvc_status_name(int status);

/* Open a device. Post (OK): *out is set, close it with kvc_device_close(). UNAVAILABLE: no driver or device; no side effect. */
KVC_API int kvc_device_open(const kvc_device_options *options, kvc_device **out, kvc_error *error);
/* Pre: every arena of the device is destroyed, else REFUSED. */
KVC_API int kvc_device_close(kvc_device *device, kvc_error *error);
KVC_API int kvc_device_get_info(kvc_device *device, kvc_device_info *out, kvc_error *error);
/* Free and total bytes as the driver (host: the shared capacity record) reports them now, other processes included. */
KVC_API int kvc_device_memory(kvc_device *device, uint64_t *free_bytes, uint64_t *total_bytes, kvc_error *error);

/* Fail the `nth` call (1 = the next) of `kind` with `driver_code` (0 = the backend's out-of-memory code).
 * from_there_on: 0 = only that one, 1 = it and all later ones. nth = 0 clears the kind. */
KVC_API int kvc_device_fail(kvc_device *device, int kind, uint64_t nth, int from_there_on, int driver_code, kvc_error *error);
/* Driver calls that succeeded so far and the time spent in them, one number per kvc_call. `counts` and `nanoseconds` have room
 * for KVC_CALL_KINDS numbers each; either may be NULL. */
KVC_API int kvc_device_calls(kvc_device *device, uint64_t *counts, uint64_t *nanoseconds, kvc_error *error);

/* Reserve the range. Nothing is mapped (KVC_ZERO_ALL: the zero handle is, everywhere). */
KVC_API int kvc_arena_create(kvc_device *device, const kvc_arena_config *config, kvc_arena **out, kvc_error *error);
/* Unmaps and releases all, quarantined handles as far as the driver lets us, and gives the range back. The pointer is dead after,
 * whatever the status, except REFUSED (NULL, forked process). A driver that was shut down before is no failure: it has freed all. */
KVC_API int kvc_arena_destroy(kvc_arena *arena, kvc_error *error);
/* First address of the range. Constant. */
KVC_API uint64_t kvc_arena_base(const kvc_arena *arena);
KVC_API int kvc_arena_get_stats(kvc_arena *arena, kvc_arena_stats *out, kvc_error *error);

/* Create `runs` x planes handles of class `run_pages` into the cache. All or nothing. */
KVC_API int kvc_arena_acquire(kvc_arena *arena, uint64_t run_pages, uint64_t runs, kvc_error *error);
/* Release up to `runs` x planes cached handles of class `run_pages` (0 = every class, largest first). *released_bytes counts them. */
KVC_API int kvc_arena_trim(kvc_arena *arena, uint64_t run_pages, uint64_t runs, uint64_t *released_bytes, kvc_error *error);

/* Map each run at every plane, cached handles first, else new ones.
 * Pre: no page of a run is mapped, prepared or quarantined; runs do not overlap; else REFUSED.
 * Post (OK): all mapped and readable and writable. OUT_OF_MEMORY, OUT_OF_MAPS: all undone.
 * QUARANTINED: the runs written to `bad` (as many as `bad_room`; *bad_count = how many there are) are fenced off;
 * the other runs of the batch are unmapped. `bad` may be NULL when bad_room is 0. */
KVC_API int kvc_arena_map(kvc_arena *arena, const kvc_run *runs, size_t count, kvc_run *bad, size_t bad_room, size_t *bad_count,
                          kvc_error *error);

/* Two-phase unmap. `tx` is the caller's number, never 0 and never used again for something else.
 * prepare: unmaps the runs and keeps the handles. Pre: each run is exactly one mapped run. Failure: undone (mapped again) or QUARANTINED.
 * commit:  moves the handles to the cache (keep != 0) or releases them. On a driver failure the handles not released are quarantined.
 * abort:   maps the runs back. Failure: they stay prepared and the abort may be tried again; QUARANTINED ones leave the transaction.
 * Repeating a call with the same tx returns what the first one returned and does nothing; a failed prepare too is not tried
 * again. Aborting it is OK: there is nothing to map back.
 * abort before prepare is remembered: the late prepare is REFUSED. commit after abort, and abort after commit, are REFUSED.
 * Prepared transactions are always remembered, finished ones as long as kvc_arena_config.history says; to commit an unknown one is
 * REFUSED, to abort one is an abort before prepare. */
KVC_API int kvc_arena_unmap_prepare(kvc_arena *arena, uint64_t tx, const kvc_run *runs, size_t count, kvc_error *error);
KVC_API int kvc_arena_unmap_commit(kvc_arena *arena, uint64_t tx, int keep, kvc_error *error);
KVC_API int kvc_arena_unmap_abort(kvc_arena *arena, uint64_t tx, kvc_error *error);
/* prepare + commit in one call, without a transaction number. */
KVC_API int kvc_arena_unmap(kvc_arena *arena, const kvc_run *runs, size_t count, int keep, kvc_error *error);

/* Quarantined runs, for show. Writes as many as fit in `room`; *count = how many there are. */
KVC_API int kvc_arena_quarantined(kvc_arena *arena, kvc_run *out, size_t room, size_t *count, kvc_error *error);

#ifdef __cplusplus
}
#endif
#endif
