"""Counts the windows of a run, and reports plans and out-of-memory errors to callbacks and the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._records import MemoryEvent, Plan, ProbeResult, Trial
    from autoaccum._system.notices import Notices


class Events:
    """Reports what happens in the windows of one run."""

    def __init__(self, callbacks: Sequence[Callback] = (), notices: Notices | None = None, windows: int = 0) -> None:
        self.windows = windows
        self.oom_events = 0
        self._callbacks = tuple(callbacks)
        self._notices = notices

    def trial(self, trial: Trial) -> None:
        """Report a trial to callbacks."""
        for callback in self._callbacks:
            callback.on_trial(trial)

    def planned(self, plan: Plan, probe: ProbeResult | None, *, is_proven: bool = False) -> None:
        """Report a new plan. `is_proven` means that the window just completed has already confirmed it."""
        what = "samples" if plan.micro_batch > 1 else "sample"
        self._say(f"at most {plan.micro_batch} {what} at once from step {self.windows + 1} on")
        since = self.windows if is_proven else self.windows + 1
        for callback in self._callbacks:
            callback.on_plan(plan, step=since, probe=probe)

    def ran_out(self, event: MemoryEvent) -> None:
        """Report that memory ran out in the current window."""
        self.oom_events += 1
        what = "" if event.size is None else f" of {event.size} samples"
        self._say(f"out of memory in step {self.windows + 1}, {event.phase}{what}: {event.message}")
        for callback in self._callbacks:
            callback.on_oom(event, step=self.windows + 1)

    def _say(self, text: str) -> None:
        if self._notices is not None:
            self._notices.say(text, key=f"{text} {self.oom_events}")
