"""Runs a command up to its first optimizer steps; returns what `observer` wrote in each of its ranks. Linux only.

The command has no stdin. Its output is shown where it fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.diagnosis import diagnose
from autoaccum._launch.run import Sizes, fill_in, variables_of
from autoaccum._launch.supervisor import Ended
from autoaccum._memory import _linux
from autoaccum._system import launched, process_tree, reason_file
from autoaccum._system.output import write_line
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ON_PATH = Path(__file__).parent / "on_path"
_POLL_S = 0.05
# From the moment when all ranks have written until a launcher that still runs is killed.
_GRACE_S = 5.0
_SHOWN_LINES, _TAIL_BYTES = 30, 1 << 16
_DEBUGGERS = ("bdb.BdbQuit", "(Pdb)", "(Pdb++)", "ipdb>")


def observe(command: Sequence[str], sizes: Sizes, timeout_s: float, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a command and return what its ranks saw, in their order.

    Args:
        command: The command, with placeholders.
        sizes: What to fill in.
        timeout_s: Seconds within which it must make its optimizer steps.
        settings: Those of `observer.observe_process`, without the folder.

    Raises:
        InvalidInputError: It failed, or made too few optimizer steps.
        DoesNotFitError: Memory ran out.
    """
    where = f"({sizes.micro_batch} x {sizes.accum_steps})"
    with tempfile.TemporaryDirectory(prefix="autoaccum-") as name, process_tree.ended_with_block():
        folder, kills = Path(name), _linux.read_kills()
        environment = {
            "PYTHONHASHSEED": "0",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **os.environ,
            **variables_of(sizes),
            launched.MAX_MICRO_BATCH: str(sizes.micro_batch),
            launched.REASON_FILE: str(folder / "reason"),
            "AUTOACCUM_CACHE_DIR": "",  # what fits in one step is no plan
            "PYTHONPATH": os.pathsep.join([str(_ON_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "_AUTOACCUM_VERIFY": json.dumps({**settings, "folder": name}),
        }
        code = _run(fill_in(command, asdict(sizes)), environment, folder, timeout_s)
        ranks = _written(folder, "rank-*.json")
        if ranks and len(ranks) >= ranks[0]["world"]:
            made = max(len(one["steps"]) for one in ranks[0]["optimizers"])
            if made >= settings["steps"]:
                return sorted(ranks, key=lambda rank: int(rank["rank"]))
            raise InvalidInputError(f"the command made {made} of the {settings['steps']} steps of --steps {where}")
        outputs = [(folder / name).read_bytes()[-_TAIL_BYTES:] for name in ("out", "err")]
        tail = b"".join(outputs).decode(errors="replace")
        risen = _linux.risen(kills, _linux.read_kills())
        if code is not None and diagnose(Ended(code, tail), reason_file.read(folder / "reason"), risen).is_oom:
            raise DoesNotFitError(f"memory ran out {where}; pass --micro-batch N to begin with a smaller one")
        for line in tail.splitlines()[-_SHOWN_LINES:]:
            write_line(line)
        raise InvalidInputError(_reason(code, tail, _written(folder, "idle-*.json"), timeout_s).format(where=where))


def _reason(code: int | None, tail: str, idle: list[dict[str, Any]], timeout_s: float) -> str:
    """Say why no optimizer step was seen."""
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "it printed nothing")
    last = last.replace("{", "{{").replace("}", "}}")
    backwards = max((one["backwards"] for one in idle), default=0)
    if any(debugger in tail for debugger in _DEBUGGERS):
        text = "the command dropped into a debugger {where}; take breakpoint() and set_trace() out"
    elif code is None:
        text = f"the command made no optimizer step within --timeout {timeout_s:g} s {{where}}; pass a longer one"
    elif code:
        text = f"the command ended with exit code {code} before its first optimizer step {{where}}: {last}"
    elif backwards:
        text = (
            f"the command ran {backwards} backward passes and no step of a torch.optim.Optimizer {{where}}; optimizers "
            "that torch does not know, such as DeepSpeed's and Megatron's own, cannot be seen"
        )
    elif idle:
        text = "the command ended without an optimizer step {where}"
    else:
        text = "no Python of the command imported torch {where}; python -I and -E, and containers, keep verify out"
    return text


def _written(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def _run(arguments: list[str], environment: dict[str, str], folder: Path, timeout_s: float) -> int | None:
    """Run a command until it ends or all ranks have written; return its exit code, None if the time was up."""
    end, last = time.monotonic() + timeout_s, float("inf")
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=process_tree.end_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            err.write(f"{arguments[0]} cannot be started ({error.strerror or error})".encode())
            return 127
        while process.poll() is None and time.monotonic() < last:
            if time.monotonic() > end:
                return None
            paths = list(folder.glob("rank-*.json"))
            if paths and last > end + _GRACE_S and len(paths) >= json.loads(paths[0].read_text())["world"]:
                last = time.monotonic() + _GRACE_S
            time.sleep(_POLL_S)
    code = process.returncode or 0
    return code if code >= 0 else 128 - code
