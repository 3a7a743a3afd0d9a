"""`pdllm completion`: what a shell needs to complete commands, options, choices and paths."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pdllm_rag.cli.configuration import DIRECTORIES, FILES, inner_parsers

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options",
        description="Print a script for a shell that completes commands, options, choices and paths.",
        epilog='bash: eval "$(pdllm completion bash)" in ~/.bashrc; zsh: pdllm completion zsh > a file _pdllm in a '
        "folder of $fpath; fish: pdllm completion fish > ~/.config/fish/completions/pdllm.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=" or ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from pdllm_rag.cli.main import build_parser

    parser = build_parser()
    _mark_paths(parser, {DIRECTORIES: shtab.DIRECTORY} | dict.fromkeys(FILES, shtab.FILE))
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _mark_paths(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Set what shtab goes by: `complete` of every argument whose value is a path."""
    for action in parser._actions:
        if isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
    for inner in inner_parsers(parser).values():
        _mark_paths(inner, kinds)
