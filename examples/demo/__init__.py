# SPDX-License-Identifier: Apache-2.0
"""Two real engines on one small card: answers, a live table and a picture of their memory. Run: `make demo`."""
