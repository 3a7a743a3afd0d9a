"""Spans that a short question can ask for: dates, amounts, names."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.names import MONTHS

Sort = Literal["date", "year", "percentage", "money", "number", "name"]

_MONTH = "|".join(MONTHS)
_COUNTED = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|"
    "nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
COUNTING = tuple(_COUNTED.split("|"))
_FIGURE = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_YEAR = r"(?:1[0-9]|20)\d\d"
_LARGE = r"(?: (?:million|billion|trillion|thousand|hundred))?"
_VALUES = re.compile(
    rf"(?P<date>\b\d{{1,2}} (?:{_MONTH})(?:,? {_YEAR})?\b|\b(?:{_MONTH}) \d{{1,2}}(?:, {_YEAR})?\b(?!,\d)"
    rf"|\b(?:{_MONTH}),? {_YEAR}\b)"
    rf"|(?P<year>(?<![\w.,$€£#–-]){_YEAR}(?![\w%–-]|[.,]\d))"
    rf"|(?P<percentage>(?<![\w.,–-])(?:{_FIGURE})(?:%| percent\b| per cent\b))"
    rf"|(?P<money>(?:US|A)?[$€£](?:{_FIGURE}){_LARGE}\b)"
    rf"|(?P<number>(?<![\w.,$€£#–-])(?:{_FIGURE}){_LARGE}(?![\w%–-]|[.,]\d)"
    rf"|\b(?:{_COUNTED})(?:-(?:one|{_COUNTED}))?{_LARGE}\b(?!-))"
)
_CAPITALISED = re.compile(r"[^\W\d_][\w'’.-]*[\w]|[^\W\d_]")
_JOINING = re.compile(r" (?:(?:of|the|de|du|da|van|von|der|la|le|al|bin|el) ){0,2}")


class Span(NamedTuple):
    """A part of a text."""

    start: int
    end: int
    sort: Sort


def values(text: str) -> list[Span]:
    """Dates, years, percentages, amounts of money and numbers in order."""
    return [Span(*found.span(), found.lastgroup) for found in _VALUES.finditer(text)]  # type: ignore[arg-type]


def names(text: str, lexicon: Lexicon) -> list[Span]:
    """Runs of names in order; "of" and the like only between two of them."""
    found: list[Span] = []
    for word in _CAPITALISED.finditer(text):
        token = word[0].removesuffix("'s").removesuffix("’s")
        if not lexicon.is_name(token) or token in MONTHS:
            continue
        end = word.start() + len(token)
        if found and _JOINING.fullmatch(text, found[-1].end, word.start()):
            found[-1] = Span(found[-1].start, end, "name")
        else:
            found.append(Span(word.start(), end, "name"))
    return found


def spans(text: str, lexicon: Lexicon) -> list[Span]:
    """Values and names."""
    return values(text) + names(text, lexicon)
