"""Imported before anything large: bytecode is kept, whatever installed the packages and whatever the environment says.

These tests start dozens of processes that import torch. Without bytecode, which uv leaves out and which
PYTHONDONTWRITEBYTECODE would keep from ever being written, each compiles some thousand files first, which is half
of its time.
"""

import os
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parents[3] / "build" / "bytecode")

sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", _FOLDER)
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
