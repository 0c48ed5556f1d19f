"""Where the lab keeps what it can make again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where converted models and logs are kept: INFERENCE_LAB_CACHE, else inference-lab in the user's cache folder."""
    chosen = os.environ.get("INFERENCE_LAB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "inference-lab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inference-lab"
