// SPDX-License-Identifier: Apache-2.0
#include "arena_config.h"

#include <cinttypes>

namespace kvc {
namespace {

constexpr uint64_t kMaxRangeBytes = uint64_t{1} << 47; // user addresses of a 64-bit process
constexpr uint64_t kMaxPages = UINT32_MAX;
constexpr uint64_t kMaxHistory = uint64_t{1} << 20;

kvc_error check_page(const kvc_arena_config &config, uint64_t granularity) {
  const uint64_t up = (config.page_bytes / granularity + 1) * granularity;
  if (config.page_bytes == 0 || config.page_bytes > kMaxRangeBytes || config.page_bytes % granularity != 0)
    return refused("page_bytes", "%" PRIu64 " is not a multiple of the device's granularity %" PRIu64 "; %" PRIu64 " is", config.page_bytes,
                   granularity, config.page_bytes > kMaxRangeBytes ? granularity : up);
  if (config.pages == 0 || config.pages > kMaxPages || config.pages > kMaxRangeBytes / config.page_bytes)
    return refused("pages", "%" PRIu64 " pages of %" PRIu64 " bytes: not 1 .. %" PRIu64, config.pages, config.page_bytes,
                   kMaxRangeBytes / config.page_bytes);
  return success();
}

kvc_error check_planes(const kvc_arena_config &config) {
  if (config.planes == 0) return refused("planes", "0 planes");
  if (config.planes == 1) return success();
  const uint64_t least = config.pages * config.page_bytes;
  if (config.plane_stride_bytes < least || config.plane_stride_bytes % config.page_bytes != 0)
    return refused("plane_stride_bytes", "%" PRIu64 " is not a multiple of the page from %" PRIu64 " on", config.plane_stride_bytes, least);
  if (config.plane_stride_bytes > kMaxRangeBytes / config.planes)
    return refused("plane_stride_bytes", "%" PRIu64 " bytes in %" PRIu32 " planes are more than can be addressed", config.plane_stride_bytes,
                   config.planes);
  return success();
}

} // namespace

kvc_error check_config(const kvc_arena_config &config, uint64_t granularity) {
  if (config.zero_backing > KVC_ZERO_ALL) return refused("zero_backing", "%" PRIu32 " is not 0, 1 or 2", config.zero_backing);
  if (config.history > kMaxHistory) return refused("history", "%" PRIu64 " is above %" PRIu64, config.history, kMaxHistory);
  const kvc_error page = check_page(config, granularity);
  return page.status == KVC_OK ? check_planes(config) : page;
}

} // namespace kvc
