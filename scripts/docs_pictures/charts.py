"""Draws data with Altair, in the colours of the hand-drawn pictures, light and dark in one file."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import altair as alt
import vl_convert
from svg import DARK, FONT, LIGHT

MIB = 2**20
_ON_LOSSES = ("line: a run that was not killed", "checkpoint", "killed")
PLAIN_FONT = FONT.replace('"', "")


def memory_by_size(report: dict[str, Any], target_batch: int) -> str:
    """Return the picture of a measured report: each trial's memory, the limit, and what the plan takes."""
    measured = report["measured"]
    limit = measured["device"]["limit_bytes"] / MIB
    fitting = [trial for trial in measured["trials"] if trial["fits"]]
    per_sample, fixed = line_through(fitting)
    longest = 140
    points = [
        {"size": t["size"], "peak": t["peak_bytes"] / MIB, "what": "fits", "label": str(t["size"])} for t in fitting
    ]
    # Where memory ran out: at the limit, before their peak.
    points += [
        {"size": t["size"], "peak": limit, "what": "does not fit", "label": str(t["size"])}
        for t in measured["trials"]
        if not t["fits"]
    ]
    line = [{"size": size, "peak": (fixed + per_sample * size) / MIB} for size in (0, longest)]
    x = alt.X(
        "size:Q",
        title="micro-batch (samples)",
        axis=alt.Axis(values=list(range(0, 160, 20))),
        scale=alt.Scale(domain=[0, longest], nice=False),
    )
    y = alt.Y("peak:Q", title="peak memory of a step (MiB)", scale=alt.Scale(domain=[0, 130], nice=False))
    kinds = alt.Scale(domain=["fits", "does not fit"], range=[LIGHT["blue"], LIGHT["red"]])
    shapes = alt.Scale(domain=["fits", "does not fit"], range=["circle", "cross"])
    trials = alt.Chart(alt.Data(values=points))
    cut = max(measured["plan"]["micro_batches"])
    chart = alt.layer(
        alt.Chart(alt.Data(values=line)).mark_line(color=LIGHT["quiet"], strokeDash=[5, 4]).encode(x, y),
        alt.Chart(alt.Data(values=[{"peak": limit}])).mark_rule(color=LIGHT["red"], strokeWidth=2).encode(y="peak:Q"),
        _label(12, 22, "line through trials", LIGHT["quiet"], angle=325, fontSize=13),
        _label(2, limit, f"limit {limit:.0f} MiB", LIGHT["red"], dy=-8),
        alt.Chart(alt.Data(values=[{"size": cut}]))
        .mark_rule(color=LIGHT["green"], strokeDash=[2, 3])
        .encode(x="size:Q"),
        _label(cut, 8, f"plan: {target_batch} in {len(measured['plan']['micro_batches'])}", LIGHT["green"], dx=6),
        trials.mark_point(size=110, filled=True, opacity=1).encode(
            x,
            y,
            color=alt.Color("what:N", scale=kinds, title="trial", sort=None),
            shape=alt.Shape("what:N", scale=shapes, title="trial", sort=None),
        ),
        *(
            trials.transform_filter(f"datum.what == '{what}' && datum.size >= 20")
            .mark_text(dx=side * 8, dy=side * 14, align=align, fontSize=13, color=LIGHT["text"])
            .encode(x, y, text="label:N")
            for what, side, align in (("fits", -1, "right"), ("does not fit", 1, "left"))
        ),
    )  # fmt: skip
    return _drawn(
        chart.properties(width=430, height=280),
        "Memory over the micro-batch",
        f"Peak memory of a training step against the micro-batch's samples. Trials of {_listed(fitting)} samples fit "
        f"under the limit of {limit:.0f} MiB and lie on a line; larger ones do not. The plan takes {target_batch} in "
        f"micro-batches of {measured['plan']['micro_batches']}.",
    )


def line_through(trials: list[dict[str, Any]]) -> tuple[float, float]:
    """Return bytes a sample and fixed bytes by least squares."""
    sizes, peaks = [t["size"] for t in trials], [t["peak_bytes"] for t in trials]
    middle_size, middle_peak = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    rise = sum((s - middle_size) * (p - middle_peak) for s, p in zip(sizes, peaks, strict=True))
    per_sample = rise / sum((s - middle_size) ** 2 for s in sizes)
    return per_sample, middle_peak - per_sample * middle_size


def losses(undisturbed: list[dict[str, Any]], attempts: list[list[dict[str, Any]]]) -> str:
    """Return the picture of a run that was killed and resumed, beside the one that was not."""
    names = ("logged before the kill", "after resuming from the checkpoint")
    points = [
        {"step": step["step"], "loss": step["loss"], "what": name}
        for name, steps in zip(names, attempts, strict=True)
        for step in steps
    ]
    # The process died after an update, before it was logged.
    kept, killed = attempts[1][0]["step"] - 1, attempts[0][-1]["step"] + 1
    highest = 1.15 * max(step["loss"] for step in undisturbed)
    x = alt.X("step:Q", title="optimizer step", axis=alt.Axis(tickMinStep=1, format="d"))
    y = alt.Y("loss:Q", title="loss", scale=alt.Scale(domain=[0, highest], nice=False))
    scale = alt.Scale(domain=list(names), range=[LIGHT["red"], LIGHT["blue"]])
    shapes = alt.Scale(domain=list(names), range=["square", "circle"])
    chart = alt.layer(
        alt.Chart(alt.Data(values=undisturbed)).mark_line(color=LIGHT["quiet"], strokeWidth=2).encode(x, y),
        alt.Chart(alt.Data(values=points))
        .mark_point(size=150, strokeWidth=2.5, opacity=1)
        .encode(
            x,
            y,
            color=alt.Color("what:N", scale=scale, title=None, sort=None),
            shape=alt.Shape("what:N", scale=shapes, title=None, sort=None),
        ),
        _label(1.2, 0.15 * undisturbed[0]["loss"], "line: a run that was not killed", LIGHT["quiet"]),
        alt.Chart(alt.Data(values=[{"step": kept}, {"step": killed}]))
        .mark_rule(color=LIGHT["quiet"], strokeDash=[2, 3])
        .encode(x="step:Q"),
        _label(kept, highest, "checkpoint", LIGHT["text"], align="right", dx=-6, dy=8),
        _label(killed, highest, "killed", LIGHT["red"], dx=6, dy=8),
    )
    return _drawn(
        chart.properties(width=430, height=240),
        "Killed, and resumed",
        f"The loss by update. The undisturbed run is a line from {undisturbed[0]['loss']:.2f} to "
        f"{undisturbed[-1]['loss']:.2f}. The killed run's updates 1 to {attempts[0][-1]['step']} and the resumed run's "
        f"updates {attempts[1][0]['step']} to {attempts[1][-1]['step']}, after the checkpoint of update {kept}, lie on "
        "it.",
    )


def _label(x_at: float, y_at: float, words: str, colour: str, **mark: Any) -> alt.Chart:
    across, up = ("step", "loss") if words in _ON_LOSSES else ("size", "peak")
    axes = {across: x_at, up: y_at}
    mark = {"align": "left", "fontSize": 14} | mark
    return (
        alt.Chart(alt.Data(values=[axes | {"label": words}]))
        .mark_text(color=colour, fontWeight=600, **mark)
        .encode(alt.X(f"{across}:Q"), alt.Y(f"{up}:Q"), text="label:N")
    )


def _listed(trials: list[dict[str, Any]]) -> str:
    sizes = [str(size) for size in sorted({trial["size"] for trial in trials})]
    return " and ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))


def _drawn(chart: alt.LayerChart, title: str, description: str) -> str:
    quiet, edge = LIGHT["quiet"], LIGHT["edge"]
    chart = (
        chart.configure(background=LIGHT["ground"], font=PLAIN_FONT, padding=16, aria=False)
        .configure_view(stroke=edge)
        .configure_axis(
            labelColor=quiet, titleColor=LIGHT["text"], gridColor=LIGHT["faint"], domainColor=quiet, tickColor=quiet,
            labelFontSize=13, titleFontSize=14, titleFontWeight=600, titlePadding=10, grid=True,
        )
        .configure_legend(
            labelColor=LIGHT["text"], titleColor=LIGHT["text"], labelFontSize=13, titleFontSize=13, orient="bottom",
            symbolOpacity=1, labelLimit=0, columnPadding=48,
        )
    )  # fmt: skip
    svg = vl_convert.vegalite_to_svg(chart.to_json(validate=False))
    return _dark_too(svg, title, description)


def _dark_too(svg: str, title: str, description: str) -> str:
    """Add the dark colours as rules on the light ones, and what the picture shows in words."""
    rules = " ".join(
        f'[{attribute}="{colour}"] {{ {attribute}: {DARK[name]}; }}'
        for name, colour in LIGHT.items()
        for attribute in ("fill", "stroke")
    )
    told = (
        f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>\n'
        f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>\n"
    )
    head, body = re.fullmatch(r"(<svg[^>]*)>(.*)", svg, flags=re.DOTALL).groups()
    return f'{head} role="img" aria-labelledby="title description">\n{told}{body}\n'
