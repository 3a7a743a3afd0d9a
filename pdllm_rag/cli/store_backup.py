"""`pdllm store export` and `import`: a store as one file, and back."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import byte_size, counted, results, visible_name, write_json
from pdllm_rag.cli.opening import add_store, open_store, read_key

if TYPE_CHECKING:
    from pdllm_rag.cli.store_action import Actions


def add_actions(actions: Actions) -> None:
    """Add both."""
    export = actions.add_parser(
        "export",
        help="write a store into one file, as a backup",
        description="Write a store into a new file, as it is at this moment; others may write to it meanwhile. The "
        "file holds everything: documents of every model, KV, pins and the cap. Run `pdllm store verify` before.",
        epilog="With --json, one object: file, bytes.",
    )
    _add_places(export, "the store and the file; or the file alone, with", may_read_only=True)
    export.set_defaults(run=_export)
    restored = actions.add_parser(
        "import",
        help="make the store of such a file again",
        description="Make a store of a file of `export` again, in a new or an empty folder. Into a store that is there "
        "already the documents are brought that it lacks, as `merge` does: pins stay behind, and one document id with "
        "two contents is an error. A file that is damaged or something else is refused, and nothing is changed.",
        epilog="With --json, one object: documents (that went in), unchanged (that were there), chunks, bytes (of KV).",
    )
    _add_places(restored, "the file and the store; or the file alone, with", may_read_only=False)
    restored.set_defaults(run=_import)


def _add_places(parser: argparse.ArgumentParser, help: str, *, may_read_only: bool) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help=help)
    add_store(parser, help="folder of the store", required=False, may_read_only=may_read_only, shared=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(usage_error=parser.error)


def _file_of(args: argparse.Namespace, *, store_at: int) -> str:
    """The file; the store goes where `--store` would."""
    if args.store is None and len(args.paths) == 2:
        args.store = args.paths.pop(store_at)
    if args.store is None or len(args.paths) != 1:
        args.usage_error("expected one store and one file")
    return str(args.paths[0])


def _export(args: argparse.Namespace) -> int:
    from pdllm_store import LMDBStore, StoreError, export_store

    file = _file_of(args, store_at=0)
    with open_store(args) as store:
        if not isinstance(store, LMDBStore):
            raise StoreError(f"{store.path} is no folder; copy the objects under it with the tools of its service")
        n_bytes = export_store(store, file)
    if args.json:
        write_json({"file": file, "bytes": n_bytes})
    else:
        results().print(f"{visible_name(args.store)} exported to {visible_name(file)}, {byte_size(n_bytes)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from pdllm_store import StoreError, import_store, is_url

    file = _file_of(args, store_at=1)
    if is_url(args.store) or args.cache or args.cache_bytes:
        raise StoreError(f"{args.store} is to be a URL or has a cache; import into a folder, then `pdllm store merge`")
    report = import_store(file, args.store, key=read_key(args.key_file) if args.key_file else None)
    if args.json:
        write_json({name: getattr(report, name) for name in ("documents", "unchanged", "chunks", "bytes")})
        return 0
    went = f"{counted(report.documents, 'document')} imported into {visible_name(args.store)}"
    kv = f"{counted(report.chunks, 'chunk')}, {byte_size(report.bytes)} of KV"
    results().print(f"{went}, {report.unchanged:,} unchanged; {kv}")
    return 0
