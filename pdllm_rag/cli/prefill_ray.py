"""`pdllm prefill --ray`: the same prefill, on the workers of a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import counted
from pdllm_rag.cli.opening import open_store
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from pdllm_store import ChunkStore, ModelFingerprint

    from pdllm_rag.prefill import PrefillReport


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--ray` and what belongs to it."""
    group = parser.add_argument_group("on a cluster (pip install 'pdllm-rag[scale]', docs/scale.md)")
    group.add_argument(
        "--ray",
        action="store_true",
        help="encode on the workers of a Ray cluster; this process's node has the store, all of them the files and the "
        "model under the same paths",
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the cluster, or auto on one of its nodes (default: RAY_ADDRESS, or else this machine alone)",
    )
    group.add_argument(
        "--workers", type=positive_int, metavar="N", help="(default: one for each GPU, or else for each core)"
    )


def complaint(args: argparse.Namespace) -> str:
    """What is wrong with the options, "" if nothing is."""
    if not args.ray and (args.address is not None or args.workers is not None):
        return "--address and --workers say where --ray computes, and --ray is missing"
    if args.ray and (args.adapter is not None or args.canvas_adapter is not None):
        return "--ray loads the model on its workers, without adapters; prefill with one in shards (--shard)"
    return ""


@contextmanager
def on_cluster(args: argparse.Namespace) -> Iterator[tuple[ChunkStore, ModelFingerprint, Callable[..., PrefillReport]]]:
    """The store, the model's fingerprint, and what brings paths into the store, as `RagEngine.prefill` does.

    Raises:
        ClusterError, StoreError, ModelError; OSError and ValueError for the key file.
    """
    from pdllm_store import is_url

    from pdllm_rag.distributed.cluster import connected
    from pdllm_rag.distributed.prefill import RayPrefill
    from pdllm_rag.ingest import ingest
    from pdllm_rag.models.loader import read_fingerprint, read_spec

    spec, _, _ = read_spec(args.model)
    model = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    # Other processes have other working directories, and a key is to be read there rather than sent.
    elsewhere = argparse.Namespace(**{name: value for name, value in vars(args).items() if not callable(value)})
    elsewhere.store = args.store if is_url(args.store) else os.path.abspath(args.store)
    for name in ("key_file", "cache"):
        given = getattr(args, name)
        setattr(elsewhere, name, given and os.path.abspath(given))
    with (
        connected(args.address),
        open_store(args, create=True, kv_dtype=args.kv_dtype, max_bytes=args.max_bytes) as store,
    ):
        fingerprint = read_fingerprint(args.model, store.kv_dtype)
        prefill_files = RayPrefill(
            partial(open_store, elsewhere),
            model,
            fingerprint,
            chunk_len=args.chunk_len or spec.family.chunk_len,
            device=args.device,
            n_workers=args.workers,
        )
        yield store, fingerprint, partial(ingest, prefill_files, store, fingerprint)


def workers_told(report: PrefillReport) -> list[str]:
    """A line for what was computed twice, and one for each worker; nothing of a prefill without them."""
    from pdllm_rag.distributed.prefill import RayReport

    if not isinstance(report, RayReport):
        return []
    share = report.recomputed / max(report.chunks_computed, 1)
    lines = [f"{counted(report.recomputed, 'chunk')} computed in vain or twice ({share:.1%})"]
    for worker in report.workers:
        rate = worker.tokens / worker.seconds if worker.seconds else 0.0
        work = f"{counted(worker.chunks, 'chunk')}, {counted(worker.tokens, 'token')}, {rate:,.0f} tokens/s"
        lines.append(f"worker {worker.place.node}:{worker.place.pid}: {work}")
    return lines
