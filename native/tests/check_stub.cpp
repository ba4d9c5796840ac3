// SPDX-License-Identifier: Apache-2.0
//
// What only a driver made for tests can show: missing devices, broken features, a driver that goes before us.
#include <dlfcn.h>

#include <cstring>
#include <thread>

#include "harness.h"

namespace contract {
namespace {

// As stub_driver.h has them.
enum Option { vmm_supported = 0, rdma_supported = 1, rdma_breaks_access = 2, create_breaks = 3, shut_down = 4, devices = 5, slice = 6 };
enum Question { live_handles_now = 0, live_mappings = 2, live_ranges = 3, thread_depth = 4, retained = 5, rdma_handles = 6 };

void (*set_option)(int, int64_t) = nullptr;
int64_t (*ask)(int) = nullptr;

void check_unavailable(int option, int64_t value, int64_t usual, const char *word) {
  set_option(option, value);
  kvc_device *device = nullptr;
  kvc_error error{};
  const kvc_device_options wanted = options();
  CHECK_EQ(kvc_device_open(&wanted, &device, &error), KVC_UNAVAILABLE);
  CHECK(device == nullptr && strstr(error.message, word) != nullptr);
  set_option(option, usual);
  CHECK_EQ(ask(live_handles_now) + ask(live_mappings) + ask(retained) + ask(thread_depth), 0);
  CHECK_EQ(ask(live_ranges), 1);
}

void check_missing() {
  kvc_device *device = nullptr;
  kvc_error error{};
  kvc_device_options wanted = options();
  wanted.driver_library = "/no/such/library.so";
  CHECK_EQ(kvc_device_open(&wanted, &device, &error), KVC_UNAVAILABLE);
  CHECK(strstr(error.message, "library.so") != nullptr);
  wanted.driver_library = "libc.so.6"; // a library, but no driver
  CHECK_EQ(kvc_device_open(&wanted, &device, &error), KVC_UNAVAILABLE);
  CHECK(strstr(error.message, setting.backend == KVC_CUDA ? "cu" : "hip") != nullptr);
  wanted = options();
  wanted.ordinal = 5;
  CHECK_EQ(kvc_device_open(&wanted, &device, &error), KVC_UNAVAILABLE);
  CHECK(strstr(error.message, "5") != nullptr && strstr(error.message, "2") != nullptr);
  check_unavailable(devices, 0, 2, "no device");
  check_unavailable(vmm_supported, 0, 1, setting.backend == KVC_CUDA ? "no virtual memory management" : "granularity");
  check_unavailable(create_breaks, 1, 0, "trial mapping failed");
}

// The flag for RDMA is used exactly where the driver offers it and a mapping with it works.
void check_rdma() {
  for (const bool offered : {false, true})
    for (const bool breaks : {false, true}) {
      set_option(rdma_supported, offered);
      set_option(rdma_breaks_access, breaks);
      {
        Device device;
        Arena arena(device, {4, 1, KVC_ZERO_NEVER, 0, 0, 1});
        CHECK_EQ(arena.map({{0, 1}}), KVC_OK);
        CHECK_EQ(ask(rdma_handles), offered && !breaks ? 1 : 0);
      }
    }
  set_option(rdma_supported, 0);
  set_option(rdma_breaks_access, 0);
  set_option(slice, 1);
  { Device device; CHECK_EQ(strncmp(device.info().uuid, "MIG-40414243-", 13), 0); }
  set_option(slice, 0);
  { Device device; CHECK_EQ(strncmp(device.info().uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", 64), 0); }
}

// A process that ends may lose its driver before it closes its arenas: that is no failure.
void check_shut_down() {
  Device device;
  Arena arena(device, {8, 1, KVC_ZERO_NEVER, 0, 0, 1});
  CHECK_EQ(arena.map({{0, 2}, {3, 1}}), KVC_OK);
  const int64_t before = ask(live_handles_now);
  set_option(shut_down, 1);
  CHECK_EQ(arena.map({{4, 1}}), KVC_BROKEN);
  CHECK_EQ(arena.destroy(), KVC_OK);
  set_option(shut_down, 0);
  CHECK_EQ(ask(live_handles_now), before); // the stub has not really freed it
}

} // namespace

void check_stub() {
  void *library = dlopen(setting.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  set_option = reinterpret_cast<void (*)(int, int64_t)>(dlsym(library, "stub_set"));
  ask = reinterpret_cast<int64_t (*)(int)>(dlsym(library, "stub_get"));
  // All chapters before left nothing behind, neither memory nor a current device on this thread.
  CHECK_EQ(ask(live_handles_now), 0);
  CHECK_EQ(ask(live_ranges), 1); // the one whose return was made to fail
  CHECK_EQ(ask(thread_depth), 0);
  CHECK_EQ(ask(retained), 0);
  check_missing();
  if (setting.backend == KVC_CUDA) check_rdma();
  {
    Device device;
    Arena arena(device, {4, 1, KVC_ZERO_NEVER, 0, 0, 1});
    std::thread([&] {
      CHECK_EQ(arena.map({{0, 2}}), KVC_OK);
      CHECK_EQ(ask(thread_depth), 0); // restored
    }).join();
  }
  check_shut_down();
}

} // namespace contract
