"""Shows the report that `_engine/oom_report.py` writes when memory runs out, as tables in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoaccum._engine.oom_report import FORMAT, VERSION
from autoaccum._memory.limits import format_bytes
from autoaccum._system import safe_files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

_MODULES_SHOWN = 12
# Reports have tens of kilobytes.
_MOST_BYTES = 1 << 26
# Rows with a smaller share of the memory alive are summed in one line.
_SHARE_SHOWN = 0.01


def read_postmortem(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a report.

    Raises:
        InvalidInputError: The file does not exist, or is not a report of this version.
    """
    path = Path(path)
    try:
        text = safe_files.read(path, _MOST_BYTES, follows=True).decode()
    except UnicodeDecodeError as error:
        raise _no_report(path, "it is not text") from error
    except OSError as error:
        raise InvalidInputError(
            f"the report {str(path)!r} cannot be read ({error.strerror or error}); pass a file written by "
            "fit(..., oom_report=FOLDER)"
        ) from error
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise _no_report(path, "it is JSON of another kind") from error
    except json.JSONDecodeError as error:
        reason = "it is empty" if not text.strip() else f"it is not JSON, or is cut short (line {error.lineno})"
        raise _no_report(path, reason) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _no_report(path, "it is JSON of another kind")
    if record.get("version") != VERSION:
        raise InvalidInputError(
            f"the report {str(path)!r} has version {record.get('version')!r}, and this autoaccum reads version "
            f"{VERSION}; read it with the autoaccum that wrote it ({_writer(record)})"
        )
    return record


def _writer(record: dict[str, Any]) -> str:
    software = record.get("software")
    return str(software.get("autoaccum", "?")) if isinstance(software, dict) else "?"


def show_postmortem(path: str | os.PathLike[str]) -> RenderableType:
    """Return a report for a rich console.

    Raises:
        InvalidInputError: The file does not exist, or is not a report of this version.
    """
    record = read_postmortem(path)
    try:
        return Group(*_parts(record, Path(path)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _no_report(Path(path), f"it is incomplete: {error}") from error


def _parts(record: dict[str, Any], path: Path) -> Iterable[RenderableType]:
    yield _head(record)
    alive = record["alive"]
    yield Text("alive counts all tensors of the process there, so it can exceed what the limit counts")
    yield _categories(alive)
    yield _modules(alive)
    yield _largest(alive)
    if record["allocator_snapshot"] is not None:
        snapshot = path.parent / record["allocator_snapshot"]
        yield Text(f"allocator snapshot: {snapshot} (open it at https://pytorch.org/memory_viz)")


def _head(record: dict[str, Any]) -> Text:
    memory, device = record["memory"], record["device"]
    when = "" if record["step"] is None else f" in step {record['step']}"
    size = "" if record["micro_batch"] is None else f", micro-batch of {record['micro_batch']}"
    lines = [f"out of memory{when}, {record['phase']}{size}, on {device['name']} ({record['time']})", record["message"]]
    if record["failed_in"]:
        last = record["failed_in"][-1]
        where = f", {last['source']}" if last["source"] else ""
        lines.append(f"in {last['module']} ({last['kind']}{where})")
    limit = "" if memory["limit_bytes"] is None else f", limit {format_bytes(memory['limit_bytes'])}"
    others = "" if memory["others_bytes"] is None else f", other processes {format_bytes(memory['others_bytes'])}"
    peak = "" if memory["peak_bytes"] is None else f" (at most {format_bytes(memory['peak_bytes'])})"
    lines.append(
        f"total {format_bytes(memory['total_bytes'])}, used {format_bytes(memory['used_bytes'])}{peak}, "
        f"free {format_bytes(memory['free_bytes'])}{limit}{others}"
    )
    for other in record["neighbours"]:
        held = "?" if other["used_bytes"] is None else format_bytes(other["used_bytes"])
        lines.append(f"  {other['name']} (pid {other['pid']}): {held}")
    return Text("\n".join(lines))


def _maker(row: dict[str, Any]) -> str:
    if row["name"] is not None:
        return str(row["name"])
    operator = "" if row["operator"] is None else f" {row['operator']}"
    return f"{row['module'] or ''}{operator}".strip()


def _categories(alive: dict[str, Any]) -> Table:
    whole = max(1, alive["bytes"])
    shown = _large(alive["by_category"], alive)
    rows = [(row["category"], row["bytes"], row["storages"]) for row in shown]
    rows += [("others", *rest)] if any(rest := _rest(shown, alive)) else []
    rows.append(("all", alive["bytes"], alive["storages"]))
    texts = [(name, format_bytes(held), f"{held / whole:.0%}", str(storages)) for name, held, storages in rows]
    return _table("what was alive", ("category", "bytes", "share", "tensors"), texts)


def _modules(alive: dict[str, Any]) -> Table:
    shown = _large(alive["by_module"], alive)[:_MODULES_SHOWN]
    rows = [
        (
            "(not known)" if row["module"] is None else f"{row['module']} ({row['kind']})",
            format_bytes(row["bytes"]),
            format_bytes(row["activations_bytes"]) if row["activations_bytes"] else "",
            str(row["storages"]),
        )
        for row in shown
    ]
    if any(rest := _rest(shown, alive)):
        rows.append(("others", format_bytes(rest[0]), "", str(rest[1])))
    return _table("by module", ("module", "bytes", "of it activations", "tensors"), rows)


def _largest(alive: dict[str, Any]) -> Table:
    shown = _large(alive["largest"], alive)
    rows = [
        (
            format_bytes(row["bytes"]),
            "x".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            row["category"],
            _maker(row),
            row["source"] or "",
        )
        for row in shown
    ]
    if any(rest := _rest(shown, alive)):
        rows.append((format_bytes(rest[0]), f"{rest[1]} others", "", "", "", ""))
    return _table("largest tensors", ("bytes", "shape", "dtype", "category", "made by", "where"), rows)


def _large(rows: list[dict[str, Any]], alive: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows large enough to be worth a line."""
    return [row for row in rows if row["bytes"] >= _SHARE_SHOWN * alive["bytes"]]


def _rest(shown: list[dict[str, Any]], alive: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes and the number of tensors alive that the rows shown leave out."""
    held = sum(row["bytes"] for row in shown)
    # A row without a count stands for one tensor.
    return alive["bytes"] - held, alive["storages"] - sum(row.get("storages", 1) for row in shown)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table without its empty columns."""
    table = Table(title=title, title_justify="left")
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    for index in kept:
        numbers = columns[index] in ("bytes", "share", "tensors", "of it activations")
        table.add_column(columns[index], justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        # As text: square brackets in a name are not markup.
        table.add_row(*(Text(row[index]) for index in kept))
    return table


def _no_report(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{str(path)!r} is not an out-of-memory report: {reason}; pass a .json file written by "
        "fit(..., oom_report=FOLDER)"
    )
