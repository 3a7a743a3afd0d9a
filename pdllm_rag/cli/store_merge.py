"""`pdllm store merge`: the stores that several machines have filled, into one."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import byte_size, counted, notes, on_terminal, results, visible_name, write_json
from pdllm_rag.cli.opening import add_model, add_store, open_store
from pdllm_rag.cli.values import probability

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdllm_store import LMDBStore, ModelFingerprint, ObjectChunkStore, Recompute
    from pdllm_store.table_store import TableStore

    from pdllm_rag.cli.store_action import Actions

SAMPLE = 0.01


def add_actions(actions: Actions) -> None:
    """Add `merge`."""
    parser = actions.add_parser(
        "merge",
        help="bring the documents of other stores into one",
        description="Bring the documents of other stores of the same model into one, which is made if need be. A "
        "sample of the chunks is computed again first, and nothing is merged if one differs. What is there already is "
        "not copied, so an interrupted merge goes on where it stopped. One document id with two contents is an error. "
        "Pins stay behind.",
        epilog="With --json, one object: documents (that went in), unchanged (that were there), chunks (copied), "
        "compared (chunks computed again), bytes (of KV, written).",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="DIR", help="the store to merge into, then those to be merged; or these alone, with"
    )
    add_store(parser, help="the store to merge into, as other actions have it", required=False)
    add_model(parser)
    parser.add_argument(
        "--sample",
        type=probability,
        default=SAMPLE,
        metavar="SHARE",
        help="part of each store's new chunks to compute again; 0 trusts them and loads no model (default: "
        "%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(
        run=run, usage_error=parser.error, after_interrupt="run it again and it goes on where it stopped"
    )


def run(args: argparse.Namespace) -> int:
    """Merge."""
    from pdllm_store import merge

    if args.store is None:
        args.store, *args.paths = args.paths
    if not args.paths:
        args.usage_error("expected one store or more to be merged beside the one to merge into")
    with ExitStack() as stack:
        sources = [stack.enter_context(_source(path, args)) for path in args.paths]
        fingerprint, recompute = _held_model(sources), None
        if args.sample:
            live = on_terminal(sys.stderr) and not args.json
            with notes().status(f"Loading {args.model}") if live else nullcontext():
                recompute = _recompute(args, fingerprint)
        dest = stack.enter_context(open_store(args, create=True, kv_dtype=sources[0].kv_dtype))
        report = merge(dest, sources, fingerprint, recompute=recompute, sample=args.sample)
    if args.json:
        write_json(report._asdict())
        return 0
    went = f"{counted(report.documents, 'document')} merged into {visible_name(args.store)}"
    copied = f"{counted(report.chunks, 'chunk')} copied, {byte_size(report.bytes)} of KV"
    results().print(f"{went}, {report.unchanged:,} unchanged; {copied}; {report.compared:,} computed again and alike")
    return 0


def _source(path: str, args: argparse.Namespace) -> LMDBStore | ObjectChunkStore:
    return open_store(
        argparse.Namespace(store=path, key_file=args.key_file, read_only=True, cache=None, cache_bytes=None)
    )


def _held_model(sources: Sequence[TableStore]) -> ModelFingerprint:
    """The model whose documents the first store with any holds; `merge` refuses those of another one."""
    from pdllm_store import StoreMismatchError

    for source in sources:
        for fingerprint in source.fingerprints():
            if source.documents(fingerprint):
                return fingerprint
    raise StoreMismatchError(f"{sources[0].path} holds no documents, nor do the others; prefill them first")


def _recompute(args: argparse.Namespace, fingerprint: ModelFingerprint) -> Recompute:
    """What encodes chunks again. Raises StoreMismatchError if the model is not that of the stores."""
    from pdllm_store import StoreMismatchError

    from pdllm_rag.encoder import ChunkEncoder
    from pdllm_rag.registry import shared_model

    model = shared_model(args.model, args.device, None, args.adapter, None)
    if model.fingerprint(fingerprint.kv_dtype) != fingerprint:
        raise StoreMismatchError(
            f"the stores were prefilled with {fingerprint.family}, weights {fingerprint.weights_digest[:12]}, and "
            f"{args.model} has the weights {model.weights_digest[:12]}, so nothing can be computed again; give --model "
            "the one that they were prefilled with, or --sample 0"
        )
    encoder = ChunkEncoder(model, fingerprint)
    return lambda metas: encoder.batches([meta.token_ids for meta in metas])
