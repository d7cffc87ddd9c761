"""Draws charts of Altair as SVG that needs no script, and as files of other formats.

Vega-Lite runs inside vl-convert. Both are an extra (`pip install altair vl-convert-python`), imported only here, in
 `_report/charts.py`. Marks with a text of `said` show it where the pointer rests; the style of
`style_of` sets the colours of dark screens.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree as ET

import vl_convert

if TYPE_CHECKING:
    import altair as alt

# Colours of marks are told apart by colour-blind people too (Okabe and Ito 2008, https://jfly.uni-koeln.de/color/);
# those of lines and words are darker, to be read on white.
LIGHT = {
    "ground": "#ffffff",
    "text": "#1c1e21",
    "quiet": "#5f656d",
    "faint": "#dcdfe3",
    "band": "#f2f4f6",
    "good": "#17794a",
    "care": "#8a5a00",
    "bad": "#b3261e",
    "line0": "#0071b1",
    "line1": "#b94f00",
    "line2": "#007a59",
    "line3": "#b0478a",
    "line4": "#35729a",
    "line5": "#8f6300",
}
DARK = {
    "ground": "#15181c",
    "text": "#e6e8eb",
    "quiet": "#a0a7b0",
    "faint": "#343a42",
    "band": "#1e2329",
    "good": "#5cc691",
    "care": "#e5b95c",
    "bad": "#f28b82",
    "line0": "#56b4e9",
    "line1": "#f0883e",
    "line2": "#3fc89d",
    "line3": "#e08fc0",
    "line4": "#8ecae6",
    "line5": "#e6b422",
}
LINES = 6
# The same on light and dark screens, each with what is readable on it.
KIND_COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#999999",
    "gradients": "#d55e00",
    "optimizer": "#009e73",
    "inputs": "#f0e442",
    "activations": "#56b4e9",
    "loss": "#cc79a7",
    "workspace": "#e69f00",
    "temporary": "#5c5c5c",
    "reserved, unused": "#c3c8ce",
}
ON_KIND = {kind: "#fefefe" if kind in ("parameters", "temporary") else "#101010" for kind in KIND_COLOURS}
# Words are as wide in browsers as vl-convert measures them.
_FONT = "Arial, Liberation Sans, Helvetica, sans-serif"
_SVG = "http://www.w3.org/2000/svg"
# Begins the texts that are shown where the pointer rests; Vega describes further marks in words of its own.
_SAID = "\u2063"


class Drawing(NamedTuple):
    """A picture.

    Attributes:
        title: What it is of.
        caption: How to read it.
        description: What it shows, for those who do not see it.
        svg: The picture as an `svg` element.
    """

    title: str
    caption: str
    description: str
    svg: str


def said(text: str) -> str:
    """Return a description of a mark that is shown where the pointer rests."""
    return _SAID + clean(text)


def clean(text: str) -> str:
    """Return a text without characters that XML refuses."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def drawn(chart: alt.LayerChart | alt.FacetChart, title: str, caption: str, description: str) -> Drawing:
    """Draw a chart."""
    quiet, text = LIGHT["quiet"], LIGHT["text"]
    styled: Any = (
        chart.configure(background=LIGHT["ground"], font=_FONT, padding=4)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=quiet, titleColor=quiet, gridColor=LIGHT["faint"], domainColor=LIGHT["faint"],
            tickColor=LIGHT["faint"], labelFontSize=12, titleFontSize=12, titleFontWeight="normal", titlePadding=8,
            labelLimit=0,
        )
        .configure_legend(
            labelColor=text, titleColor=quiet, labelFontSize=12, titleFontSize=12, titleFontWeight="normal",
            labelLimit=0, symbolOpacity=1, orient="bottom", columnPadding=16,
        )
        .configure_text(fontSize=12, color=text)
    )  # fmt: skip
    specification: dict[str, Any] = styled.to_dict(validate=False)
    svg = _with_titles(vl_convert.vegalite_to_svg(specification), f"{title}. {description}")
    return Drawing(title, caption, description, svg)


def style_of(selector: str = "svg") -> str:
    """Return the CSS that gives pictures their dark colours on dark screens; prints stay light."""
    rules = " ".join(
        f'{selector} [{attribute}="{colour}"] {{ {attribute}: {DARK[name]}; }}'
        for name, colour in LIGHT.items()
        for attribute in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme: dark) {{ {rules} }}"


def alone(drawing: Drawing) -> str:
    """Return the picture as a document of its own, light or dark."""
    head, rest = drawing.svg.split(">", 1)
    told = f"<title>{escape(drawing.title)}</title><desc>{escape(drawing.description)}</desc>"
    return f"{head}>{told}<style>{style_of()}</style>{rest}\n"


def _with_titles(svg: str, label: str) -> str:
    """Return Vega's picture with one label for all of it, and the texts of its marks as titles."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)  # noqa: S314 - Vega made it
    for element in root.iter():
        label_of_mark = element.attrib.pop("aria-label", "")
        for name in ("role", "aria-roledescription", "aria-hidden"):
            element.attrib.pop(name, None)
        if element.tag == f"{{{_SVG}}}text" and "stroke" in element.attrib:
            element.set("paint-order", "stroke")
        if label_of_mark.startswith(_SAID):
            title = ET.Element(f"{{{_SVG}}}title")
            title.text = label_of_mark.removeprefix(_SAID)
            element.insert(0, title)
    root.attrib |= {"role": "img", "aria-label": clean(label)}
    return ET.tostring(root, encoding="unicode")
