"""What `pdllm store` changes: what it keeps and how much, and what is taken out of it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import (
    COMPUTED_AGAIN,
    byte_size,
    counted,
    on_terminal,
    results,
    say,
    visible_name,
    write_json,
)
from pdllm_rag.cli.store_action import add_action, documents, holders
from pdllm_rag.cli.values import duration, size, size_or_none

if TYPE_CHECKING:
    from pdllm_store import LMDBStore
    from pdllm_store.table_store import TableStore

    from pdllm_rag.cli.store_action import Actions

SIZES = "KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024"
UNCHANGED = 0  # a cap that was not given


def add_actions(actions: Actions) -> None:
    """Add every action that changes a store."""
    _add_keeping(actions)
    _add_taking_out(actions)


def _add_keeping(actions: Actions) -> None:
    pin = add_action(
        actions,
        "pin",
        partial(_set_pinned, pinned=True),
        help="keep the KV of documents from eviction",
        about="What was evicted before is kept from the next question on that needs it",
        keys="pinned and unchanged, lists of document ids",
    )
    unpin = add_action(
        actions,
        "unpin",
        partial(_set_pinned, pinned=False),
        help="let the KV of documents be evicted again",
        keys="unpinned and unchanged, lists of document ids",
    )
    for parser in (pin, unpin):
        parser.add_argument("doc_ids", nargs="+", metavar="DOC_ID", help="document, under every model")
    limit = add_action(
        actions,
        "limit",
        _limit,
        help="set or print the cap of the store's file",
        about="The store remembers it. When a write would come near it, the KV that was not used for the longest time "
        "is evicted; documents, texts and pinned KV stay. A fifth of the cap is kept free",
        keys="max_bytes (null without a cap), file_bytes, used_bytes",
    )
    limit.add_argument(
        "max_bytes",
        nargs="?",
        type=size_or_none,
        default=UNCHANGED,
        metavar="SIZE|none",
        help=f"at least 1MiB ({SIZES}), or none for no cap; without it, the cap is printed",
    )
    eviction = add_action(
        actions,
        "evict",
        _evict,
        help="drop the KV that was not used for the longest time",
        about="It is computed again when it is needed. Pinned documents keep theirs, and so do chunks that an "
        "unfinished prefill wrote within the last hour. With both limits, both hold. The file keeps its length until "
        "`compact`",
        keys="evicted, in chunks, and bytes (of KV)",
        check=lambda args: (
            "expected --unused-for, --bytes or both" if (args.unused_for, args.bytes) == (None, None) else ""
        ),
    )
    eviction.add_argument(
        "--unused-for",
        type=duration,
        metavar="TIME",
        help="only what was not used for so long: a number and s, m (minutes), h or d, such as 30d; 0s for all",
    )
    eviction.add_argument(
        "--bytes", type=size, metavar="SIZE", help=f"about so much ({SIZES}); at least one of both limits"
    )


def _add_taking_out(actions: Actions) -> None:
    deletion = add_action(
        actions,
        "delete",
        _delete,
        help="delete documents with their chunks and KV",
        about="Their space is used by later ones; what they held stays in the file until it is overwritten, unless "
        "--purge is given",
        keys="deleted, a list of document ids; with --purge also bytes, as given back to the disk",
        check=lambda args: "expected either one or more DOC_ID or --all" if args.all == bool(args.doc_ids) else "",
    )
    deletion.add_argument("doc_ids", nargs="*", metavar="DOC_ID", help="document, under every model")
    deletion.add_argument("--all", action="store_true", help="delete every document")
    deletion.add_argument("--yes", action="store_true", help="do not ask before --all")
    deletion.add_argument(
        "--purge",
        action="store_true",
        help="leave nothing of them in the store's files: the file is written anew without them, and the old one, "
        "like the indexes made from it, is overwritten before it is removed. Nobody else may have the store open, and "
        "the disk needs room for the second file. What the file system, snapshots and backups keep is not reached",
    )
    compaction = add_action(
        actions,
        "compact",
        _compact,
        help="drop chunks that no document refers to and give free pages back to the disk",
        about="An interrupted prefill leaves such chunks behind. The file is written anew: nobody else may have the "
        "store open, and the disk needs room for the second file",
        keys="orphans, in chunks, and bytes, as given back",
    )
    garbage = add_action(
        actions,
        "gc",
        _gc,
        help="delete what a store given by URL does not need any more",
        about="Objects of deleted documents, of interrupted prefills and of states before the present one",
        keys="chunks, others (manifests and segments), in objects, bytes, and dry_run",
    )
    garbage.add_argument(
        "--grace",
        type=duration,
        default=24 * 3600.0,
        metavar="TIME",
        help="leave objects that are younger, which a prefill at work may need (default: 24h); less than 1h only if "
        "nobody writes",
    )
    garbage.add_argument("--dry-run", action="store_true", help="count them only")
    compaction.add_argument(
        "--wipe",
        action="store_true",
        help="overwrite the old file, and the indexes made from it, before they are removed, so that nothing of what "
        "was deleted before is left in the store's files",
    )


def _set_pinned(store: TableStore, args: argparse.Namespace, *, pinned: bool) -> int:
    changed = dict.fromkeys(args.doc_ids, False)
    for model, doc_id in holders(store, args.doc_ids):
        changed[doc_id] |= store.set_pinned(model, doc_id, pinned=pinned)
    done = [doc_id for doc_id, is_new in changed.items() if is_new]
    unchanged = [doc_id for doc_id, is_new in changed.items() if not is_new]
    word = "pinned" if pinned else "unpinned"
    if args.json:
        write_json({word: done, "unchanged": unchanged})
        return 0
    also = f" ({'already' if pinned else 'not'} pinned: {len(unchanged):,})" if unchanged else ""
    results().print(f"{counted(len(done), 'document')} {word}{also}")
    return 0


def _limit(store: TableStore, args: argparse.Namespace) -> int:
    if args.max_bytes != UNCHANGED:
        store.set_max_bytes(args.max_bytes)
    stats = store.stats()
    cap, file_bytes, used_bytes = stats.max_bytes, stats.file_bytes, stats.used_bytes
    if args.json:
        write_json({"max_bytes": cap, "file_bytes": file_bytes, "used_bytes": used_bytes})
        return 0
    console = results()
    limit = "No cap" if cap is None else f"The cap is {byte_size(cap)} ({cap:,} bytes)"
    console.print(f"{limit}; the file takes {byte_size(file_bytes)}, {byte_size(used_bytes)} of which are in use.")
    if cap is not None and file_bytes > cap:
        excess = -(-(used_bytes - cap) // 1_000_000)
        first = f"`pdllm store evict --bytes {excess}MB`, then " if excess > 0 else ""
        console.print(f"That is more than the cap: {first}`pdllm store compact` shrinks it.")
    return 0


def _evict(store: TableStore, args: argparse.Namespace) -> int:
    before = store.stats().kv_bytes
    n_evicted = store.evict(n_bytes=args.bytes, unused_for_s=args.unused_for or 0)
    freed = max(0, before - store.stats().kv_bytes)
    if args.json:
        write_json({"evicted": n_evicted, "bytes": freed})
    elif n_evicted:
        kv = f"{byte_size(freed)} of KV"
        results().print(f"{counted(n_evicted, 'chunk')} evicted, {kv}; {COMPUTED_AGAIN}")
    else:
        results().print("Nothing evicted: what is left is pinned, was used since or belongs to an unfinished prefill")
    return 0


def _delete(store: TableStore, args: argparse.Namespace) -> int:
    wanted = [(model, info.doc_id) for model, info in documents(store)] if args.all else holders(store, args.doc_ids)
    doc_ids = list(dict.fromkeys(doc_id for _, doc_id in wanted))
    if args.all and not args.yes and not _confirmed(len(doc_ids), store.path):
        say("nothing deleted", "")
        return 1
    given_back = 0
    n_deleted = store.stats().documents if args.all else len(doc_ids)  # a damaged document has lost its name
    if args.purge:
        given_back = _in_folder(store, "purge").purge(None if args.all else wanted)
    elif args.all:
        store.delete_all()
    else:
        for model, doc_id in wanted:
            store.delete_document(model, doc_id)
    if args.json:
        write_json({"deleted": doc_ids, **({"bytes": given_back} if args.purge else {})})
    elif args.purge:
        place = visible_name(store.path)
        results().print(f"{counted(n_deleted, 'document')} purged from {place}; {byte_size(given_back)} given back")
    else:
        results().print(f"{counted(n_deleted, 'document')} deleted; the freed space is used by later ones")
    return 0


def _confirmed(n_documents: int, path: str) -> bool:
    """Ask a person; a script has said --all and is believed."""
    if not on_terminal(sys.stdin):
        return True
    question = f"Delete {counted(n_documents, 'document')} from {visible_name(path)}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _compact(store: TableStore, args: argparse.Namespace) -> int:
    folder = _in_folder(store, "compact")
    n_orphans = folder.stats().orphans
    given_back = folder.purge(()) if args.wipe else folder.compact()
    if args.json:
        write_json({"orphans": n_orphans, "bytes": given_back})
    else:
        results().print(f"{counted(n_orphans, 'orphan chunk')} dropped, {byte_size(given_back)} given back")
    return 0


def _in_folder(store: TableStore, action: str) -> LMDBStore:
    """The store. Raises StoreError if it has no file."""
    from pdllm_store import LMDBStore, StoreError

    if not isinstance(store, LMDBStore):
        raise StoreError(f"{store.path} has no file to {action}; `pdllm store gc` deletes what it needs no more")
    return store


def _gc(store: TableStore, args: argparse.Namespace) -> int:
    from pdllm_store import ObjectChunkStore, StoreError

    if not isinstance(store, ObjectChunkStore):
        raise StoreError(f"{store.path} is a folder, not a URL; `pdllm store compact` gives its free space back")
    garbage = store.collect_garbage(grace_s=args.grace, dry_run=args.dry_run)
    if args.json:
        counts = {"chunks": garbage.chunks, "others": garbage.others, "bytes": garbage.n_bytes}
        write_json({**counts, "dry_run": args.dry_run})
        return 0
    objects = f"{counted(garbage.chunks, 'chunk')} and {garbage.others:,} other objects"
    done = "would be deleted" if args.dry_run else "deleted"
    results().print(f"{objects} {done}, {byte_size(garbage.n_bytes)}")
    return 0
