"""The pages keep up with the code: command lines parse, links lead somewhere, index and glossary are whole."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdllm_rag.cli.main import CommandParser, build_parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")]
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
INLINE = re.compile(r"`(pdllm [^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Each command line of a page, and whether it stands there to be run as it is, not for several or in a sentence."""
    blocks = [*FENCE.findall(text), *INDENTED.findall(text)]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if line.strip().removeprefix("$ ").startswith("pdllm "):
            shown = line.strip().removeprefix("$ ")
            yield shown, not re.search(r"\w\|\w", shown)
    for line in INLINE.findall(FENCE.sub("", text)):
        yield line.replace("\\|", "|"), False


def words_of(line: str) -> Iterator[list[str]]:
    """The arguments of a line, without comment, brackets and what other programs do; once for each `one|other`."""
    words = shlex.split(re.sub(r"[\[\]]", "", line), comments=True)[1:]
    words = list(itertools.takewhile(lambda word: word not in ("|", ">", "&&", ";"), words))
    if words[-1:] == ["..."]:
        words.pop()
    return map(list, itertools.product(*(word.split("|") for word in words)))


def relaxed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that wants nothing of what must be given: for command lines that are mentioned in a sentence."""
    for group in parser._mutually_exclusive_groups:
        group.required = False
    for action in parser._actions:
        action.required = False
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                relaxed(sub)
    return parser


@every_page
def test_command_lines_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(f"{parser.prog}: {message}")

    monkeypatch.setattr(CommandParser, "error", refuse)
    parsers = {True: build_parser(), False: relaxed(build_parser())}
    for line, whole in commands(page.read_text()):
        for words in words_of(line):
            try:
                parsers[whole].parse_args(words)
            except SystemExit:  # --version and --help; what is wrong raises ValueError here
                continue
            except ValueError as error:
                pytest.fail(f"{line}\n{error}")


def test_command_lines_are_found_and_wrong_ones_refused() -> None:
    assert len(list(commands((DOCS / "commands.md").read_text()))) > 15
    text = "`pdllm a\\|b --x`\n\n    pdllm c [--z]   # why\n\n```\n$ pdllm d \\\n  --y 1 | head\n```\n"
    found = [(words, whole) for line, whole in commands(text) for words in words_of(line)]
    assert found == [(["d", "--y", "1"], True), (["c", "--z"], True), (["a", "--x"], False), (["b", "--x"], False)]
    for wrong in (["serve", "--nothing"], ["store", "nothing"]):
        with pytest.raises(SystemExit):
            relaxed(build_parser()).parse_args(wrong)


@every_page
def test_links_lead_to_files(page: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(FENCE.sub("", page.read_text()))]
    paths = [target for target in targets if target and not re.match(r"\w+:", target)]
    assert not [target for target in paths if not (page.parent / target).exists()]


def test_the_index_names_every_page() -> None:
    linked = {(DOCS / target).resolve() for target in LINK.findall((DOCS / "README.md").read_text())}
    pages = {page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"}
    assert not pages - linked


def test_the_modules_of_the_glossary_exist() -> None:
    terms = re.findall(r"^\| ([^|]+) \|.*\| `([\w.]+)` \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 30
    assert [name for name, _ in terms] == sorted((name for name, _ in terms), key=str.lower)
    assert not [module for _, module in terms if importlib.util.find_spec(module) is None]


def test_the_modules_of_how_it_works_exist() -> None:
    rows = re.findall(r"^\| [\w ]+ \| (`.*?) \|", (DOCS / "how-it-works.md").read_text(), re.MULTILINE)
    assert len(rows) == 10
    names = {
        name if name == "pdllm_store" else f"pdllm_rag.{name}" for row in rows for name in re.findall(r"`(.*?)`", row)
    }
    assert not [name for name in names if importlib.util.find_spec(name) is None]
