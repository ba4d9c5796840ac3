# SPDX-License-Identifier: Apache-2.0
"""`kvtop`: the cards and pools of this machine as a live screen, or once as text. Only `app` and what it imports need textual."""
