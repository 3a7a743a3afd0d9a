"""Options that were not typed: environment variables and a configuration file give them (docs/configuration.md).

- the command line goes before the environment, the environment before the file, the file before the defaults;
- within one of them, what is meant for one command goes before what is meant for several;
- an option's own type and choices read its value, wherever it comes from.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from pdllm_rag.cli.values import KeyValues

FILE_NAME = "pdllm.toml"
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
DIRECTORIES, FILES = "DIR", ("FILE", "PATH")  # how arguments name values that are paths
_REPEATED = (argparse._AppendAction, KeyValues)
Command = tuple[str, ...]  # the words of a command, such as ("eval", "qa"); () is every command


class Entry(NamedTuple):
    """A value that was found, and where."""

    command: Command
    option: str  # with _ for -
    value: Any  # as in TOML; of a variable its text
    origin: str
    rank: tuple[int, int]  # what has the lower one counts
    folder: str | None  # that its paths start from


class Found(NamedTuple):
    """The value of an option of one command."""

    value: Any
    entry: Entry


class Configuration(NamedTuple):
    """All that was found, for whatever command; what counts first stands first."""

    file: str | None
    entries: list[Entry]
    strangers: list[tuple[str, str]]  # PDLLM_ variables that are no option's, and the nearest that is, or ""


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line, of the environment and of the file.

    The namespace has besides: `configuration`, and `configured`, by option with _ what gave its value unless it was
    typed or is the default.

    Raises:
        SystemExit: as argparse does, and for a value or file that is wrong.
    """
    command, leaf = _chosen(parser, argv)
    if leaf is None:
        return parser.parse_args(argv)
    options, own = _options(leaf), leaf.get_default("own_options") or ()
    try:
        configuration = find(parser)
        found = {
            option: Found(_read(leaf, options[option], entry), entry)
            for entry in reversed(configuration.entries)
            if (option := entry.option) in options
            and entry.command == (command if option in own else command[: len(entry.command)])
        }
        defaults = {option: action.default for option, action in options.items()}
        for option, action in options.items():
            action.default = argparse.SUPPRESS
            action.required = action.required and option not in found
        args = parser.parse_args(argv)
        typed = {option for option, action in options.items() if hasattr(args, action.dest)}
        found = _without_rivals(leaf, typed, found)
    except (ValueError, OSError) as error:
        leaf.error(str(error))
    for option in options.keys() - typed:
        default = defaults[option]
        if option in found:
            setattr(args, options[option].dest, found[option].value)
        elif default is not argparse.SUPPRESS:
            value = leaf._get_value(options[option], default) if isinstance(default, str) else default
            setattr(args, options[option].dest, value)
    args.configuration = configuration
    args.configured = {option: held.entry.origin for option, held in found.items()}
    return args


def find(parser: argparse.ArgumentParser) -> Configuration:
    """What the environment and the file hold.

    Raises:
        ValueError: the file is no TOML, or holds a table or key that is no command or option.
        OSError: it cannot be read.
    """
    known = known_options(parser)
    variables = {
        "_".join(("PDLLM", *command, option)).upper().replace("-", "_"): (command, option)
        for command, options in known.items()
        for option in options
    }
    entries = [
        Entry(command, option, os.environ[name], name, (0, -len(command)), None)
        for name, (command, option) in variables.items()
        if name in os.environ
    ]
    strangers = [name for name in os.environ if name.startswith("PDLLM_") and name not in {*variables, "PDLLM_CONFIG"}]
    if file := _file():
        tables = _table(file)
        if not isinstance(default := tables.pop("default", {}), dict):
            raise ValueError(f"{file}: [default] is no table, expected options that several commands share")
        entries += _entries(default, (), {(): known[()]}, file)
        entries += _entries(tables, (), known | {(): {}}, file)
    nearest = [(name, _nearest(name, variables)) for name in sorted(strangers)]
    return Configuration(file, sorted(entries, key=lambda entry: entry.rank), nearest)


def _file() -> str | None:
    """The file that counts: PDLLM_CONFIG's, that of this folder or the next one up, or the user's own.

    Raises:
        ValueError: one was found on the way up that another user has written.
    """
    if (named := os.environ.get("PDLLM_CONFIG")) is not None:
        return named or None
    folder, last = os.getcwd(), ""
    while folder != last:
        if os.path.isfile(file := os.path.join(folder, FILE_NAME)):
            if hasattr(os, "getuid") and os.stat(file).st_uid not in (0, os.getuid()):
                raise ValueError(
                    f"{file} is another user's; set PDLLM_CONFIG={file} to go by it, or PDLLM_CONFIG= not to"
                )
            return file
        folder, last = os.path.dirname(folder), folder
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    file = os.path.join(home, "pdllm", "config.toml")
    return file if os.path.isfile(file) else None


def _table(file: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):
        try:
            toml = importlib.import_module(name)
            break
        except ImportError:
            continue
    else:
        raise ValueError(f"{file} cannot be read: Python 3.11 or newer is needed for it, or pip install tomli")
    try:
        with open(file, "rb") as opened:
            table: dict[str, Any] = toml.load(opened)
    except ValueError as error:  # TOML's own errors, and text that is no UTF-8
        raise ValueError(f"{file} is no TOML: {error}") from error
    return table


def _entries(
    table: Mapping[str, Any], command: Command, known: Mapping[Command, Mapping[str, Any]], file: str
) -> Iterator[Entry]:
    """The keys of a table and of the tables in it."""
    place = f"{file}: [{'.'.join(command) or 'default'}]" if known[command] else f"{file}:"
    folder = os.path.dirname(os.path.abspath(file))
    seen = set()
    for key, value in table.items():
        option, inner = key.replace("-", "_"), (*command, key.replace("_", "-"))
        if isinstance(value, dict) and inner in known:
            yield from _entries(value, inner, known, file)
        elif option in known[command] and option not in seen:
            seen.add(option)
            yield Entry(command, option, value, f"{place} {key}", (1, -len(command)), folder)
        elif option in seen:
            raise ValueError(f"{place} {key} is given twice, with - and with _")
        else:
            names = {*known[command], *(words[-1] for words in known if words and words[:-1] == command)}
            nearest = _nearest(option, names).replace("_", "-")
            expected = f"; did you mean {nearest}?" if nearest else ", expected [default] or a command's table"
            raise ValueError(f"{place} {key} is no option{' there' if command else ''}{expected}")


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), "")


def _chosen(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Command, argparse.ArgumentParser | None]:
    """The command and its parser; no parser where help is asked for, or no whole command is there."""
    words = argv[: list(argv).index("--")] if "--" in argv else argv
    command: Command = ()
    for word in () if {"-h", "--help"} & set(words) else words:
        if not word.startswith("-") and (inner := inner_parsers(parser)):
            if word not in inner:
                break
            parser, command = inner[word], (*command, word)
    return command, None if not command or inner_parsers(parser) else parser


def inner_parsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of the commands in a command, by name."""
    found = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(found, {})


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        action.option_strings[-1][2:].replace("-", "_"): action
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "version")
    }


def known_options(parser: argparse.ArgumentParser, command: Command = ()) -> dict[Command, dict[str, argparse.Action]]:
    """The options of every command; of one that has commands in it, those of all of them."""
    known = {command: _options(parser)}
    for word, inner in inner_parsers(parser).items():
        below = (*command, word)
        known |= known_options(inner, below)
        known[command] = known[command] | known[below]
    return known


def _read(parser: argparse.ArgumentParser, action: argparse.Action, entry: Entry) -> Any:
    """The value of an option, as if it had been typed.

    Raises:
        ValueError: it is of another kind, or the option refuses it.
    """
    if action.nargs == 0:
        if (given := str(entry.value).lower()) not in _FLAGS:
            raise ValueError(f"{entry.origin}: got {entry.value!r}, expected true or false")
        return _FLAGS[given]
    words = _words(action, entry)
    scratch = argparse.Namespace(**{action.dest: {} if isinstance(action, KeyValues) else []})
    try:
        for typed in [[word] for word in words] if isinstance(action, _REPEATED) else [words]:
            action(parser, scratch, parser._get_values(action, typed))
    except argparse.ArgumentError as error:
        raise ValueError(f"{entry.origin}: {error.message}") from None
    return getattr(scratch, action.dest)


def _words(action: argparse.Action, entry: Entry) -> list[str]:
    """What would be typed for the value."""
    value, many = entry.value, isinstance(action, _REPEATED) or action.nargs is not None
    if entry.folder is None:
        return [part.strip() for part in value.split(",")] if many else [value]
    if isinstance(value, dict) and isinstance(action, KeyValues):
        return [f"{key}={str(held).lower() if isinstance(held, bool) else held}" for key, held in value.items()]
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, (str, int, float)) and not isinstance(part, bool) for part in parts):
        raise ValueError(f"{entry.origin}: got {value!r}, expected text or a number{', or a list of them' * many}")
    words = [str(part) for part in parts]
    if action.metavar in (DIRECTORIES, *FILES):
        words = [_from(entry.folder, word) for word in words]
    return words if many else [",".join(words)]


def _from(folder: str, path: str) -> str:
    return path if "://" in path else os.path.join(folder, os.path.expanduser(path))


def _without_rivals(parser: argparse.ArgumentParser, typed: Set[str], found: Mapping[str, Found]) -> dict[str, Found]:
    """What is left when, of options that exclude each other, only the one that counts first is kept.

    Raises:
        ValueError: two of them count the same.
    """
    left = {option: held for option, held in found.items() if option not in typed}
    for group in parser._mutually_exclusive_groups:
        rivals = [option for option, action in _options(parser).items() if action in group._group_actions]
        asked = [option for option in rivals if option in left and left[option].value is not False]
        first = (-1, 0) if typed & set(rivals) else min((left[option].entry.rank for option in asked), default=(0, 0))
        best = [option for option in asked if left[option].entry.rank == first]
        if len(best) > 1:
            raise ValueError(f"{left[best[0]].entry.origin}: not allowed with {left[best[1]].entry.origin}")
        left = {option: held for option, held in left.items() if option not in asked or option in best}
    return left
