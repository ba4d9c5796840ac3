# SPDX-License-Identifier: Apache-2.0
"""Many models behind one OpenAI-compatible address: `kvcached serve models.yaml`. Needs the extra `controller`."""
