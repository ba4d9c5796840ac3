// SPDX-License-Identifier: Apache-2.0
//
// What an arena's sizes must fulfil, and what follows from them.
#pragma once

#include "outcome.h"

namespace kvc {

kvc_error check_config(const kvc_arena_config &config, uint64_t granularity);

inline uint64_t plane_stride(const kvc_arena_config &config) { return config.planes == 1 ? 0 : config.plane_stride_bytes; }
inline uint64_t range_bytes(const kvc_arena_config &config) {
  return (config.planes - 1) * plane_stride(config) + config.pages * config.page_bytes;
}
inline uint64_t history(const kvc_arena_config &config) { return config.history == 0 ? 256 : config.history; }

} // namespace kvc
