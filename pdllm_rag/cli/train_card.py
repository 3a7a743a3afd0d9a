"""`pdllm train card`, and what the other kinds of `pdllm train` tell a model card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import results, write_json

if TYPE_CHECKING:
    from pdllm_rag.training.card import Origin

_NAMES = ("model", "data", "exclude", "out", "plot", "sources")  # options whose values are files, folders or models
_NO_OPTIONS = ("command", "kind", "run", "json", "verbose", "configuration", "configured")


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    about = "put scores into the model card of what was trained"
    card = kinds.add_parser("card", help=about, description=f"{about.capitalize()}, in place of those that it has.")
    card.add_argument("folder", metavar="FOLDER", help="of the model or adapter: DIR/result, or that of train round")
    card.add_argument("--scores", required=True, nargs="+", metavar="FILE.json",
                      help="of pdllm eval qa --json, or of pdllm bench decoders --questions FILE --json")  # fmt: skip
    card.add_argument("--json", action="store_true", help="print one JSON object")
    card.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdllm_rag.training.scores import write_scores

    write_scores(Path(args.folder), list(map(Path, args.scores)))
    card = str(Path(args.folder) / "README.md")
    if args.json:
        write_json({"card": card})
    else:
        results().print(f"scores are in {card}", soft_wrap=True)
    return 0


def origin(args: argparse.Namespace) -> Origin:
    """What a card says of where a result comes from.

    Raises:
        OSError, ValueError, ModelError, UnreadableDocumentError: a file of sources or data, or a base or its card, is
            missing or damaged.
    """
    from pdllm_rag.training.card import Base, Origin, read_data, read_sources

    sources = read_sources(Path(args.sources)) if args.sources else ()
    models = args.model if isinstance(args.model, list) else [args.model]
    return Origin(args.kind, _command(args), tuple(map(Base.of, models)), read_data(args.data), sources)


def recipe(run_folder: Path, **counts: int) -> dict[str, Any]:
    """The settings of a finished run, from what it keeps to be gone on with, and counts beside them."""
    identity = json.loads((run_folder / "state.json").read_text())["identity"]
    found: dict[str, Any] = {}
    for name, value in {**identity["plan"], **identity["about"]}.items():
        found |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    del found["model"]
    row_len = found["shape context_len"] + found["shape canvas_len"]
    return {**found, "positions": found["steps"] * found["rows"] * row_len, **counts}


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """The command line with every option, also those that were not typed, and without folders."""
    from pdllm_rag.training.card import nameable

    words = ["pdllm", "train", args.kind]
    for name, value in sorted(vars(args).items()):
        if name in _NO_OPTIONS or value is None or value == []:
            continue
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        if name in _NAMES:
            words += [option, *(nameable(one) if name == "model" else Path(one).name for one in values)]
        else:
            words += [option, ",".join(map(str, values))]
    return tuple(words)
