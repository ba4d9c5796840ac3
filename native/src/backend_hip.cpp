// SPDX-License-Identifier: Apache-2.0
//
// AMD's runtime, opened at run time. It has no contexts to push: a thread has a current device.
#include <cstdio>

#include "driver_backend.h"

namespace kvc {
namespace {

using driver::Library;

constexpr const char *kCallNames[KVC_CALL_KINDS] = {"hipMemAddressReserve", "hipMemCreate",  "hipMemMap",        "hipMemSetAccess",
                                                    "hipMemUnmap",          "hipMemRelease", "hipMemAddressFree"};
constexpr const char *kLibraryNames[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", nullptr};

class HipBackend final : public DriverBackend {
 public:
  explicit HipBackend(int ordinal) : DriverBackend(kCallNames, KVC_HIP, ordinal) {}

  bool open(const Library &library, kvc_error &error) {
    if (!find(library, error) || !choose_device(error)) return false;
    Current current(*this);
    if (!current.result().ok()) return error = failed(*this, current.result()), error.status = KVC_UNAVAILABLE, false;
    return try_out(error);
  }

  Result enter(int64_t *previous) override {
    int device = 0;
    int code = current_device_(&device);
    *previous = device;
    if (code == 0 && device != info_.ordinal) code = set_device_(info_.ordinal);
    Result result = of(KVC_CALL_RESERVE, code, 0);
    result.call = "hipSetDevice";
    return result;
  }
  void leave(int64_t previous) override {
    if (previous != info_.ordinal) set_device_(static_cast<int>(previous));
  }

  // One call per mapping: releases differ in whether a span of several is allowed.
  bool spans_mappings() const override { return false; }

  const char *describe(int code) const override {
    const char *words = error_string_ == nullptr ? nullptr : error_string_(code);
    return words == nullptr ? "unknown driver error" : words;
  }

 private:
  bool find(const Library &library, kvc_error &error) {
    return library.find("hipInit", &init_, error) && library.find("hipGetErrorString", &error_string_, error) &&
           library.find("hipDriverGetVersion", &version_, error) && library.find("hipGetDeviceCount", &device_count_, error) &&
           library.find("hipDeviceGet", &get_device_, error) && library.find("hipDeviceGetName", &name_, error) &&
           library.find("hipDeviceTotalMem", &total_, error) && library.find("hipDeviceGetUuid", &uuid_, error) &&
           library.find("hipGetDevice", &current_device_, error) && library.find("hipSetDevice", &set_device_, error) &&
           find_calls(library, "hipMemGetAllocationGranularity", "hipMemGetInfo", error);
  }

  bool unusable(const char *call, int code, kvc_error &error) const {
    if (code == 0) return false;
    error = ended(KVC_UNAVAILABLE, call, "the driver cannot be used: %s", describe(code));
    error.driver_code = code;
    return true;
  }

  bool choose_device(kvc_error &error) {
    int count = 0, device = 0;
    unsigned char uuid[16] = {};
    size_t total = 0;
    if (unusable("hipInit", init_(0), error) || unusable("hipGetDeviceCount", device_count_(&count), error)) return false;
    if (info_.ordinal < 0 || info_.ordinal >= count)
      return error = ended(KVC_UNAVAILABLE, "ordinal", "device %d asked for, the driver sees %d", info_.ordinal, count), false;
    if (unusable("hipDeviceGet", get_device_(&device, info_.ordinal), error) || unusable("hipDeviceGetUuid", uuid_(uuid, device), error) ||
        unusable("hipDeviceTotalMem", total_(&total, device), error))
      return false;
    set_uuid("GPU", uuid);
    info_.total_bytes = total;
    version_(&info_.driver_version);
    name_(info_.name, sizeof info_.name, device);
    return true;
  }

  int (*init_)(unsigned) = nullptr;
  const char *(*error_string_)(int) = nullptr;
  int (*version_)(int *) = nullptr;
  int (*device_count_)(int *) = nullptr;
  int (*get_device_)(int *, int) = nullptr;
  int (*name_)(char *, int, int) = nullptr;
  int (*total_)(size_t *, int) = nullptr;
  int (*uuid_)(unsigned char *, int) = nullptr;
  int (*current_device_)(int *) = nullptr;
  int (*set_device_)(int) = nullptr;
};

} // namespace

int open_hip(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error) {
  const Library library = Library::open(options.driver_library, kLibraryNames, error);
  if (!library.is_open()) return error.status;
  auto backend = std::make_unique<HipBackend>(options.ordinal);
  if (!backend->open(library, error)) return error.status;
  out = std::move(backend);
  return KVC_OK;
}

} // namespace kvc
