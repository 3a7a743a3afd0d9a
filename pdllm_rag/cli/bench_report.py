"""How benchmarks report: one JSON object, or tables and the machine; and pictures where they are asked for."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli import console

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from rich.table import Table

DTYPES = ("bfloat16", "float16", "float32")


def add_output(parser: argparse.ArgumentParser, *, plots: str | None = None) -> None:
    """Add `--json`, and `--plot` where there is something to draw."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if plots is not None:
        parser.add_argument("--plot", metavar="FILE.png", help=f"draw {plots} (needs matplotlib)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu or cuda (default: cuda where torch sees a GPU, else cpu)",
    )


def chosen_device(name: str | None) -> torch.device:
    """The device of a command line.

    Raises:
        ValueError: it is none, or torch does not see it.
    """
    from pdllm_rag.models.loader import check_seen, one_device

    return check_seen(one_device(name or "auto", None))


def waiting(args: argparse.Namespace) -> AbstractContextManager[object]:
    """A sign on a terminal's stderr that something is measured."""
    notes = console.notes()
    return notes.status("Measuring") if console.on_terminal(sys.stderr) and not args.json else notes


def report(args: argparse.Namespace, figures: dict[str, Any], tables: list[Table], subject: str) -> int:
    """As `console.report`; below the tables stands what was measured on which machine."""
    machine = figures["machine"]
    units = ", AVX512-BF16" * machine["avx512_bf16"] + ", AMX" * machine["amx"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    versions += "".join(f", {name} {machine[name]}" for name in ("triton", "cuda") if machine.get(name))
    place = f"{machine['cpu']}, {machine['cores']} cores{units}; {versions}"
    return console.report(args, figures, tables, f"{subject}; {place}; {figures['repeat']} repetitions in turns")


def model_subject(figures: dict[str, Any]) -> str:
    """The model of figures, its compute dtype and where it ran."""
    machine = figures["machine"]
    return f"{figures['model']} in {machine['dtype']} on {machine['device']}, {machine['threads']} threads"


def check_files(args: argparse.Namespace) -> None:
    """Refuse `--plot` and `--out` that could not be written, before anything is measured.

    Raises:
        ValueError: a folder is not there or not writable, or a file is one itself; or as `plots.check_plot`.
    """
    from pdllm_rag.bench.plots import check_plot

    check_plot(args.plot)
    path: str | None = args.out
    if path is None:
        return
    file = Path(path)
    if not path or file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"{path!r} cannot be written; expected a file in a folder that is there and writable")


def save(path: str | None, figures: dict[str, Any]) -> None:
    """Write figures to a file, if there is to be one; a run that is cut short leaves what it had."""
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def quartiles(spread: dict[str, float], digits: int) -> str:
    """The quartiles of a spread, for a table."""
    return f"{spread['q1']:.{digits}f} to {spread['q3']:.{digits}f}"
