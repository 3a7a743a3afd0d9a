"""Figures on the pages of docs have their source: those of a table stand in the files that are named at it.

A table is held to the files that are named between the last table and it, else to those of its section. Nothing says
which cell is which value; what lies in one line does. So a line's figures (a column's, or a row's; of cells with several
figures the first ones, the second ones, ...) must all be values of one kind, times one factor for units: paths in the
files that differ in few places. What has no such line (sums, ratios, rows of unlike figures) is quoted below with its
place.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import pytest
from test_numbers import PAGES, ROOT, figure, files_of, named, source

FACTORS = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 1 / 60, 2**-10, 2**-20, 2**-30)
# A number; "12.2x" is one, "8k" and "7B" are names.
NUMBER = re.compile(r"(?<![\w.,-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?=x\b|(?!\w|[.,]\d))")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")
RULE = re.compile(r"^\|[-|: ]+\|$")


QUOTES: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
EXEMPT: dict[tuple[str, str], str] = {}


class Table(NamedTuple):
    page: str
    header: str
    rows: list[str]
    files: frozenset[str]  # of docs/numbers


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
            yield Table(page, line, rows, frozenset(named("\n".join(between)) or named(section)))
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
        most = 1 if n < 3 else 2 if n < 6 else 3
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


@cache
def kinds(files: frozenset[str]) -> Kinds:
    return Kinds({name: source(name) for name in files})


def without_source(rows: Sequence[str], known: Kinds) -> list[str]:
    """The figures of a table that stand in no line which the files hold, each behind the name of its row."""
    lines = lines_of(rows)
    held = {figure for line in lines if known.hold([one.text for one in line]) for figure in line}
    rest = sorted({*sum(lines, [])} - held)
    return [f"{rows[one.row].split('|')[1].strip()}: {one.text}" for one in rest]


@cache
def tables() -> list[Table]:
    """Tables with figures, of all pages, without what is quoted."""
    found = []
    for page in PAGES:
        name, text = str(page.relative_to(ROOT / "docs")), page.read_text()
        for quote in quoted(name):
            text = text.replace(quote, re.sub(r"\d", "", quote))
        found += [table for table in tables_of(name, text) if lines_of(table.rows)]
    return found


def quoted(page: str) -> list[str]:
    return [text.format(*(figure(*one) for one in figures)) for text, figures in QUOTES.get(page, {}).items()]


@pytest.mark.parametrize("table", tables(), ids=lambda table: f"{table.page}:{table.header[:50]}")
def test_figures_of_a_table_are_those_of_the_files_named_at_it(table: Table) -> None:
    if (table.page, table.header) not in EXEMPT:
        assert not without_source(table.rows, kinds(table.files))
