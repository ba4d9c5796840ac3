// SPDX-License-Identifier: Apache-2.0
//
// NVIDIA's driver, opened at run time. Works in the device's primary context, the one that frameworks use.
#include <cstdio>
#include <cstring>

#include "driver_backend.h"

namespace kvc {
namespace {

using driver::Library;

constexpr int kVmmSupported = 102, kRdmaWithVmmSupported = 110; // device attributes
constexpr const char *kCallNames[KVC_CALL_KINDS] = {"cuMemAddressReserve", "cuMemCreate",  "cuMemMap",        "cuMemSetAccess",
                                                    "cuMemUnmap",          "cuMemRelease", "cuMemAddressFree"};
constexpr const char *kLibraryNames[] = {"libcuda.so.1", "libcuda.so", nullptr};

class CudaBackend final : public DriverBackend {
 public:
  explicit CudaBackend(int ordinal) : DriverBackend(kCallNames, KVC_CUDA, ordinal) {}
  ~CudaBackend() override {
    if (context_ != nullptr) release_context_(device_);
  }

  bool open(const Library &library, kvc_error &error) {
    if (!find(library, error) || !choose_device(error) || !retain_context(error)) return false;
    Current current(*this);
    if (!current.result().ok()) return error = failed(*this, current.result()), error.status = KVC_UNAVAILABLE, false;
    // A driver may offer the flag for RDMA and then fail at using it: only a trial tells.
    properties_.flags.rdma_capable = attribute(kRdmaWithVmmSupported) != 0;
    if (properties_.flags.rdma_capable && try_out(error)) return true;
    properties_.flags.rdma_capable = 0;
    if (!try_out(error)) return false;
    return error = success(), true;
  }

  Result enter(int64_t *) override {
    const int code = push_(context_);
    Result result = of(KVC_CALL_RESERVE, code, 0);
    result.call = "cuCtxPushCurrent";
    return result;
  }
  void leave(int64_t) override {
    void *ours = nullptr;
    pop_(&ours);
  }

  const char *describe(int code) const override {
    const char *words = nullptr;
    return error_string_ != nullptr && error_string_(code, &words) == 0 && words != nullptr ? words : "unknown driver error";
  }

 private:
  bool find(const Library &library, kvc_error &error) {
    return library.find("cuInit", &init_, error) && library.find("cuGetErrorString", &error_string_, error) &&
           library.find("cuDriverGetVersion", &version_, error) && library.find("cuDeviceGet", &get_device_, error) &&
           library.find("cuDeviceGetCount", &device_count_, error) && library.find("cuDeviceGetName", &name_, error) &&
           library.find("cuDeviceTotalMem_v2", &total_, error) && library.find("cuDeviceGetAttribute", &attribute_, error) &&
           library.find("cuDeviceGetUuid", &uuid_, error) && library.find("cuDevicePrimaryCtxRetain", &retain_, error) &&
           library.find("cuDevicePrimaryCtxRelease_v2", &release_context_, error) && library.find("cuCtxPushCurrent_v2", &push_, error) &&
           library.find("cuCtxPopCurrent_v2", &pop_, error) && find_calls(library, "cuMemGetAllocationGranularity", "cuMemGetInfo_v2", error) &&
           find_optional(library);
  }
  bool find_optional(const Library &library) {
    kvc_error ignored;
    library.find("cuDeviceGetUuid_v2", &uuid_v2_, ignored); // since 11.4; knows MIG
    return true;
  }

  bool unusable(const char *call, int code, kvc_error &error) const {
    if (code == 0) return false;
    error = ended(KVC_UNAVAILABLE, call, "the driver cannot be used: %s", describe(code));
    error.driver_code = code;
    return true;
  }

  bool choose_device(kvc_error &error) {
    int count = 0;
    if (unusable("cuInit", init_(0), error) || unusable("cuDeviceGetCount", device_count_(&count), error)) return false;
    if (info_.ordinal < 0 || info_.ordinal >= count)
      return error = ended(KVC_UNAVAILABLE, "ordinal", "device %d asked for, the driver sees %d", info_.ordinal, count), false;
    if (unusable("cuDeviceGet", get_device_(&device_, info_.ordinal), error)) return false;
    if (attribute(kVmmSupported) == 0)
      return error = ended(KVC_UNAVAILABLE, "cuDeviceGetAttribute", "device %d has no virtual memory management", info_.ordinal), false;
    properties_.location.id = device_;
    return describe_device(error);
  }

  bool describe_device(kvc_error &error) {
    unsigned char whole[16] = {}, own[16] = {};
    size_t total = 0;
    if (unusable("cuDeviceGetUuid", uuid_(whole, device_), error) || unusable("cuDeviceTotalMem", total_(&total, device_), error)) return false;
    memcpy(own, whole, sizeof own);
    if (uuid_v2_ != nullptr && unusable("cuDeviceGetUuid_v2", uuid_v2_(own, device_), error)) return false;
    set_uuid(memcmp(own, whole, sizeof own) == 0 ? "GPU" : "MIG", own); // a slice has another id than its card
    info_.total_bytes = total;
    version_(&info_.driver_version);
    name_(info_.name, sizeof info_.name, device_);
    return true;
  }

  bool retain_context(kvc_error &error) { return !unusable("cuDevicePrimaryCtxRetain", retain_(&context_, device_), error); }

  int attribute(int which) const {
    int value = 0;
    return attribute_(&value, which, device_) == 0 ? value : 0;
  }

  int device_ = 0;
  void *context_ = nullptr;
  int (*init_)(unsigned) = nullptr;
  int (*error_string_)(int, const char **) = nullptr;
  int (*version_)(int *) = nullptr;
  int (*get_device_)(int *, int) = nullptr;
  int (*device_count_)(int *) = nullptr;
  int (*name_)(char *, int, int) = nullptr;
  int (*total_)(size_t *, int) = nullptr;
  int (*attribute_)(int *, int, int) = nullptr;
  int (*uuid_)(unsigned char *, int) = nullptr;
  int (*uuid_v2_)(unsigned char *, int) = nullptr;
  int (*retain_)(void **, int) = nullptr;
  int (*release_context_)(int) = nullptr;
  int (*push_)(void *) = nullptr;
  int (*pop_)(void **) = nullptr;
};

} // namespace

int open_cuda(const kvc_device_options &options, std::unique_ptr<Backend> &out, kvc_error &error) {
  const Library library = Library::open(options.driver_library, kLibraryNames, error);
  if (!library.is_open()) return error.status;
  auto backend = std::make_unique<CudaBackend>(options.ordinal);
  if (!backend->open(library, error)) return error.status;
  out = std::move(backend);
  return KVC_OK;
}

} // namespace kvc
