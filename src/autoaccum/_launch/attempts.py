"""The log of attempts: one JSON document, whole at every moment, written anew when an attempt begins or ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from autoaccum._report.files import beside, check_place
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from autoaccum._launch.cuts import Cut
    from autoaccum._launch.deaths import Ended, Verdict
    from autoaccum._launch.surroundings import DeviceMemory
    from autoaccum._system.notices import Notices


@dataclass
class AttemptLog:
    """The attempts of one job.

    Args:
        path: Where they are written; None where they are not.
        notices: Where it is said, once, that the file cannot be written any more.
        about: What is known of the whole job.

    Raises:
        InvalidInputError: No file can be written there.
    """

    path: Path | None
    notices: Notices
    about: dict[str, Any]
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None:
            check_place(self.path)

    def begin(self, command: Sequence[str], cut: Cut | None, cap: int | None, devices: Sequence[DeviceMemory]) -> None:
        """Note that an attempt begins."""
        self.attempts.append(
            {
                "attempt": len(self.attempts),
                "command": list(command),
                "cut": None if cut is None else asdict(cut),
                "max_micro_batch": cap,
                "devices": [device.record() for device in devices],
                "started": _now(),
                "ended": None,
                "exit_code": None,
                "signal": None,
                "kind": None,
                "evidence": None,
                "failed_micro_batch": None,
            }
        )
        self._write(None)

    def end(self, ended: Ended, verdict: Verdict) -> None:
        """Note how it ended."""
        self.attempts[-1] |= {
            "ended": _now(),
            "exit_code": ended.exit_code,
            "signal": ended.signal,
            "kind": verdict.kind,
            "evidence": verdict.evidence,
            "failed_micro_batch": verdict.micro_batch,
        }
        self._write(None)

    def close(self, exit_code: int) -> None:
        """Note with which exit code the job ends."""
        self._write(exit_code)

    def _write(self, exit_code: int | None) -> None:
        if self.path is None:
            return
        content = {"autoaccum": version("autoaccum"), **self.about, "attempts": self.attempts, "exit_code": exit_code}
        try:
            with beside(self.path) as unfinished:
                # An argument need not be valid text.
                unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except InvalidInputError as error:
            self.notices.say(f"the log of attempts is not written any more: {error}", key="log of attempts")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
