"""From an HTML tree to the text that it shows, block by block.

- a row of a table is a line, "| cell | cell |", and a table a paragraph of such lines; a cell's own lines are joined;
- where a cell holds a table, paragraphs or code, its table only gives the page columns: its cells follow each other;
- scripts, menus and what a style hides are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_HIDDEN = ("nav", "noscript", "template", "svg", "math", "canvas", "iframe", "object", "select", "button")
_BLOCKS = ("caption", "dl", "dt", "dd")  # lines of their own, which inscriptis' profile has not
_CELLS = ("td", "th")
_INDENTED = ("ul", "ol", "blockquote")
_INDENT = 4  # columns, in inscriptis
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n")


def laid_out(tree: Any) -> str:
    """The text of an lxml tree, whose tables are changed on the way. Raises RecursionError."""
    from inscriptis.css_profiles import CSS_PROFILES
    from inscriptis.html_engine import Inscriptis
    from inscriptis.model.config import ParserConfig
    from inscriptis.model.css import HtmlElement
    from inscriptis.model.html_element import Display

    own = {tag: HtmlElement(tag=tag, display=Display.none) for tag in _HIDDEN}
    own |= {tag: HtmlElement(tag=tag, display=Display.block) for tag in _BLOCKS}
    config = ParserConfig(css=CSS_PROFILES["relaxed"] | own, display_links=False, display_images=False)
    _flatten_tables(tree, lambda element: Inscriptis(element, config).get_text())
    return "\n".join(line.rstrip() for line in Inscriptis(tree, config).get_text().split("\n")).strip("\n")


def indent_chars(tree: Any, body: str) -> int:
    """Estimate of the blanks that the layout of a page, whose source is `body`, adds: lists are indented."""
    from lxml import etree  # type: ignore[import-untyped]

    levels = [0]
    for event, _ in etree.iterwalk(tree, events=("start", "end"), tag=_INDENTED):
        levels.append(levels[-1] + (1 if event == "start" else -1))
    return _INDENT * max(0, max(levels) - 2) * (body.count("<") // 2 + body.count("\n"))


def _flatten_tables(tree: Any, text_of: Callable[[Any], str]) -> None:
    """Put lines in the place of rows, and blocks in the place of other cells.

    Args:
        text_of: lays out an element and the text behind it.
    """
    for row in list(tree.iter("tr")):
        if any(row.find(f".//{tag}") is not None for tag in ("table", "tr", "pre")):
            continue
        found = [(child.tag in _CELLS, text_of(child).strip()) for child in row]
        cells = [text for is_cell, text in [(False, (row.text or "").strip()), *found] if is_cell or text]
        if any(_PARAGRAPHS.search(cell) for cell in cells):
            continue
        line = " | ".join(" ".join(cell.split()) for cell in cells) if any(cells) else ""
        row.text = f"| {line} |" if line and len(cells) > 1 else line
        row[:] = []
    for element in list(tree.iter("table", "tr", *_CELLS)):  # by these names inscriptis sets cells side by side
        if element.tag == "table":
            inner = element.makeelement("tbody")  # else the rows would take on the paragraph's margins
            inner[:], inner.text, element.text = element[:], element.text, None
            element[:] = [inner]
        element.tag = "article" if element.tag == "tr" else "p"
