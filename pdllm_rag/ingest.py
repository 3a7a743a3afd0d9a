"""From files to documents of a store: what to read, what failed and why, what has vanished."""

from __future__ import annotations

import os
import stat
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
        prune: delete documents whose file, below a folder given here, is certainly gone (never all of a folder's), and
            those whose id a file given here takes over after their own file is gone; without it they are reported.
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
    moved = _moved(store, fingerprint, files) if prune else []
    for doc_id in moved:
        store.delete_document(fingerprint, doc_id)
    report = prefiller.run(_documents(files), on_progress)
    report.failed[:0] = [Failure(problem.path, problem.reason) for problem in sources.problems]
    vanished = _vanished(store, fingerprint, paths)
    report.pruned = moved
    for root, doc_ids in vanished.items():
        if not prune:
            report.missing += doc_ids
        elif not any(Path(file.source).is_relative_to(root) for file in sources.files):
            report.missing += doc_ids
            reason = f"no file is left in it, but {len(doc_ids)} documents came from it: nothing was pruned"
            report.failed.append(
                Failure(str(root), f"{reason}. Is it mounted? If they are to go, use `pdllm store delete`")
            )
        else:
            report.pruned += [doc_id for doc_id in doc_ids if store.delete_document(fingerprint, doc_id)]
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


def _moved(store: ChunkStore, fingerprint: ModelFingerprint, files: Sequence[SourceFile]) -> list[str]:
    """Documents that a file is to take over because it has their id and their own file is gone."""
    sources = {file.doc_id: file.source for file in files}
    return [
        info.doc_id
        for info in store.documents(fingerprint)
        if sources.get(info.doc_id, info.source) != info.source and _is_gone(info.source)
    ]


def _vanished(
    store: ChunkStore, fingerprint: ModelFingerprint, paths: Sequence[str | PathLike[str]]
) -> dict[Path, list[str]]:
    """Per folder of `paths` the documents that came from below it and whose file is gone."""
    roots = list(dict.fromkeys(Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)))
    vanished: dict[Path, list[str]] = {}
    for info in store.documents(fingerprint):
        root = next((root for root in roots if Path(info.source).is_relative_to(root)), None)
        if root is not None and _is_gone(info.source):
            vanished.setdefault(root, []).append(info.doc_id)
    return vanished


def _is_gone(source: str) -> bool:
    """Whether a file is certainly no longer there, or is no regular file any more; not being allowed to look is no."""
    try:
        return not stat.S_ISREG(os.lstat(source).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
