"""Describes where training would run: the installation, the machine, its limits and its devices.

`examination.examine()` returns what was found and what of it does not fit together; `text.py` shows it. Nothing is
changed, and no device is initialised. May import `_report` and all packages below it, but neither `_launch`, its
sibling, nor `_training`.
"""

from autoaccum._doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
