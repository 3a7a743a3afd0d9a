"""Whether the figures of a Markdown table are those of JSON files.

Nothing says which cell is which value; what lies in one line does. A line's figures (those of a column, or of a row; of
cells with several figures the first ones, the second ones, ...) must all be values of one kind: of paths in the files
that differ in few places, times one factor for units.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

FACTORS = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 1 / 60, 2**-10, 2**-20, 2**-30)
# A number; "8k", "7B" and "90th" are names.
NUMBER = re.compile(r"(?<![\w.,-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![.,]?\d|(?:k|B|th)\b)")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")
RULE = re.compile(r"^\|[-|: ]+\|$")


class Table(NamedTuple):
    page: str
    header: str
    rows: list[str]
    before: str  # between the last table, or the heading, and it
    section: str


class Figure(NamedTuple):
    """A figure: its row, its column, the how manieth of its cell, and its text."""

    row: int
    column: int
    nth: int
    text: str


def tables_of(page: str, text: str) -> Iterator[Table]:
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
        between: list[str] = []
        lines = iter(section.splitlines())
        for line in lines:
            if not line.startswith("|"):
                between.append(line)
                continue
            assert RULE.match(next(lines)), f"{page}: {line} begins no table"
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(row)
            yield Table(page, line, rows, "\n".join(between), section)
            between = []


def lines_of(rows: Sequence[str]) -> list[list[Figure]]:
    """The columns and rows of a table's figures; its first column holds names and settings."""
    lines: dict[tuple[str, int, int], list[Figure]] = {}
    for i, row in enumerate(rows):
        for j, cell in enumerate(row.strip("|").split("|")[1:]):
            for k, text in enumerate(NUMBER.findall(CODE.sub("", cell))):
                for line in (("column", j, k), ("row", i, k)):
                    lines.setdefault(line, []).append(Figure(i, j, k, text))
    return list(lines.values())


def leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, str(key)))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path, node


class Kinds:
    """Values of files by their kind: a path with at most three places left open."""

    def __init__(self, records: dict[str, Any]) -> None:
        self.leaves = list(leaves(records, ()))
        found: dict[tuple[str, ...], set[float]] = {}
        for path, value in self.leaves:
            for kind in self.of(path, 3):
                found.setdefault(kind, set()).add(value)
        self.values = {kind: sorted(values) for kind, values in found.items()}

    @staticmethod
    def of(path: tuple[str, ...], most: int) -> Iterator[tuple[str, ...]]:
        for n in range(most + 1):
            for open_ in combinations(range(len(path)), n):
                yield tuple("*" if i in open_ else key for i, key in enumerate(path))

    def hold(self, line: Sequence[str]) -> bool:
        """Whether all figures of a line are values of one kind, which is not so large that it holds any figure."""
        figures = sorted((shown(text) for text in line), key=lambda it: it[1] / max(abs(it[0]), 1e-9))
        (first, half), n = figures[0], len(line)
        most = 1 if n < 3 else 2 if n < 4 else 3
        return n > 1 and any(
            len(self.values[kind]) <= 5 * n and all(within(self.values[kind], factor, *one) for one in figures)
            for path, value in self.leaves
            for factor in FACTORS
            if abs(value * factor - first) <= half
            for kind in self.of(path, most)
        )


def shown(text: str) -> tuple[float, float]:
    """A figure and half of its last digit; zeros at the end of thousands are no digits."""
    number, _, power = text.replace(",", "").partition("e")
    whole, _, part = number.partition(".")
    digits = whole.strip("+-")
    zeros = 0 if part or len(digits) < 4 else len(digits) - len(digits.rstrip("0"))
    return float(text.replace(",", "")), 0.5001 * 10.0 ** (int(power or 0) + zeros - len(part))


def within(values: list[float], factor: float, wanted: float, half: float) -> bool:
    at = bisect_left(values, (wanted - half) / factor)
    return at < len(values) and values[at] <= (wanted + half) / factor


def without_source(rows: Sequence[str], known: Kinds) -> list[str]:
    """The figures of a table that stand in no line which the files hold, each behind the name of its row."""
    lines = lines_of(rows)
    held = {figure for line in lines if known.hold([one.text for one in line]) for figure in line}
    rest = sorted({figure for line in lines for figure in line} - held)
    return [f"{rows[one.row].split('|')[1].strip()}: {one.text}" for one in rest]
