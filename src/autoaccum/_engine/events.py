"""Counts the windows of a run, and tells callbacks and the user what becomes of plans and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._records import MemoryEvent, Plan, ProbeResult, Trial
    from autoaccum._system.notices import Notices


class Events:
    """What happens in the windows of one run. It holds nothing of the run, which holds it.

    Args:
        callbacks: Called with trials, plans and lack of memory.
        notices: Where these are said to the user; None where a callback does that.
        windows: Windows done before, where training resumes.

    Attributes:
        windows: Windows that have become an update so far.
        oom_events: How often memory has run out.
    """

    def __init__(self, callbacks: Sequence[Callback] = (), notices: Notices | None = None, windows: int = 0) -> None:
        self.windows = windows
        self.oom_events = 0
        self._callbacks = tuple(callbacks)
        self._notices = notices

    def trial(self, trial: Trial) -> None:
        """Tell of a micro-batch that was run to learn from it."""
        for callback in self._callbacks:
            callback.on_trial(trial)

    def planned(self, plan: Plan, probe: ProbeResult | None, *, is_proven: bool = False) -> None:
        """Tell of another plan; what was learned may have its proof in the window that is just done."""
        self._say(f"at most {plan.micro_batch} samples at once after step {self.windows}")
        since = self.windows if is_proven else self.windows + 1
        for callback in self._callbacks:
            callback.on_plan(plan, step=since, probe=probe)

    def ran_out(self, event: MemoryEvent) -> None:
        """Tell that memory ran out in the present window."""
        self.oom_events += 1
        what = "" if event.size is None else f" of {event.size} samples"
        self._say(f"out of memory in step {self.windows + 1}, {event.phase}{what}: {event.message}")
        for callback in self._callbacks:
            callback.on_oom(event, step=self.windows + 1)

    def _say(self, text: str) -> None:
        if self._notices is not None:
            self._notices.say(text, key=f"{text} {self.oom_events}")
