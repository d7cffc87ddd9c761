"""Counts the windows of a run, and reports plans and out-of-memory errors to callbacks and the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._arguments import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import MemoryEvent, Plan, ProbeResult, Trial
    from autoaccum._system.notices import Notices


def oom_text(event: MemoryEvent, step: int) -> str:
    """Return how memory ran out in an optimizer step, in words."""
    size = "" if event.size is None else f" of {counted(event.size, 'sample')}"
    return f"out of memory in step {step}, {event.phase}{size}: {event.message}"


class Events:
    """Reports what happens in the windows of one run. The memory limit is lifted while callbacks run."""

    def __init__(
        self,
        memory: MemoryBackend,
        callbacks: Sequence[Callback] = (),
        notices: Notices | None = None,
        windows: int = 0,
    ) -> None:
        self.windows = windows
        self.oom_events = 0
        self._memory = memory
        self._callbacks = tuple(callbacks)
        self._notices = notices

    def trial(self, trial: Trial) -> None:
        """Report a micro-batch that was run as a trial."""
        self._call("on_trial", trial)

    def planned(self, plan: Plan, probe: ProbeResult | None, *, is_proven: bool = False) -> None:
        """Report a new plan.

        Args:
            plan: The plan.
            probe: The probe's result, if it led to the plan.
            is_proven: Whether the most recent window was already cut by it.
        """
        what = "samples" if plan.micro_batch > 1 else "sample"
        self._say(f"at most {plan.micro_batch} {what} at once from step {self.windows + 1} on")
        self._call("on_plan", plan, step=self.windows if is_proven else self.windows + 1, probe=probe)

    def ran_out(self, event: MemoryEvent) -> None:
        """Report that memory ran out in the current window."""
        self.oom_events += 1
        self._say(oom_text(event, self.windows + 1))
        self._call("on_oom", event, step=self.windows + 1)

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> None:
        for callback in self._callbacks:
            with self._memory.lifted():
                getattr(callback, name)(*arguments, **keywords)

    def _say(self, text: str) -> None:
        if self._notices is not None:
            self._notices.say(text, key=f"{text} {self.oom_events}")
