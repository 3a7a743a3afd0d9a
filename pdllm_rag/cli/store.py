"""`pdllm store`: what is in a store, whether it is sound, and taking things out of it. No model is loaded."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import (
    byte_size,
    counted,
    fact_table,
    on_terminal,
    print_table,
    results,
    say,
    table,
    visible,
    write_json,
)

if TYPE_CHECKING:
    from pdllm_store import DocumentInfo, LMDBStore, ModelFingerprint

DIGEST_CHARS = 12  # of a fingerprint that is shown


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "store",
        help="look into a store, check it, delete documents",
        description="Look into a store, check it and take documents out of it. No model is loaded.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    stats = actions.add_parser("stats", help="count documents, chunks, tokens and bytes")
    listing = actions.add_parser("list", help="list the documents of every model")
    check = actions.add_parser(
        "verify",
        help="check every record, row and reference; exit status 1 if anything is wrong",
        description="Check every record, row and reference. With --repair, damaged chunks are dropped, so that they "
        "are computed again by the next question or prefill that needs them.",
    )
    deletion = actions.add_parser("delete", help="delete documents with their chunks and KV")
    compaction = actions.add_parser(
        "compact",
        help="drop chunks that no document refers to and give free pages back to the disk",
        description="Drop what an interrupted prefill left behind and rewrite the file without free pages. Nobody else "
        "may have the store open.",
    )
    actions_and_calls = (
        (stats, _stats),
        (listing, _list),
        (check, _verify),
        (deletion, _delete),
        (compaction, _compact),
    )
    for action, call in actions_and_calls:
        action.add_argument("--store", required=True, metavar="DIR", help="folder of the store")
        action.add_argument("--json", action="store_true", help="print one JSON object")
        action.set_defaults(run=run, act=call)
    check.add_argument("--repair", action="store_true", help="drop damaged chunks")
    deletion.add_argument("doc_ids", nargs="*", metavar="DOC_ID", help="document, under every model")
    deletion.add_argument("--all", action="store_true", help="delete every document")
    deletion.add_argument("--yes", action="store_true", help="do not ask before --all")
    deletion.set_defaults(usage_error=deletion.error)


def run(args: argparse.Namespace) -> int:
    """Do the action on the store."""
    if args.act is _delete and args.all == bool(args.doc_ids):
        args.usage_error("expected either one or more DOC_ID or --all")
    from pdllm_store import LMDBStore

    store = LMDBStore.open(args.store, create=False)
    try:
        status: int = args.act(store, args)
        return status
    finally:
        store.close()


def _stats(store: LMDBStore, args: argparse.Namespace) -> int:
    stats = store.stats()
    if args.json:
        models = {digest: model._asdict() for digest, model in stats.fingerprints.items()}
        write_json({**stats._asdict(), "fingerprints": models})
        return 0
    families = {fingerprint.digest.hex(): fingerprint.family for fingerprint in store.fingerprints()}
    orphans = f" and {stats.orphans:,} that no document refers to" if stats.orphans else ""
    rows = [
        ("store", stats.path),
        ("stored as", stats.kv_dtype),
        ("documents", f"{stats.documents:,}"),
        ("chunks", f"{stats.chunks:,}{orphans}"),
        ("tokens", f"{stats.tokens:,}"),
        ("KV", byte_size(stats.kv_bytes)),
        ("on disk", byte_size(stats.file_bytes)),
    ]
    for digest, model in sorted(stats.fingerprints.items()):
        name = f"{digest[:DIGEST_CHARS]} ({families.get(digest, 'unknown family')})"
        rows.append(("model", f"{name}, {counted(model.documents, 'document')}"))
    print_table(results(), fact_table(rows))
    return 0


def _list(store: LMDBStore, args: argparse.Namespace) -> int:
    found = _documents(store)
    if args.json:
        write_json({"documents": [_as_dict(fingerprint, info) for fingerprint, info in found]})
        return 0
    if not found:
        results().print(f"{visible(store.path)} holds no documents")
        return 0
    listing = table("document", "chunks", "tokens", "KV", "model", right=("chunks", "tokens", "KV"))
    for fingerprint, info in found:
        listing.add_row(
            visible(info.doc_id) + (" (pinned)" if info.pinned else ""),
            f"{len(info.chunk_ids):,}",
            f"{info.n_tokens:,}",
            byte_size(info.n_bytes),
            fingerprint.digest.hex()[:DIGEST_CHARS],
        )
    print_table(results(), listing)
    return 0


def _delete(store: LMDBStore, args: argparse.Namespace) -> int:
    from pdllm_store import DocumentNotFoundError

    found = _documents(store)
    held = {info.doc_id for _, info in found}
    unknown = [doc_id for doc_id in args.doc_ids if doc_id not in held]
    if unknown:
        raise DocumentNotFoundError(
            f"{store.path} holds no document {unknown[0]!r}; nothing was deleted. "
            f"`pdllm store list --store {args.store}` names those it holds"
        )
    if args.all and not args.yes and not _confirmed(len(held), store.path):
        say("nothing deleted", "")
        return 1
    wanted = held if args.all else set(args.doc_ids)
    gone = [
        info.doc_id
        for fingerprint, info in found
        if info.doc_id in wanted and store.delete_document(fingerprint, info.doc_id)
    ]
    deleted = list(dict.fromkeys(gone))
    if args.json:
        write_json({"deleted": deleted})
    else:
        results().print(f"{counted(len(deleted), 'document')} deleted; the freed space is used by later ones")
    return 0


def _confirmed(n_documents: int, path: str) -> bool:
    """Ask a person; a script has said --all and is believed."""
    if not on_terminal(sys.stdin):
        return True
    question = f"Delete {counted(n_documents, 'document')} from {visible(path)}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _documents(store: LMDBStore) -> list[tuple[ModelFingerprint, DocumentInfo]]:
    """Documents of every model, by doc_id."""
    found = [(f, info) for f in store.fingerprints() for info in store.documents(f)]
    return sorted(found, key=lambda pair: (pair[1].doc_id, pair[0].digest))


def _as_dict(fingerprint: ModelFingerprint, info: DocumentInfo) -> dict[str, Any]:
    return {
        "doc_id": info.doc_id,
        "source": info.source,
        "chunks": len(info.chunk_ids),
        "chunk_ids": [chunk_id.hex() for chunk_id in info.chunk_ids],
        "tokens": info.n_tokens,
        "bytes": info.n_bytes,
        "pinned": info.pinned,
        "model": fingerprint.digest.hex()[:DIGEST_CHARS],
    }


def _verify(store: LMDBStore, args: argparse.Namespace) -> int:
    report = store.verify()
    if args.repair:
        store.discard(report.damaged)
    sound = report.ok
    if args.json:
        write_json(
            {
                "ok": sound,
                "chunks": report.checked_chunks,
                "documents": report.checked_documents,
                "damaged": [chunk_id.hex() for chunk_id in report.damaged],
                "missing": [chunk_id.hex() for chunk_id in report.missing],
                "problems": report.problems,
                "repaired": len(report.damaged) if args.repair else 0,
            }
        )
        return 0 if sound else 1
    console = results()
    checked = f"{counted(report.checked_chunks, 'chunk')} and {counted(report.checked_documents, 'document')} checked"
    if sound:
        console.print(f"{checked}: all sound")
        return 0
    console.print(f"{checked}: {len(report.damaged)} chunks damaged, {len(report.missing)} without KV")
    for problem in report.problems:
        console.print(visible(problem), markup=False)
    if report.damaged:
        then = "were dropped; the next question or prefill that needs them computes them again"
        console.print(f"The damaged chunks {then if args.repair else 'stay; --repair drops them'}.")
    return 1


def _compact(store: LMDBStore, args: argparse.Namespace) -> int:
    n_orphans = store.stats().orphans
    given_back = store.compact()
    if args.json:
        write_json({"orphans": n_orphans, "bytes": given_back})
    else:
        results().print(f"{counted(n_orphans, 'orphan chunk')} dropped, {byte_size(given_back)} given back")
    return 0
