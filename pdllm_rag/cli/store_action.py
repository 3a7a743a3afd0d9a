"""An action of `pdllm store`: its parser, and the documents that it is about."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdllm_rag.cli.opening import add_store

if TYPE_CHECKING:
    from pdllm_store import DocumentInfo, ModelFingerprint
    from pdllm_store.table_store import TableStore

    Act = Callable[[TableStore, argparse.Namespace], int]
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add_action(
    actions: Actions,
    name: str,
    act: Act,
    *,
    help: str,
    keys: str,
    about: str = "",
    check: Callable[[argparse.Namespace], str] = lambda _: "",
    may_read_only: bool = False,
) -> argparse.ArgumentParser:
    """Add an action with what all of them take.

    Args:
        act: does it on the open store; returns the exit status.
        help: one line of the list of actions.
        keys: of the JSON object that it prints.
        about: what its own help says behind `help`.
        check: says what is wrong with the arguments, "" if nothing is.
    """
    description = "".join(f"{part[0].upper()}{part[1:]}. " for part in (help, about) if part)
    parser = actions.add_parser(name, help=help, description=description, epilog=f"With --json, one object: {keys}.")
    add_store(parser, may_read_only=may_read_only)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(act=act, check=check, usage_error=parser.error)
    return parser


def documents(store: TableStore) -> list[tuple[ModelFingerprint, DocumentInfo]]:
    """Documents of every model, by doc_id."""
    found = [(f, info) for f in store.fingerprints() for info in store.documents(f)]
    return sorted(found, key=lambda pair: (pair[1].doc_id, pair[0].digest))


def holders(store: TableStore, doc_ids: Iterable[str]) -> list[tuple[ModelFingerprint, str]]:
    """The documents of these ids under every model that holds them, damaged ones among them.

    Raises:
        DocumentNotFoundError: no model holds one of them.
    """
    from pdllm_store import DocumentNotFoundError

    models = store.fingerprints()
    found = []
    for doc_id in dict.fromkeys(doc_ids):
        held = [(model, doc_id) for model in models if _holds(store, model, doc_id)]
        if not held:
            raise DocumentNotFoundError(
                f"{store.path} holds no document {doc_id!r}; nothing was changed. `pdllm store list` names those it "
                "holds"
            )
        found += held
    return found


def _holds(store: TableStore, model: ModelFingerprint, doc_id: str) -> bool:
    from pdllm_store import DocumentNotFoundError, RecordDamagedError

    try:
        store.document(model, doc_id)
    except DocumentNotFoundError:
        return False
    except RecordDamagedError:
        return True
    return True
