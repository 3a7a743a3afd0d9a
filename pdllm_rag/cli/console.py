"""The terminal: stdout and stderr, and how foreign text and numbers look there.

- text of documents and models never moves the cursor: control characters are shown, not sent;
- off a terminal there are no colours, and lines are not broken to a width, except where a text is laid out.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PAPER_WIDTH = 80  # of text that is laid out, where there is no terminal
ENDLESS = 100_000
COMPUTED_AGAIN = "computed again when they are needed"  # what happens to evicted chunks
FETCHED_AGAIN = "fetched again when they are needed"  # to those that a cache has evicted
_ESCAPED_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def results() -> Console:
    """stdout."""
    return _console(sys.stdout, stderr=False)


def notes() -> Console:
    """stderr: progress and remarks."""
    return _console(sys.stderr, stderr=True)


def on_terminal(stream: IO[str]) -> bool:
    """Whether a person looks at the stream."""
    return stream.isatty()


def text_width(console: Console) -> int:
    """Columns to lay text out in."""
    return console.width if console.is_terminal else PAPER_WIDTH


def say(kind: str, message: str) -> None:
    """One plain line on stderr, whatever the message holds."""
    line = visible(" ".join(message.split()))
    print(f"pdllm: {kind}: {line}" if line else f"pdllm: {kind}", file=sys.stderr)


def visible(text: str) -> str:
    """Text with its control characters, line ends and tabs apart, written out as escapes."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def visible_name(name: str) -> str:
    """A name in one line: line ends, tabs and what turns the direction of writing are written out as well."""
    return _ESCAPED_IN_NAMES.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), name)


def write_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    escape = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=escape))


def print_indented(console: Console, text: str | Text, *, indent: int, style: str = "") -> None:
    """Print a text as one paragraph, its words wrapped to the width and its lines indented."""
    paragraph = text if isinstance(text, Text) else Text(visible(" ".join(text.split())), style=style)
    for line in paragraph.wrap(console, max(20, text_width(console) - indent)):
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True)


def table(*headers: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table without lines; columns in `right` hold numbers, the others fold on a narrow terminal."""
    empty = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in headers:
        if header in right:
            empty.add_column(header, justify="right", no_wrap=True)
        else:
            empty.add_column(header, overflow="fold")
    return empty


def fact_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    filled = table("name", "value")
    filled.show_header = False
    for name, value in rows:
        filled.add_row(name, visible_name(value))
    return filled


def print_table(console: Console, filled: Table) -> None:
    """Print a table without the blanks that pad its last column."""
    with console.capture() as capture:
        console.print(filled)
    for line in capture.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def progress_bar(*, live: bool) -> Progress:
    """A bar on stderr: a task's description, count and time left, gone when it ends; nothing unless `live`."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=notes(),
        expand=True,
        transient=True,
        disable=not live,
    )


@contextmanager
def progress(args: argparse.Namespace, doing: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar where a person looks on and did not ask for `--json`; what it gives is called after each of `total`."""
    with progress_bar(live=on_terminal(sys.stderr) and not args.json) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


def report(args: argparse.Namespace, figures: dict[str, Any], tables: Iterable[Table], closing: str = "") -> int:
    """Print figures as JSON if `--json` was given, else tables of them and a closing line; the exit status."""
    if args.json:
        write_json(figures)
        return 0
    console = results()
    for part in tables:
        print_table(console, part)
        console.print()
    if closing:
        console.print(closing, soft_wrap=True)
    return 0


def byte_size(n_bytes: int) -> str:
    """Bytes for people: 812 bytes, 1.2 MB (decimal units)."""
    if n_bytes < 1000:
        return f"{n_bytes} bytes"
    size, units = n_bytes / 1000, ["TB", "GB", "MB", "kB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:,.1f} {units[-1]}"


def kib(n_bytes: int) -> str:
    """Bytes of one token for people: 22.5 KiB."""
    return f"{n_bytes / 1024:.1f} KiB"


def counted(n: int, noun: str) -> str:
    """A number and its noun: 1 document, 1,200 documents."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


class StreamedText:
    """Writes a text to stdout as it comes; on a terminal whole words, lines broken between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._held = ""
        self._begun = False

    def write(self, text: str) -> None:
        """Take in more text; on a terminal its last word waits until it is known to be whole."""
        if not self._console.is_terminal:
            self._out(text)
            return
        self._held += text
        while found := re.match(r"(\s*)(\S+)(?=\s)", self._held):
            self._word(found[1], found[2])
            self._held = self._held[found.end() :]

    def end(self) -> None:
        """Write what was held back, and end the line if there is one."""
        if found := re.match(r"(\s*)(\S+)", self._held):
            self._word(found[1], found[2])
        if self._begun:
            self._out("\n")

    def _word(self, gap: str, word: str) -> None:
        if "\n" in gap:
            self._column = 0
        elif self._column + cell_len(gap + word) > self._console.width:
            gap, self._column = "\n", 0
        self._out(gap + word)
        self._column += cell_len(gap.rpartition("\n")[2] + word)

    def _out(self, text: str) -> None:
        self._begun = True
        self._console.print(Text(visible(text)), end="", soft_wrap=True)


@contextmanager
def log_to_stderr(*, verbose: bool) -> Iterator[None]:
    """While the block runs, show warnings of any library, with `verbose` our own remarks too, as lines."""
    handler = _LineHandler(logging.INFO if verbose else logging.WARNING)
    root = logging.getLogger()
    ours = [logging.getLogger(name) for name in ("pdllm_rag", "pdllm_store")]
    before = [logger.level for logger in ours]
    root.addHandler(handler)
    for logger in ours:
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, level in zip(ours, before, strict=True):
            logger.setLevel(level)


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.levelname.lower(), record.getMessage())


def _console(stream: IO[str], *, stderr: bool) -> Console:
    terminal = on_terminal(stream)
    return Console(
        stderr=stderr,
        force_terminal=terminal,  # nothing else decides, whatever FORCE_COLOR says
        width=None if terminal else ENDLESS,
        highlight=False,
        markup=False,
        emoji=False,
    )
