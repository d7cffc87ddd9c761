"""Writes what `benchmarks/gpu.py` found on a GPU into benchmarks/results/ and into the documentation.

    python scripts/gpu_results.py FOLDER [FOLDER ...]
    python scripts/gpu_results.py [--check]

A FOLDER is what `benchmarks/gpu.py --out FOLDER` wrote. Its parts that found something replace those of earlier
folders, and of the record that there is. Written are benchmarks/results/gpu-NAME.json, without logs and paths, and what
stands between the markers of the pages. Without a FOLDER the pages are written from benchmarks/results/, and with
`--check` compared.

Exit code: 0; 1, with `--check` a page is out of date, or a folder cannot be used.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLES = "docs/dev/gpu.md"
STATUS = ("README.md", TABLES, "docs/guarantees.md", "docs/benchmarks.md")
_SHORT = 90
# The rows of each part that decide something, by their first words; all are in the record.
_SHOWN = {
    "machine": ("cuBLAS's workspaces, float32", "CUDA's context"),
    "survival": ("tests",),
    "tests": ("tests",),
    "neighbour": ("during", "an undisturbed"),
    "overhead": ("Runner, 6 tensors, about 1 ms", "Runner, 150 tensors, about"),
    "transfer": ("Runner, pinned", "by hand, pinned"),
    "throughput": ("fit's rate",),
    "probe": ("GPT-2: the truth", "ResNet-50: the truth"),
    "finders": ("ResNet-50",),
    "saving": ("log-probabilities", "chunked_loss", "checkpoint", "offload"),
    "resnet101": ("peak",),
}
_NEAR = 0.05
_LEFT_OUT = ("autoaccum_from", "platform", "notes", "text", "causes")
_PATH = re.compile(r"(?<![\w./:])/(?:[\w.+-]+/)+")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Keep what the folders have, rewrite or check the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    options = parser.parse_args(arguments)
    if options.folders:
        keep(options.folders, root / "benchmarks" / "results")
    stale = rewrite(root, write=not options.check)
    for page in stale:
        print(f"{page}: {'out of date; run scripts/gpu_results.py' if options.check else 'written'}")
    return int(options.check and bool(stale))


def keep(folders: list[Path], results: Path) -> None:
    """Write the record of these folders."""
    runs = [_read(folder) for folder in folders]
    last = runs[-1]
    gpu = last["machine"]["gpu"]
    at = results / f"gpu-{re.sub(r'[^a-z0-9]+', '-', gpu.lower().removeprefix('nvidia '))}"
    record = at.with_name(f"{at.name}.json")
    parts = _parts_of([*([json.loads(record.read_text())] if record.exists() else []), *runs])
    found = _slim({"gpu": gpu, "written": last["written"], "machine": last["machine"], "parts": parts})
    results.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(found, indent=1) + "\n")


def _parts_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of each part that found something, with where it was made if not as the last run."""
    parts: dict[str, Any] = {}
    for run in runs:
        for name, part in run["parts"].items():
            if name not in parts or any(not row.get("skipped") for row in part["rows"]):
                kept = {key: part[key] for key in ("title", "status", "skipped", "rows") if key in part}
                parts[name] = kept | {"made": part.get("made", _made(run))}
    for part in parts.values():
        if part["made"] == _made(runs[-1]):
            del part["made"]
    return parts


def _read(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    if run["device"] != "cuda" or run["tiny"]:
        raise SystemExit(f"{folder} was not made on a GPU, or was made with --tiny")
    return run


def _slim(value: Any) -> Any:
    """Return a value without logs, paths and digits that say nothing."""
    if isinstance(value, dict):
        return {key: _slim(one) for key, one in value.items() if key not in _LEFT_OUT}
    if isinstance(value, list):
        return [_slim(one) for one in value]
    if isinstance(value, str):
        return _PATH.sub("", value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def rewrite(root: Path, *, write: bool) -> list[str]:
    """Return the pages that differ from the records, and write them."""
    found = [json.loads(path.read_text()) for path in sorted((root / "benchmarks" / "results").glob("gpu-*.json"))]
    records = sorted(found, key=lambda record: record["written"], reverse=True)
    changed = []
    for page in STATUS:
        before = (root / page).read_text()
        after = _between(before, "gpu-status", _status(records, page))
        if page == TABLES:
            after = _between(after, "gpu", "\n\n".join(map(_tables, records)))
        if after != before:
            changed.append(page)
            if write:
                (root / page).write_text(after)
    return changed


def _between(text: str, name: str, found: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{found}\n\n{end}{rest.split(end)[1]}"


def _status(records: list[dict[str, Any]], page: str) -> str:
    if not records:
        return "**Not yet run on a GPU.**"
    runs = [f"{'an' if one['gpu'][0] in 'AEINO' else 'a'} {one['gpu']} ({_made(one)})" for one in records]
    counts = [_counts(part["rows"]) for record in records for part in record["parts"].values()]
    passed, made = map(sum, zip(*counts, strict=True))
    result = f"{passed} of {made} tests and checks passed"
    link = "#what-failed-and-what-was-skipped" if page == TABLES else f"{'' if '/' in page else 'docs/'}dev/gpu.md"
    return f"Tested on {' and '.join(runs)}: [{result}]({link})."


def _counts(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many of a part's tests and checks passed, and how many there are."""
    # The first row of tests stands for all of them: "70 passed, 1 not ended, 70 on the GPU".
    if rows and rows[0]["what"] == "tests":
        told = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|not ended)", rows[0]["found"])}
        return told.get("passed", 0), sum(told.values())
    checks = [row["ok"] for row in rows if row["ok"] is not None]
    return sum(checks), len(checks)


def _made(run: dict[str, Any]) -> str:
    about = run["machine"]
    versions = f"driver {about.get('driver')}, CUDA {about.get('cuda')}, PyTorch {about['packages']['torch']}"
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    return f"{run['written'][:10]}, {versions}{commit}"


def _tables(record: dict[str, Any]) -> str:
    parts = record["parts"]
    rows = []
    for name, part in parts.items():
        passed, made = _counts(part["rows"])
        shown = [
            row for row in part["rows"] if not row.get("skipped") and row["what"].startswith(_SHOWN.get(name, " "))
        ]
        found = "; ".join(f"{_clean(row['what'])}: {_clean(row['found'])}" for row in shown if row["ok"] is not False)
        commit = f" ({part['made'].split(', ')[-1]})" if "made" in part else ""
        rows.append((part["title"] + commit, f"{passed} of {made}" if made else "-", found))
    texts = [f"## {record['gpu']}, {record['written'][:10]}", _table("part | as promised | found", rows)]
    if "predictions" in parts:
        texts.append(f"### Predicted memory against the real\n\n{_predictions(parts['predictions']['rows'])}")
    return "\n\n".join([*texts, f"### What failed, and what was skipped\n\n{_failed(parts)}"])


def _table(head: str, rows: list[tuple[Any, ...]]) -> str:
    lines = [head.split(" | "), ["---"] * (head.count(" | ") + 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) if rows else ""


def _clean(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip().removeprefix("E ")
    text = text if len(text) <= _SHORT else f"{text[:_SHORT].rstrip()} ..."
    return text.replace("|", "\\|").replace("<", "&lt;")


def _predictions(rows: list[dict[str, Any]]) -> str:
    table, beyond, errors = [], [], {"allocated": {}, "reserved": {}}
    for row in rows:
        said, real = (row["data"].get(of) or {} for of in ("predicted", "real"))
        if not said.get("reserved_bytes") or not real.get("reserved_bytes"):
            continue
        cells = [row["what"], said["samples"]]
        for what, found in errors.items():
            found[row["what"]] = error = said[f"{what}_bytes"] / real[f"{what}_bytes"] - 1
            cells += [f"{real[f'{what}_bytes'] / 2**30:.2f}", f"{error:+.1%}"]
        beyond += [row["what"]] if real["reserved_bytes"] > said["reserved_bytes"] * (1 + said["uncertainty"]) else []
        if any(abs(found[row["what"]]) > _NEAR for found in errors.values()):
            table.append([*cells, f"{said['uncertainty']:.1%}"])
    lines: list[str] = []
    for what, found in errors.items() if errors["reserved"] else ():
        most, least = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
        sizes = [abs(error) for error in found.values()]
        said = f"median error {statistics.median(sizes):.1%}, {sum(one <= _NEAR for one in sizes)} within {_NEAR:.0%}"
        ends = f"most over {found[most]:+.1%} ({most}), most under {found[least]:+.1%} ({least})"
        lines.append(f"- **{what.capitalize()}**, {len(sizes)} jobs: {said}; {ends}.")
    if lines:
        lines.append(f"- **Reserved more than predicted with its margin**: {'; '.join(beyond) or 'none'}.")
    head = "more than 5% off | samples | allocated, GiB | predicted | reserved, GiB | predicted | margin"
    return "\n".join([*lines, "", _table(head, table)]).strip()


def _failed(parts: dict[str, Any]) -> str:
    lines, skipped = [], {}
    for name, part in parts.items():
        lines += [] if part["status"] in ("done", "skipped") else [f"- {name}: {part['status']}"]
        lines += [
            f"- {name}: {_clean(row['what'])}: {_clean(row['found'])}" for row in part["rows"] if row["ok"] is False
        ]
        for row in ({"what": "all"} | part, *part["rows"]):
            if why := row.get("skipped"):
                skipped.setdefault(f"{name}: skipped ({why})", []).append(row["what"])
    lines += [f"- {why}: {'; '.join(names)}" for why, names in skipped.items()]
    return "\n".join(lines) or "Nothing."


if __name__ == "__main__":
    sys.exit(main())
