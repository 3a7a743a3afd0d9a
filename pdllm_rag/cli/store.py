"""`pdllm store`: what is in a store, whether it is sound, and how much it may keep. No model is loaded unless asked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli import store_backup, store_merge, store_upkeep, store_verify
from pdllm_rag.cli.console import (
    COMPUTED_AGAIN,
    FETCHED_AGAIN,
    byte_size,
    fact_table,
    print_table,
    results,
    table,
    visible_name,
    write_json,
)
from pdllm_rag.cli.opening import open_store
from pdllm_rag.cli.store_action import add_action, documents

if TYPE_CHECKING:
    from pdllm_store import DocumentInfo, ModelFingerprint, StoreStats
    from pdllm_store.table_store import TableStore

DIGEST_CHARS = 12  # of a fingerprint that is shown


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "store",
        help="look into a store, check it, limit it, delete documents",
        description="Look into a store, check it, limit it and take documents out of it. No model is loaded, unless "
        "`verify --recompute` or `merge` asks for one.",
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    add_action(
        actions,
        "stats",
        _stats,
        help="count documents, chunks, tokens and bytes",
        keys="path, kv_dtype; documents, chunks, orphans (chunks that no document refers to), evicted (chunks), tokens "
        "and kv_bytes, of all models and by model in fingerprints; used_bytes, free_bytes, file_bytes, max_bytes (null "
        "without a cap), evictions, generation; hits, misses, damaged, recomputed and fetched, of this command alone",
        may_read_only=True,
    )
    add_action(
        actions,
        "list",
        _list,
        help="list the documents of every model",
        keys="documents, a list of objects with doc_id, source, chunks, chunk_ids, evicted (chunks), tokens, bytes (of "
        "KV), pinned and model",
        may_read_only=True,
    )
    store_verify.add_actions(actions)
    store_upkeep.add_actions(actions)
    store_merge.add_actions(actions)
    store_backup.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Do the action on the store."""
    if complaint := args.check(args):
        args.usage_error(complaint)
    with open_store(args) as store:
        status: int = args.act(store, args)
        return status


def _stats(store: TableStore, args: argparse.Namespace) -> int:
    stats = store.stats()
    if args.json:
        models = {digest: model._asdict() for digest, model in stats.fingerprints.items()}
        write_json({**stats._asdict(), "fingerprints": models})
        return 0
    console = results()
    print_table(console, fact_table(_facts(stats)))
    if not stats.fingerprints:
        return 0
    families = {fingerprint.digest.hex(): fingerprint.family for fingerprint in store.fingerprints()}
    headers = ("model", "family", "documents", "chunks", "evicted", "tokens", "KV")
    by_model = table(*headers, right=headers[2:])
    for digest, model in stats.fingerprints.items():
        counts = (model.documents, model.chunks, model.evicted, model.tokens)
        by_model.add_row(
            digest[:DIGEST_CHARS],
            visible_name(families.get(digest, "unknown")),
            *(f"{count:,}" for count in counts),
            byte_size(model.kv_bytes),
        )
    console.print()
    print_table(console, by_model)
    return 0


def _facts(stats: StoreStats) -> list[tuple[str, str]]:
    from pdllm_store import is_url

    orphans = f", {stats.orphans:,} of which no document refers to" if stats.orphans else ""
    again = FETCHED_AGAIN if is_url(stats.path) else COMPUTED_AGAIN
    evicted = f", {again}" if stats.evicted else ""
    over = stats.max_bytes is not None and stats.file_bytes > stats.max_bytes
    return [
        ("store", stats.path),
        ("stored as", stats.kv_dtype),
        ("documents", f"{stats.documents:,}"),
        ("chunks", f"{stats.chunks:,}{orphans}"),
        ("evicted", f"{stats.evicted:,}{evicted}"),
        ("evictions", f"{stats.evictions:,}"),
        ("tokens", f"{stats.tokens:,}"),
        ("KV", byte_size(stats.kv_bytes)),
        ("used", byte_size(stats.used_bytes)),
        ("free", byte_size(stats.free_bytes)),
        ("on disk", byte_size(stats.file_bytes) + (", more than the cap" if over else "")),
        ("cap", "none" if stats.max_bytes is None else byte_size(stats.max_bytes)),
    ]


def _list(store: TableStore, args: argparse.Namespace) -> int:
    found = documents(store)
    gone = set(store.evicted([chunk_id for _, info in found for chunk_id in info.chunk_ids]))
    if args.json:
        write_json({"documents": [_as_dict(model, info, gone) for model, info in found]})
        return 0
    if not found:
        results().print(f"{visible_name(store.path)} holds no documents")
        return 0
    listing = table("document", "chunks", "tokens", "KV", "model", right=("chunks", "tokens", "KV"))
    for model, info in found:
        listing.add_row(
            visible_name(info.doc_id) + _marks(info, gone),
            f"{len(info.chunk_ids):,}",
            f"{info.n_tokens:,}",
            byte_size(info.n_bytes),
            model.digest.hex()[:DIGEST_CHARS],
        )
    print_table(results(), listing)
    return 0


def _marks(info: DocumentInfo, gone: set[bytes]) -> str:
    """What is special about a document, in brackets."""
    marks = ["pinned"] if info.pinned else []
    if n_evicted := _n_evicted(info, gone):
        marks.append(f"{n_evicted:,} evicted")
    return f" ({', '.join(marks)})" if marks else ""


def _n_evicted(info: DocumentInfo, gone: set[bytes]) -> int:
    return sum(chunk_id in gone for chunk_id in info.chunk_ids)


def _as_dict(model: ModelFingerprint, info: DocumentInfo, gone: set[bytes]) -> dict[str, Any]:
    return {
        "doc_id": info.doc_id,
        "source": info.source,
        "chunks": len(info.chunk_ids),
        "chunk_ids": [chunk_id.hex() for chunk_id in info.chunk_ids],
        "evicted": _n_evicted(info, gone),
        "tokens": info.n_tokens,
        "bytes": info.n_bytes,
        "pinned": info.pinned,
        "model": model.digest.hex()[:DIGEST_CHARS],
    }
