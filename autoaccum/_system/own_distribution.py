"""What this package's own metadata says, which is missing where only its source is on the path."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

try:
    _OWN = distribution("autoaccum")
except PackageNotFoundError:
    __version__ = "unknown"
    REQUIREMENTS: list[str] = []
else:
    __version__ = _OWN.version
    REQUIREMENTS = _OWN.requires or []
