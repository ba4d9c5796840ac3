# SPDX-License-Identifier: Apache-2.0
"""A folder that others write to while it is deleted."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def delete_at_once(folder: Path) -> None:
    """It is gone in one instant: file by file, what somebody makes anew meanwhile would be in the way."""
    trash = Path(tempfile.mkdtemp(dir=folder.parent))
    folder.rename(trash / folder.name)
    shutil.rmtree(trash, ignore_errors=True)  # one may be making a file there just now
