"""Defines `windows`, which regroups a loader's batches for a loop of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_bool
from autoaccum._data.batches import stream
from autoaccum._data.loader_checks import check_loader
from autoaccum._data.splits import ByDefault, check_split
from autoaccum._data.token_windows import check_target, stream_of_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autoaccum._data.pieces import Split


def windows(
    loader: Iterable[Any],
    target_batch: int | None = None,
    *,
    drop_last: bool = False,
    split: Split | None = None,
    target_tokens: int | None = None,
) -> Iterator[Any]:
    """Regroup a loader's batches into windows of `target_batch` samples, each sample once and in order.

    Args:
        loader: Any iterable of batches, of any size and nesting.
        target_batch: Samples per window; None with `target_tokens`.
        drop_last: Whether to leave out a shorter last window.
        split: Counts, cuts and joins the loader's batches, as for `fit`.
        target_tokens: Tokens per window, as for `fit`.

    Yields:
        The window's samples as a batch of the loader's nesting, or as a `Window` of pieces if their trailing shapes
        differ (padding to the longest of each batch), a `split` is given, they hold lists of samples, or the
        loader's batches carry a count of their own (`num_items_in_batch`), which is not that of the window.

    Raises:
        InvalidInputError: An argument or a batch is not valid.
    """
    check_target(target_batch, target_tokens)
    check_bool("drop_last", drop_last)
    check_split(split)
    check_loader("loader", loader, split)
    split = ByDefault() if split is None else split
    if target_tokens is None:
        assert target_batch is not None
        cut = stream(loader, target_batch, drop_last=drop_last, split=split)
    else:
        cut = stream_of_tokens(loader, target_tokens, drop_last=drop_last, split=split)
    return (window if window.carries_counts() else window.joined() for window in cut)
