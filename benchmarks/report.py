"""Renders the bench's results as tables, goals met or missed, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finders import FINDERS
from throughput import COMPARED
from workloads import MIB, WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

ACCELERATE = "Accelerate `find_executable_batch_size`"
TRANSFORMERS = "Transformers `auto_find_batch_size`"
ANSWER_SHARE = 0.97
MOST_TRIALS = 6
MOST_FAILED = 2
SECONDS_RATIO = 0.3
UPDATES_RATIO = 1.0
FIRST_UPDATE_RATIO = 1.15


def spread(of):
    low, high = of["quartiles"]
    return f"{of['median']:.2f} ({low:.2f} to {high:.2f})"


def machine_line(machine):
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {machine['os']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + f"; load at the start {machine['load']:.1f}."
    )


def ended(row):
    """Return the answer, or in a few words why there is none."""
    if row["answer"] is not None:
        return str(row["answer"])
    # If cleaning up after one error raised another, the first ended the search.
    said = [*row["said"], row["ended"]]
    for sign, words in (
        ("no answer within", "timed out"),
        ("one sample does not fit", "none: gave up at 1"),
        ("micro_batch=1 does not fit", "none: gave up at 1"),
        ("a sample of shape", "none: gave up at 1"),
        ("could not create a primitive", "none: raised “could not create a primitive”"),
        ("can't allocate memory", "none: raised “can't allocate memory”"),
    ):
        if any(sign in text for text in said):
            return words
    return f"none: {row['ended'][:80]}"


def kept(row):
    if "kept" not in row:
        return "-"
    lost = [part for part, same in row["kept"].items() if not same]
    return "all" if not lost else "not " + ", ".join(lost)


def finder_table(found):
    lines = [
        "| model, limit | largest that fits | " + " | ".join(FINDERS.values()) + " |",
        "|---" * (2 + len(FINDERS)) + "|",
    ]
    lost = {finder: [] for finder in FINDERS}
    for of in found:
        workload, rows = WORKLOADS[of["workload"]], {row["finder"]: row for row in of["rows"]}
        cells = []
        for finder in FINDERS:
            row = rows[finder]
            answer = f"{row['answer']} ({row['share']:.0%})" if row["answer"] is not None else ended(row)
            cells.append(f"{answer}, {row['steps']} steps" + (f", {row['seconds']:.1f} s" if row["answer"] else ""))
            lost[finder] += [part for part, same in row.get("kept", {}).items() if not same]
        truth = of["truths"]["settled"]["largest"]
        lines.append(f"| {workload.title}, {workload.limit_bytes // MIB} MiB | {truth} | {' | '.join(cells)} |")
    states = [f"not {', '.join(dict.fromkeys(parts))}" if parts else "all" for parts in lost.values()]
    return [*lines, f"| state kept | | {' | '.join(states)} |", ""]


def readme_table(found):
    """Return the table of the README: the finders' answers, and what becomes of the training."""

    def of(finder):
        rows = [row for model in found for row in model["rows"] if row["finder"] == finder]
        shares = [row["share"] for row in rows if row["answer"] is not None]
        none = len(rows) - len(shares)
        answers = f"{min(shares):.0%} to {max(shares):.0%}" + (
            f", none for {none} of {len(rows)} models" if none else ""
        )
        return answers, f"{min(row['steps'] for row in rows)} to {max(row['steps'] for row in rows)}"

    ours, binary, accelerate = (of(finder)[0] for finder in ("autoaccum", "lightning-binsearch", "accelerate"))
    lines = [
        ("", "autoaccum", "Lightning `BatchSizeFinder`", f"{ACCELERATE}, {TRANSFORMERS}", "accumulation by hand"),
        ("---",) * 5,
        ("size found, of the largest that fits", ours, binary, accelerate, "a guess"),
        ("steps thrown away", "0", of("lightning-binsearch")[1],
         f"{of('accelerate')[1]}, training restarts", "0"),
        ("keeps your batch size", "yes", "no", "no", "yes"),
        ("gradient of the whole batch", "exact", "of another batch", "of another batch",
         "if parts are equal"),
        ("survives running out of memory later", "yes", "no", "restarts", "no"),
    ]  # fmt: skip
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "Trials of `fit` are training steps. A size above 100% may fail later."
    return f"{table}\n\n{len(found)} models ([how](docs/benchmarks.md)). {notes}"


def cut_text(cut):
    return "+".join(map(str, cut)) if len(cut) <= 4 else f"{len(cut)} x {max(cut)}"


def throughput_table(rows):
    lines = [
        "| model, limit, target | cut of `fit` | best cut of the sweep | " + " | ".join(COMPARED.values()) + " |",
        "|---" * (3 + len(COMPARED)) + "|",
    ]
    for row in rows:
        if "cut" not in row:
            lines.append(f"| {row['workload']} |" + " failed |" * (2 + len(COMPARED)))
            continue
        cells = [spread(row["ratios"][how]) if how in row["ratios"] else "failed" for how in COMPARED]
        lines.append(
            f"| {row['workload']}, {row['limit_bytes'] // MIB} MiB, {row['target']} | {cut_text(row['cut'])} | "
            f"{cut_text(row['best_cut'])} | " + " | ".join(cells) + " |"
        )
    return [*lines, ""]


def first_update_table(rows):
    modes = list(dict.fromkeys(mode for row in rows for mode in row["ratios"]))
    lines = [
        "| model | size found | " + " | ".join(f"`micro_batch={mode!r}`" for mode in modes) + " |",
        "|---" * (2 + len(modes)) + "|",
    ]
    for row in rows:
        cells = [spread(row["ratios"][mode]) if mode in row["ratios"] else "failed" for mode in modes]
        lines.append(f"| {row['workload']} | {row['micro_batch']} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def goals(results):
    """Return (goal, met by, of, what missed it) for all measurements."""
    judged = []

    def judge(goal, rows, check):
        missed = [text for row in rows if (text := check(row)) is not None]
        judged.append((goal, len(rows) - len(missed), len(rows), missed))

    found = results.get("finders", [])
    ours = [{"workload": of["workload"], **row} for of in found for row in of["rows"] if row["finder"] == "autoaccum"]

    def judge_trials(goal, bad):
        judge(goal, ours, lambda row: f"{row['workload']} {_lists(row)}" if any(map(bad, row["trial_lists"])) else None)

    if ours:
        judge(
            f"answer at least {ANSWER_SHARE:.0%} of the truth and never above it",
            ours,
            lambda row: (
                None
                if all(answer and ANSWER_SHARE * row["truth"] <= answer <= row["truth"] for answer in row["answers"])
                else f"{row['workload']} {', '.join(map(str, row['answers']))} of {row['truth']}"
            ),
        )
        judge_trials(f"at most {MOST_TRIALS} trials", lambda trials: len(trials) > MOST_TRIALS)
        judge_trials(
            f"at most {MOST_FAILED} of them failed", lambda trials: sum(not fits for _, fits in trials) > MOST_FAILED
        )
        judge("state kept, all of it", ours, lambda row: None if kept(row) == "all" else row["workload"])
        judge(
            f"seconds at most {SECONDS_RATIO} of Lightning's binsearch, where both answered",
            [of for of in found if of["seconds"]],
            lambda of: (
                f"{of['workload']} {of['seconds']['median']:.2f}" if of["seconds"]["median"] > SECONDS_RATIO else None
            ),
        )
    if "throughput" in results:
        judge(
            f"updates a second at least {UPDATES_RATIO} of the loop by hand with the best cut",
            results["throughput"],
            lambda row: _ratio_missed(row, "hand-best", lambda median: median >= UPDATES_RATIO),
        )
    if "first-update" in results:
        judge(
            f"first update after at most {FIRST_UPDATE_RATIO} times as long as with the size given",
            results["first-update"],
            lambda row: _ratio_missed(row, "auto", lambda median: median <= FIRST_UPDATE_RATIO),
        )
    return judged


def _lists(row):
    """Return the trials, with a cross for those that did not fit."""
    return " and ".join(
        " ".join(f"{size}{'' if fits else '✗'}" for size, fits in trials) for trials in row["trial_lists"]
    )


def _ratio_missed(row, which, is_met):
    if which not in row["ratios"]:
        return f"{row['workload']} failed"
    median = row["ratios"][which]["median"]
    return None if is_met(median) else f"{row['workload']} {median:.2f}"


def markdown(results):
    lines = [machine_line(results["machine"]), ""]
    if "finders" in results:
        lines += ["### Answers", "", *finder_table(results["finders"])]
    if "throughput" in results:
        lines += ["### Speed", "", "Optimizer steps a second of `fit`, over those of the other.", ""]
        lines += throughput_table(results["throughput"])
    if "first-update" in results:
        lines += ["### Time to the first optimizer step", "", "With the search, over that with the size given.", ""]
        lines += first_update_table(results["first-update"])
    return "\n".join(lines).rstrip()


def goals_table(results):
    lines = ["| goal | met by | missed by |", "|---|---|---|"]
    lines += [f"| {goal} | {met} of {of} | {'; '.join(missed) or '-'} |" for goal, met, of, missed in goals(results)]
    return "\n".join(lines)


def write_into(page: Path, text: str, name: str = "bench"):
    """Replace the text between the markers of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text()
    before, after = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
