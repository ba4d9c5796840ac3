// SPDX-License-Identifier: Apache-2.0
//
// How a call ended, in the shape in which the caller gets it.
#pragma once

#include "backend.h"

namespace kvc {

kvc_error success();
// The caller's mistake: `argument` names what, the sentence says why.
kvc_error refused(const char *argument, const char *format, ...) __attribute__((format(printf, 2, 3)));
// A status of our own with a sentence, no driver call behind it.
kvc_error ended(int status, const char *call, const char *format, ...) __attribute__((format(printf, 3, 4)));
// A driver call that failed.
kvc_error failed(const Backend &backend, const Result &result);
// The same, but it could not be undone.
kvc_error not_undone(const kvc_error &cause);

} // namespace kvc
