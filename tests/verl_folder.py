"""Puts the folder that GRPO_KERNELS_VERL names (tests/verl.txt) at the end of the path. A verl that is there has to work."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

FOLDER = os.environ.get("GRPO_KERNELS_VERL")
if FOLDER and Path(FOLDER, "verl").is_dir():
    sys.path.append(str(Path(FOLDER).resolve()))
    importlib.import_module("verl")
