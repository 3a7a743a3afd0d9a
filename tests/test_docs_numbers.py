"""Figures in tables of the docs pages have their source: the files of docs/numbers that are named at the table.

That is between the last table and it, else in its section. What does not lie in lines of like figures (docs_tables.py),
as sums, ratios and rows of unlike figures, is quoted here with its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from docs_quotes import FLIPPED, QUOTES
from docs_tables import Kinds, Table, lines_of, shown, tables_of, without_source
from test_numbers import PAGES, ROOT, figure, named, source

# Tables without a source: no measurements, ...
EXEMPT = {
    ("configuration.md", "| | where"): "an example of an option",
    ("configuration.md", "| | |"): "a default of the doctor",
    ("decoders.md", "| situation"): "rough numbers to choose by",
    ("decoders.md", "| asked by"): "rules",
    ("decoders.md", "| option"): "options and defaults",
    ("glossary.md", "| word"): "definitions",
    ("models.md", "| family"): "follows from the shapes, or is what configs say",
    ("needles.md", "| task"): "definitions",
    ("object-store.md", "| object"): "definitions",
    ("performance.md", "| part"): "sizes that the code rounds to",
    ("reliability.md", "| | long run"): "options",
    ("server.md", "| route"): "statuses of HTTP",
    ("server.md", "| variable"): "defaults",
    ("server.md", "| name"): "a status of HTTP",
    ("store-format.md", "| table"): "the format",
    ("store-format.md", "| offset"): "the format",
    ("training.md", "| command"): "a number of bits and of a paper",
    # ... measurements of others or arithmetic, ...
    ("quality.md", "| | paper"): "the paper's figures",
    ("scale.md", "| | demo, 2 cores"): "arithmetic over unit_costs.json, whose sources test_planning.py reads",
    # ... and measurements that were not kept as a file, as the pages say.
    ("decisions/0002-scoring.md", "| score"): "scripts of their own",
    ("decisions/0002-scoring.md", "| chunk length"): "scripts of their own",
    ("decisions/0003-attention-on-a-cpu.md", "| context rows"): "by hand",
    ("decisions/0007-context-in-prompts.md", "| asked"): "by hand",
    ("decoders.md", "| setting"): "a script of its own",
    ("decoders.md", "| block | new tokens"): "by hand",
    ("needles.md", "| form"): "by hand",
    # Added up over kinds of damage:
    ("reliability.md", "| part"): "test_flipped_bits_add_up",
}


@cache
def pages() -> dict[str, str]:
    return {str(page.relative_to(ROOT / "docs")): page.read_text() for page in PAGES}


def quotes(page: str) -> Iterator[tuple[str, str]]:
    """Each sentence as it has to be by its sources, and what is left of it without the figures."""
    for quote, figures in QUOTES.get(page, {}).items():
        values = (one if isinstance(one, int | float) else figure(*one) for one in figures)
        yield quote.format(*values), re.sub(r"\{[^}]*\}", "", quote)


@cache
def tables() -> list[Table]:
    """All tables with figures, without what is quoted."""
    found = []
    for page, text in pages().items():
        for said, rest in quotes(page):
            text = text.replace(said, rest)
        found += [table for table in tables_of(page, text) if lines_of(table.rows)]
    return found


@cache
def kinds(files: frozenset[str]) -> Kinds:
    return Kinds({name: source(name) for name in files})


def missing(table: Table) -> list[str]:
    return without_source(table.rows, kinds(frozenset(named(table.before) or named(table.section))))


def exemption(table: Table) -> tuple[str, str] | None:
    return next((key for key in EXEMPT if table.page == key[0] and table.header.startswith(key[1])), None)


def test_pages_quote_what_was_measured() -> None:
    assert {*QUOTES} <= {*pages()}
    assert not [(page, said) for page, text in pages().items() for said, _ in quotes(page) if said not in text]


def test_figures_of_tables_are_those_of_the_files_named_at_them() -> None:
    wrong = {table[:2]: figures for table in tables() if not exemption(table) and (figures := missing(table))}
    assert not wrong, "neither in the files named at the table, nor in QUOTES, nor is the table EXEMPT"


def test_each_exemption_is_needed() -> None:
    assert {exemption(table) for table in tables() if missing(table)} - {None} == {*EXEMPT}


def test_flipped_bits_add_up() -> None:
    (table,) = (table for table in tables() if table.header.startswith("| part | flips |"))
    outcomes = [name.strip() for name in table.header.strip("|").split("|")][2:-1]
    parts = source("reliability_flips")["result"]["parts"]
    for row, belongs in zip(table.rows, FLIPPED, strict=True):
        own = [counts for name, counts in parts.items() if re.match(belongs, name)]
        added = [sum(counts.get(outcome, 0) for counts in own) for outcome in outcomes]
        assert re.findall(r"[\d,]+(?= \|)", row) == [f"{n:,}" for n in (sum(added), *added, 0)]


RECORD = {
    "ways": [
        {"name": "ours", "ms": 12.34, "f1": {"value": 0.512}},
        {"name": "theirs", "ms": 98.7, "f1": {"value": 0.4}},
    ],
    "rate": 39_317,
}
PAGE = """# Page

## Speed

Said in [made_up.json](numbers/made_up.json):

| way | ms | F1 |
|---|---|---|
| ours, 8k | **{}** | {} |
| theirs, 3 of 4 | {} | {} points |

## Options

| option | default |
|---|---|
| `k` | `4` or 5 |
"""


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        (("12", "0.51", "98.7", "0.40"), []),
        (("0.0123", "51.2", "0.099", "40"), []),  # seconds and points
        (("13", "0.51", "98.7", "0.40"), ["ours, 8k: 13", "theirs, 3 of 4: 98.7"]),
        (("12", "0.52", "98.7", "0.40"), ["ours, 8k: 0.52", "theirs, 3 of 4: 0.40"]),
        (("12.34", "0.51", "0.0987", "0.40"), ["ours, 8k: 12.34", "theirs, 3 of 4: 0.0987"]),  # one unit a line
    ],
)
def test_a_wrong_figure_of_a_made_up_page_is_found(figures: tuple[str, ...], wrong: list[str]) -> None:
    speed, options = tables_of("page.md", PAGE.format(*figures))
    assert "made_up.json" in speed.before
    assert without_source(speed.rows, Kinds({"made_up": RECORD})) == wrong
    assert "made_up" not in options.section
    assert without_source(options.rows, Kinds({})) == ["`k`: 5"]


@pytest.mark.parametrize(
    ("text", "value", "half"),
    [("-0.40", -0.4, 0.005), ("39,300", 39300, 50), ("1.6e-03", 1.6e-3, 5e-5), ("100", 100, 0.5), ("+0", 0, 0.5)],
)
def test_figures_are_as_exact_as_they_are_shown(text: str, value: float, half: float) -> None:
    assert shown(text) == pytest.approx((value, half), rel=1e-3)
