"""Runs a command up to its first optimizer steps; returns what `observer` wrote in each of its ranks. Linux only."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.diagnosis import diagnose
from autoaccum._launch.run import fill_in, variables_of
from autoaccum._launch.supervisor import Ended
from autoaccum._memory import _linux
from autoaccum._system import launched, process_tree, reason_file
from autoaccum._system.output import write_line
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._launch.run import Sizes

_ON_PATH = Path(__file__).parent / "on_path"
_SHOWN_LINES, _TAIL_BYTES = 30, 1 << 16
_DEBUGGERS = ("bdb.BdbQuit", "(Pdb)", "(Pdb++)", "ipdb>")


def observe(command: Sequence[str], sizes: Sizes, timeout_s: float, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a command and return what its ranks saw, in their order; its output is shown only if it fails.

    `settings` are those of `observer.observe_process`, without the folder.

    Raises:
        InvalidInputError: It failed, or made too few optimizer steps in `timeout_s`.
        DoesNotFitError: Memory ran out.
    """
    where = f"({sizes.micro_batch} x {sizes.accum_steps})"
    with tempfile.TemporaryDirectory(prefix="autoaccum-", ignore_cleanup_errors=True) as name:
        folder, kills = Path(name), _linux.read_kills()
        environment = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, **variables_of(sizes)}
        environment |= {
            launched.MAX_MICRO_BATCH: str(sizes.micro_batch),
            launched.REASON_FILE: str(folder / "reason"),
            "AUTOACCUM_CACHE_DIR": "",  # what fits in one step is no plan
            "PYTHONPATH": os.pathsep.join([str(_ON_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "_AUTOACCUM_VERIFY": json.dumps({**settings, "folder": name}),
        }
        arguments = fill_in(command, asdict(sizes))
        code = process_tree.run_and_end_all(arguments, environment, folder, timeout_s, lambda: _is_complete(folder))
        if _is_complete(folder):
            return sorted(_written(folder, "rank-*.json"), key=lambda rank: int(rank["rank"]))
        outputs = [(folder / name).read_bytes()[-_TAIL_BYTES:] for name in ("out", "err")]
        tail, risen = b"".join(outputs).decode(errors="replace"), _linux.risen(kills, _linux.read_kills())
        if code is not None and diagnose(Ended(code, tail), reason_file.read(folder / "reason"), risen).is_oom:
            raise DoesNotFitError(f"memory ran out {where}, and there is no smaller split to compare with")
        for line in tail.splitlines()[-_SHOWN_LINES:]:
            write_line(line)
        reason = _reason(code, tail, _written(folder, "idle-*.json"), timeout_s)
        raise InvalidInputError(f"the command, run as {where[1:-1]}, {reason}")


def _written(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def _is_complete(folder: Path) -> bool:
    ranks = list(folder.glob("rank-*.json"))
    return bool(ranks) and len(ranks) >= json.loads(ranks[0].read_text(encoding="utf-8"))["world"]


def _reason(code: int | None, tail: str, idle: list[dict[str, Any]], timeout_s: float) -> str:
    """Say why no optimizer step was seen."""
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "it printed nothing")
    backwards = max((one["backwards"] for one in idle), default=0)
    if any(debugger in tail for debugger in _DEBUGGERS):
        return "dropped into a debugger; take breakpoint() and set_trace() out"
    if code is None:
        return f"made no optimizer step within --timeout {timeout_s:g} s; pass a longer one"
    if code:
        return f"ended with exit code {code} before its first optimizer step: {last}"
    if not idle:
        return (
            "ran no Python that imported torch and can be watched; python -I and -E, containers, and what replaces "
            "PYTHONPATH instead of adding to it cannot be"
        )
    if not backwards:
        return "ended without an optimizer step"
    return (
        f"made {backwards} backward passes and no step of a torch.optim.Optimizer; optimizers that torch does not "
        "know, such as DeepSpeed's and Megatron's own, cannot be seen"
    )
