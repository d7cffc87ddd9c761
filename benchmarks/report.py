"""Renders the bench's results as tables, goals met or missed, and a picture."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from finders import FINDERS
from throughput import COMPARED
from workloads import MIB, WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
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


def finder_tables(found):
    lines = []
    for of in found:
        workload, truths = WORKLOADS[of["workload"]], of["truths"]
        heading = f"**{workload.title}**, {workload.limit_bytes // MIB} MiB, at most {workload.target}."
        parts = [
            f"{truth['largest']} {conditions}" + (f" (at most {truth['within']} too low)" if truth["within"] else "")
            for conditions, truth in truths.items()
        ]
        lines += [
            f"{heading} Truth: {', '.join(parts)}; the others run {of.get('peers', 'plain')}.",
            "",
            "| finder | answer | of its truth | trials | failed | steps | seconds | state kept |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in of["rows"]:
            share = "-" if row["share"] is None else f"{row['share']:.0%}"
            seconds = f"{statistics.median(row['seconds_of_each']):.1f}" if row["seconds_of_each"] else "-"
            lines.append(
                f"| {FINDERS[row['finder']]} | {ended(row)} | {share} | {len(row['trials'])} | {row['failed']} | "
                f"{row['steps']} | {seconds} | {kept(row)} |"
            )
        if of["seconds"]:
            text = "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**of["seconds"])
            lines += ["", f"Seconds of autoaccum over those of Lightning's binsearch: {text}."]
        lines.append("")
    return lines


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
    lines = [machine_line(results["machine"]), "", "### Goals", "", "| goal | met by | missed by |", "|---|---|---|"]
    lines += [f"| {goal} | {met} of {of} | {'; '.join(missed) or '-'} |" for goal, met, of, missed in goals(results)]
    lines.append("")
    if "finders" in results:
        lines += [
            "### Finders",
            "",
            (
                "![For each workload a group of bars, one for each finder. Above, the answer as a share of the largest "
                "micro-batch that fits; below, the seconds it took. The tables below have the numbers.]"
                "(images/bench-finders.svg)"
            ),
            "",
        ]
        lines += finder_tables(results["finders"])
    if "throughput" in results:
        lines += ["### Updates a second", "", "Those of `fit` over those of the other, quartiles in brackets.", ""]
        lines += throughput_table(results["throughput"])
    if "first-update" in results:
        lines += ["### Time to the first update", "", "Over that with the size given, quartiles in brackets.", ""]
        lines += first_update_table(results["first-update"])
    return "\n".join(lines).rstrip()


def write_into(page: Path, text: str):
    """Replace the text between the markers of a page."""
    old = page.read_text()
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7")


def plot(found, path: Path):
    import matplotlib as mpl  # noqa: PLC0415 - tables need none

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "autoaccum"  # the same numbers make the same file
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = [of["workload"] for of in found]
    figure, (answers, seconds) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, layout="constrained")
    width = 0.8 / len(FINDERS)
    # Colours of Okabe and Ito, and a pattern for each, so that nothing is said by colour alone.
    looks = zip(FINDERS.items(), OKABE_ITO, ("", "//", "..", "xx", "\\\\"), strict=True)
    for number, ((finder, title), colour, hatch) in enumerate(looks):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        rows = {of["workload"]: row for of in found for row in of["rows"] if row["finder"] == finder}
        at = [place + (number - (len(FINDERS) - 1) / 2) * width for place in range(len(names))]
        shares = [(rows.get(name) or {}).get("share") or 0 for name in names]
        took = [statistics.median((rows.get(name) or {}).get("seconds_of_each") or [0]) for name in names]
        answers.bar(at, shares, width, label=title, **look)
        seconds.bar(at, took, width, **look)
        for place, name in zip(at, names, strict=True):
            if name in rows and rows[name]["answer"] is None:
                for axes in (answers, seconds):
                    axes.plot(place, 0.02, "x", transform=axes.get_xaxis_transform(), color="black", markersize=5)
    answers.axhline(1, color="black", linewidth=0.8)
    answers.set_title("Largest micro-batch found, as a share of the largest that fits", fontsize=10)
    seconds.set_title("Seconds until the answer", fontsize=10)
    answers.set_ylabel("answer / its truth")
    seconds.set_ylabel("seconds")
    seconds.set_xticks(range(len(names)), names)
    answers.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.12), frameon=False)
    seconds.set_xlabel("x: no answer")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
