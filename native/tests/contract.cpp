// SPDX-License-Identifier: Apache-2.0
//
// The contract of kvcached.h as a program: every rule tried on one backend. Exit 0: all hold, 1: some do not, 2: no device.
//
//   contract host DIRECTORY [GRANULARITY]
//   contract cuda|hip [STUB_LIBRARY [GRANULARITY]]     without a library: the machine's own driver
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "harness.h"

using namespace contract;

namespace {

bool read_setting(int count, char **words) {
  const char *names[] = {"host", "cuda", "hip"};
  setting.backend = -1;
  for (int i = 0; i < 3; ++i)
    if (count > 1 && strcmp(words[1], names[i]) == 0) setting.backend = i;
  if (setting.backend < 0 || (setting.backend == KVC_HOST && count < 3)) return false;
  if (count > 2) (setting.backend == KVC_HOST ? setting.directory : setting.library) = words[2];
  if (count > 3) setting.granularity = strtoull(words[3], nullptr, 10);
  const uint64_t granule = setting.granularity == 0 ? uint64_t{2} << 20 : setting.granularity;
  setting.capacity = 256 * granule;
  return true;
}

void size_stub() {
  if (!setting.stub()) return;
  void *library = dlopen(setting.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fprintf(stderr, "%s\n", dlerror()), exit(2);
  const auto size = reinterpret_cast<void (*)(uint64_t, uint64_t)>(dlsym(library, "stub_size"));
  size(setting.capacity, setting.granularity == 0 ? uint64_t{2} << 20 : setting.granularity);
}

void chapter(const char *name, void (*check)()) {
  const int before = failures;
  check();
  printf("%-28s %s\n", name, failures == before ? "ok" : "FAILED");
  fflush(stdout);
}

} // namespace

int main(int count, char **words) {
  if (!read_setting(count, words)) return fprintf(stderr, "usage: %s host DIRECTORY [GRANULARITY] | cuda|hip [LIBRARY [GRANULARITY]]\n", words[0]), 2;
  size_stub();
  {
    Device device;
    printf("%s, %s, granularity %llu, %llu bytes\n", device.info().name, device.info().uuid,
           static_cast<unsigned long long>(device.granularity()), static_cast<unsigned long long>(device.info().total_bytes));
  }
  chapter("memory", check_memory);
  chapter("refusals", check_refusals);
  chapter("transactions", check_transactions);
  chapter("zero backing", check_zero_backing);
  chapter("threads", check_threads);
  chapter("faults", check_faults);
  chapter("failures of undo", check_undo_failures);
  chapter("out of memory", check_out_of_memory);
  if (setting.backend == KVC_HOST) chapter("own memory runs out", check_own_memory_failures); // a driver's allocations are its own
  if (setting.backend == KVC_HOST) chapter("host", check_host);
  if (setting.stub()) chapter("driver", check_stub);
  printf("%s\n", failures == 0 ? "all hold" : "SOME DO NOT HOLD");
  return failures == 0 ? 0 : 1;
}
