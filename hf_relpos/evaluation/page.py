"""A report as a list of parts, and how it becomes one HTML page or Markdown."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass

STYLE = """
body { max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 .4em; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; white-space: nowrap; }
td.long { white-space: normal; min-width: 16rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; }
th, th:first-child { background: #f4f4f4; }
figure { margin: 1rem 0; }
figure svg { width: 100%; height: auto; max-width: 40rem; }
figcaption { color: #444; font-size: .88rem; padding: .3rem 0; }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; font-size: .82rem; }
@media print { .wide, pre { overflow: visible; } pre { white-space: pre-wrap; } svg, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } figcaption { break-after: avoid; } th, td { white-space: normal; position: static !important; } }
"""
# A cell of more characters than this breaks into lines.
LONG = 40


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Points:
    """Lines of a list."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """An SVG; its name is that of its file beside the Markdown."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Code:
    text: str


Part = Heading | Text | Points | Table | Plot | Code


def as_html(title: str, parts: Iterable[Part]) -> str:
    """Return one page that needs no other file."""
    body = "\n".join(_html(part) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
    if isinstance(part, Text):
        return f"<p>{html.escape(part.text)}</p>"
    if isinstance(part, Points):
        return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in part.lines) + "</ul>"
    if isinstance(part, Plot):
        return f"<figure>\n{part.svg}<figcaption>{html.escape(part.caption)}</figcaption></figure>"
    if isinstance(part, Code):
        return f"<pre>{html.escape(part.text)}</pre>"
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.head)
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in part.rows)
    caption = f"<figcaption>{html.escape(part.caption)}</figcaption>"  # outside of what scrolls on a narrow screen
    return f'<figure>{caption}\n<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div></figure>'


def _cell(text: str) -> str:
    long = ' class="long"' if len(text) > LONG else ""
    return f"<td{long}>{html.escape(text)}</td>"


def as_markdown(title: str, parts: Iterable[Part]) -> str:
    """Return Markdown; plots are files in the folder `figures` beside it."""
    return "\n\n".join([f"# {plain(title)}", *map(_markdown, parts)]) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, Heading):
        return f"{'#' * part.level} {plain(part.text)}"
    if isinstance(part, Text):
        return plain(part.text)
    if isinstance(part, Points):
        return "\n".join(f"- {plain(line)}" for line in part.lines)
    if isinstance(part, Plot):
        return f"![{plain(part.caption)}](figures/{part.name}.svg)\n\n*{plain(part.caption)}*"
    if isinstance(part, Code):
        return code_block(part.text)
    lines = [part.head, ("---",) * len(part.head), *part.rows]
    rows = ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
    return f"{plain(part.caption)}\n\n" + "\n".join(rows)


def plain(text: str) -> str:
    """Return text in which nothing is markup, on one line."""
    return re.sub(r"([\\`*_\[\]|<>])", r"\\\1", " ".join(text.split())).replace(r"\_", "_")


def code_span(text: str) -> str:
    """Return text as Markdown code within a line, whatever it holds."""
    text, mark = " ".join(text.split()), longer_mark(text, 1)
    space = " " * (text[:1] == "`" or text[-1:] == "`")
    return f"{mark}{space}{text}{space}{mark}"


def code_block(text: str, language: str = "") -> str:
    """Return text as a Markdown block of code, whatever it holds."""
    fence = longer_mark(text, 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def longer_mark(text: str, least: int) -> str:
    """Return backquotes, at least so many, and more than stand together in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
