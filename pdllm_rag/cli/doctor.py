"""`pdllm doctor`: whether everything is in order here, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pdllm_rag.cli.console import print_table, results, table, visible_name, write_json
from pdllm_rag.cli.opening import adapters, add_model, add_store, is_store_given, open_store

if TYPE_CHECKING:
    from pdllm_store.table_store import TableStore

    from pdllm_rag.models.loader import LoadedModel

OK, WARNING, WRONG = "ok", "warning", "wrong"


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # OK, WARNING or WRONG
    about: str
    found: str
    advice: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this installation, a model and a store",
        description="Tell versions, device, attention backends, threads and configuration; look whether a store is "
        "sound; compute stored KV of a document again, and answer from both. Nothing is changed. Exit status 1 if "
        "anything is wrong.",
        epilog="With --json, one object: ok; findings, a list of objects with level (ok, warning or wrong), about, "
        "found and advice.",
    )
    add_store(parser, help="folder or URL of a store to look into; it is only read", required=False)
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything, and report."""
    given = is_store_given(args)
    args.read_only = True
    findings = list(_findings(args, store_given=given))
    ok = all(finding.level != WRONG for finding in findings)
    if args.json:
        write_json({"ok": ok, "findings": [finding._asdict() for finding in findings]})
    else:
        report = table("level", "about", "found")
        report.show_header = False
        for level, about, found, advice in findings:
            report.add_row(level, about, visible_name(found + (f"; {advice}" if advice else "")))
        print_table(results(), report)
    return 0 if ok else 1


def _findings(args: argparse.Namespace, *, store_given: bool) -> Iterator[Finding]:
    from pdllm_rag.cli import doctor_machine

    yield from _guarded("versions", doctor_machine.versions)
    yield from _guarded("device", lambda: doctor_machine.device(args.device))
    yield from _guarded("configuration", lambda: doctor_machine.configured(args.configuration))
    yield from _guarded("disk", lambda: doctor_machine.disk(args.store))
    models: list[LoadedModel] = []
    yield from _guarded("model", lambda: _load(args, models))
    if store_given:
        yield from _guarded("store", lambda: _with_store(args, *models))
    elif models:
        yield from _guarded("reuse", lambda: _reuse(models[0]))


def _guarded(about: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a look finds; an error that a user can do something about is a finding, too."""
    try:
        yield from look()
    except (ImportError, ValueError, OSError) as error:
        yield Finding(WRONG, about, str(error))
    except Exception as error:
        from pdllm_store.errors import PdllmError

        if not isinstance(error, PdllmError):
            raise
        yield Finding(WRONG, about, str(error))


def _load(args: argparse.Namespace, models: list[LoadedModel]) -> Iterator[Finding]:
    from pdllm_rag.cli import doctor_machine
    from pdllm_rag.models.loader import load_model

    model = load_model(args.model, device=args.device, **adapters(args))
    models.append(model)
    yield Finding(OK, "model", f"{args.model}, family {model.spec.family.name}")
    yield from doctor_machine.attention(model)


def _with_store(args: argparse.Namespace, model: LoadedModel | None = None) -> Iterator[Finding]:
    from pdllm_rag.cli import doctor_store

    with open_store(args) as store:
        yield from doctor_store.health(store, args.model, model)
        if model is not None:
            yield from _reuse(model, store)


def _reuse(model: LoadedModel, store: TableStore | None = None) -> Iterator[Finding]:
    from pdllm_rag.cli import doctor_store

    return doctor_store.reuse(model, store)
