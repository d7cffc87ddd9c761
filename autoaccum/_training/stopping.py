"""Notes that a callback has asked to stop training early, with `StopTraining` returned or raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._callbacks import Callback, StopTraining

if TYPE_CHECKING:
    from collections.abc import Callable


class StopRequest:
    """What the callbacks of this process have asked for.

    Attributes:
        reason: Why to stop; None if none has asked.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def note(self, asked: object) -> None:
        """Note the answer of a callback if it is a request; the first one counts."""
        if isinstance(asked, type) and issubclass(asked, StopTraining):
            asked = asked()
        if isinstance(asked, StopTraining) and self.reason is None:
            self.reason = asked.reason


class Stoppable(Callback):
    """Passes every event on to a callback, and notes whether it asks to stop.

    A request is no failure: the other callbacks are notified too, and a window in progress is completed.

    Args:
        callback: The callback.
        request: Where its requests are noted.
    """

    def __init__(self, callback: Callback, request: StopRequest) -> None:
        self._callback = callback
        self._request = request


def _passing(event: str) -> Callable[..., None]:
    def passing(self: Stoppable, *arguments: Any, **keywords: Any) -> None:
        try:
            self._request.note(getattr(self._callback, event)(*arguments, **keywords))
        except StopTraining as asked:
            self._request.note(asked)

    return passing


for _event in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Stoppable, _event, _passing(_event))
