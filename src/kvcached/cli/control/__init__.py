# SPDX-License-Identifier: Apache-2.0
"""`kvcached control`: what `kvctl` does, over HTTP."""
