"""The `pdllm` command: its commands, its exit status and its errors.

- exit status 0: done; 1: an error, told in one line on stderr; 2: wrong usage; 3: done, but for documents that failed
  (prefill); 130: interrupted;
- results go to stdout, everything else (progress, warnings, errors) to stderr;
- a command module has `add_parser(commands)`, which sets `run`; it imports the engine only when it runs, so
  that help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from pdllm_rag.cli import ask, bench, completion, doctor, eval, models, plan, prefill, serve, store, train
from pdllm_rag.cli.configuration import parse_args
from pdllm_rag.cli.console import log_to_stderr, say

MODULES = (prefill, ask, serve, store, models, plan, eval, bench, train, doctor, completion)

# How long an OpenMP thread spins before it sleeps. With the default, one other busy process on a two-core machine slows
# matrix products fifteenfold, because threads that wait hold the cores that the others need (docs/log.md).
SPIN_COUNT = "10000"


class CommandParser(argparse.ArgumentParser):
    """A parser that every command and subcommand is made of: no abbreviated options, and `--verbose`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        help = "log what happens; tracebacks of errors"
        self.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=help)


class _Version(argparse.Action):
    """Prints the version; it is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("pdllm-rag")
        except PackageNotFoundError:
            number = "(not installed, run from its source)"
        print(f"pdllm {number}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = CommandParser(
        prog="pdllm",
        description="Ask your documents questions with a masked-diffusion language model. Each document is "
        "encoded once; its keys and values are kept in a store on disk.",
        epilog="Start with: pdllm prefill DOCS --store kb; pdllm ask 'a question' --store kb",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for module in MODULES:
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns its exit status.

    Raises:
        SystemExit: after help, version (0) and wrong usage (2).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is first imported
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    args = parse_args(build_parser(), sys.argv[1:] if argv is None else argv)
    verbose = getattr(args, "verbose", False)
    try:
        with log_to_stderr(verbose=verbose):
            status: int = args.run(args)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        say("interrupted", getattr(args, "after_interrupt", ""))
        return 130
    except BrokenPipeError:
        # The reader has gone; without this the interpreter would complain when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not _is_expected(error):
            raise
        if verbose:
            traceback.print_exc()
        say("error", _message(error))
        return 1


def _is_expected(error: Exception) -> bool:
    if isinstance(error, (ValueError, OSError)) or _is_lack_of_memory(error):
        return True
    from pdllm_store.errors import PdllmError

    return isinstance(error, PdllmError)


def _is_lack_of_memory(error: Exception) -> bool:
    """torch says so in a RuntimeError, on a CPU by its text alone."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    )


def _message(error: Exception) -> str:
    if _is_lack_of_memory(error):
        first = str(error).partition("\n")[0]
        return f"there is not enough memory ({first[:160] or 'MemoryError'}); take smaller sizes"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__
