"""Defines `windows`, which regroups a loader's batches for a loop of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import check_windows, stream
from autoaccum._data.by_length import ByLength, CannotBeOrderedError, check_order
from autoaccum._data.loader_checks import check_loader
from autoaccum._data.splits import ByDefault, check_split
from autoaccum._data.token_windows import check_target, stream_of_tokens
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from autoaccum._data.pieces import Split


def windows(
    loader: Iterable[Any],
    target_batch: int | None = None,
    *,
    drop_last: bool = False,
    split: Split | None = None,
    target_tokens: int | None = None,
    tokens: Callable[[Any], Any] | None = None,
    order: str = "loader",
    lengths: str | Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Regroup a loader's batches into windows of `target_batch` samples, each sample once and in order.

    Args:
        loader: Any iterable of batches, of any size and nesting.
        target_batch: Samples per window; None with `target_tokens`.
        drop_last: Whether to leave out a shorter last window.
        split: Counts, cuts and joins the loader's batches, as for `fit`.
        target_tokens: Tokens per window, as for `fit`.
        tokens: As for `fit`.
        order: As for `fit`. With "length", and with `target_tokens`, each window is a `Window` whose samples are in
            order of their length; a `Runner` with a plan that counts tokens cuts it by these.
        lengths: As for `fit`.

    Yields:
        The window's samples as a batch of the loader's nesting, or as a `Window` of pieces if their trailing shapes
        differ (padding to the longest of each batch), a `split` is given, they hold lists of samples, or the
        loader's batches carry a count of their own (`num_items_in_batch`), which is not that of the window.

    Raises:
        InvalidInputError: An argument or a batch is not valid.
    """
    target = check_target(target_batch, target_tokens, tokens, lengths)
    check_windows(target_batch if target is None else target.tokens, drop_last)
    by_length = check_order(order, lengths, in_tokens=target is not None)
    check_split(split)
    check_loader("loader", loader, split)
    split = ByDefault() if split is None else split
    if target is None:
        assert target_batch is not None
        cut = stream(loader, target_batch, drop_last=drop_last, split=split)
    else:
        cut = stream_of_tokens(loader, target, drop_last=drop_last, split=split)
    if by_length:
        return (_in_order(window, lengths) for window in cut)
    return (window if window.carries_counts() else window.joined() for window in cut)


def _in_order(window: Any, lengths: Any) -> ByLength:
    try:
        return ByLength.of(window, lengths)
    except CannotBeOrderedError as error:
        raise InvalidInputError(
            f"samples cannot be taken by length: {error}; pass lengths=, or order='loader' with target_batch="
        ) from None
