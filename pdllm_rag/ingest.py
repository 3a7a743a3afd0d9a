"""From files to documents of a store: what to read, what failed and why, what has vanished."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path

import blake3
from pdllm_store import ChunkStore, ModelFingerprint

from pdllm_rag.errors import DocumentError
from pdllm_rag.prefill import Failure, InputDocument, Prefiller, PrefillReport, Progress
from pdllm_rag.readers import read
from pdllm_rag.sources import SourceFile, find


def ingest(
    prefiller: Prefiller,
    store: ChunkStore,
    fingerprint: ModelFingerprint,
    paths: Sequence[str | PathLike[str]],
    *,
    id_prefix: str = "",
    prune: bool = False,
    shard: tuple[int, int] = (1, 1),
    on_start: Callable[[int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PrefillReport:
    """Prefill files, folders and patterns.

    Args:
        prune: delete documents whose file, below a folder given here, is no longer there; else they are reported.
        shard: (i, n), 1-based: take only the documents that fall to part i of n.
        on_start: told the number of files.

    Raises:
        DocumentConflictError: two files would have one id.
        ValueError: a shard outside 1..n.
    """
    part, n_parts = shard
    if not 1 <= part <= n_parts:
        raise ValueError(f"shard is {part}/{n_parts}; expected i/n with 1 <= i <= n")
    sources = find(paths, id_prefix=id_prefix)
    files = [file for file in sources.files if _part_of(file.doc_id, n_parts) == part]
    if on_start is not None:
        on_start(len(files))
    report = prefiller.run(_documents(files), on_progress)
    report.failed[:0] = [Failure(problem.path, problem.reason) for problem in sources.problems]
    report.missing = _vanished(store, fingerprint, paths)
    if prune:
        for doc_id in report.missing:
            if store.delete_document(fingerprint, doc_id):
                report.pruned.append(doc_id)
        report.missing = []
    return report


def _documents(files: Sequence[SourceFile]) -> Iterator[InputDocument | Failure]:
    for file in files:
        try:
            content = read(file.path)
        except DocumentError as error:
            yield Failure(file.doc_id, str(error).removeprefix(f"{file.path}: "))
            continue
        metadata = {"media_type": content.media_type}
        if content.title:
            metadata["title"] = content.title
        yield InputDocument(file.doc_id, content.text, file.source, content.pages, metadata)


def _part_of(doc_id: str, n_parts: int) -> int:
    """1-based part that a document falls to, the same on every machine."""
    return int.from_bytes(blake3.blake3(doc_id.encode()).digest(8), "big") % n_parts + 1


def _vanished(store: ChunkStore, fingerprint: ModelFingerprint, paths: Sequence[str | PathLike[str]]) -> list[str]:
    """Documents that came from below one of these folders and whose file is gone."""
    roots = [Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)]
    return [
        info.doc_id
        for info in store.documents(fingerprint)
        if any(Path(info.source).is_relative_to(root) for root in roots) and not os.path.exists(info.source)
    ]
