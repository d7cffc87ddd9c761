"""Makes pages of HTML that need no network, no script and no other file, from plain texts and numbers.

They follow the reader's light or dark setting (`html_page.css`). Every text is escaped here.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._report.drawing import Drawing


def document_of(title: str, fragment: str, policy: str = "") -> str:
    """Return a complete document with a fragment of `article_of` as its body, under a content security policy."""
    security = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{security}<title>{escape(title)}</title>\n</head>\n<body>\n{fragment}\n</body>\n</html>\n"
    )


def article_of(body: str, further_style: str = "") -> str:
    """Return an element with its own style, for notebooks."""
    style = resources.files("autoaccum._report").joinpath("html_page.css").read_text(encoding="utf-8")
    return f'<style>\n{style}{further_style}</style>\n<article class="autoaccum">\n{body}\n</article>'


def header_of(kind: str, title: str) -> str:
    """Return the head of an article."""
    return f'<header><p class="kind">{escape(kind)}</p><h1>{escape(title)}</h1></header>'


def figure_of(drawing: Drawing) -> str:
    """Return a picture with its title and caption."""
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>" if drawing.caption else ""
    return f'<figure><h2>{escape(drawing.title)}</h2><div class="wide">\n{drawing.svg}\n</div>{caption}</figure>'


def lacking_of(what: str) -> str:
    """Return what stands in the place of pictures where the library that draws them is not installed."""
    told = f"Pictures need Altair and vl-convert, which are not installed: pip install altair vl-convert-python. {what}"
    return f'<p class="lacking">{escape(told.strip())}</p>'
