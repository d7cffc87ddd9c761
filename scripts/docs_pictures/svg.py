"""What the pictures share: colours for light and dark, a frame with its description, text."""

from __future__ import annotations

from html import escape

# The colours are told apart by colour-blind people too (Okabe and Ito, darkened until white text can be read on them),
# and no picture says anything by colour alone. A picture has its own ground, to be readable on any page.
LIGHT = {
    "ground": "#ffffff",
    "edge": "#d0d7de",
    "text": "#1f2328",
    "quiet": "#59636e",
    "on": "#fffffe",
    "faint": "#eef1f4",
    "data": "#57606a",
    "blue": "#0a5cc2",
    "green": "#007a5a",
    "red": "#b9480e",
}
DARK = {
    "ground": "#161b22",
    "edge": "#3d444d",
    "text": "#e6edf3",
    "quiet": "#9198a1",
    "on": "#0d1117",
    "faint": "#21262d",
    "data": "#b1bac4",
    "blue": "#79b8ff",
    "green": "#4dd0a5",
    "red": "#ff9d5c",
}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


def _colours(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


STYLE = f"""
svg {{ {_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ svg {{ {_colours(DARK)} }} }}
text {{ font: 15px {FONT}; fill: var(--text); }}
.step {{ font-weight: 600; }}
.quiet {{ font-size: 13px; fill: var(--quiet); }}
.middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }} .good {{ fill: var(--green); font-weight: 600; }}
.alarm {{ fill: var(--red); font-weight: 600; }}
.ground {{ fill: var(--ground); stroke: var(--edge); }}
.blue {{ fill: var(--blue); }} .green {{ fill: var(--green); }}
.red {{ fill: var(--red); }} .plain {{ fill: var(--faint); stroke: var(--edge); }}
.line {{ fill: none; stroke: var(--quiet); stroke-width: 2; }}
.grid {{ fill: none; stroke: var(--faint); }} .dashed {{ stroke-dasharray: 5 4; }}
.blue-line {{ fill: none; stroke: var(--blue); stroke-width: 2; }}
.green-line {{ fill: none; stroke: var(--green); }}
.back {{ fill: none; stroke: var(--red); stroke-width: 2; }}
""".strip()


def framed(width: int, height: int, title: str, description: str, parts: list[str]) -> str:
    """Return the whole SVG, which says in words what it shows."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title description">\n'
        f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words that begin at x, or are centred there if their kind says so."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:g}" y="{y:g}">{escape(words)}</text>'
