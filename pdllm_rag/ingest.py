"""From files to documents of a store: what to read, what failed and why, what has vanished."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path

import blake3
from pdllm_store import ChunkStore, DocumentNotFoundError, ModelFingerprint

from pdllm_rag.chunking import text_id
from pdllm_rag.errors import DocumentError
from pdllm_rag.prefill import Failure, InputDocument, PrefillReport, Progress, as_stored
from pdllm_rag.readers import SourceText, printable, read
from pdllm_rag.sources import SourceFile, find

logger = logging.getLogger(__name__)

# Brings files into the store, as `Prefiller.run` does with what `read_documents` finds in them.
PrefillFiles = Callable[[Sequence[SourceFile], Callable[[Progress], None] | None], PrefillReport]


def ingest(
    prefill_files: PrefillFiles,
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
        shard: (i, n), 1-based: take only the files whose content falls to part i of n. A file that was changed may
            fall to another part than before; what this store still holds of its old text is deleted.
        on_start: told the number of files.

    Raises:
        DocumentConflictError: two files would have one id.
        ValueError: a shard outside 1..n.
    """
    part, n_parts = shard
    if not 1 <= part <= n_parts:
        raise ValueError(f"shard is {part}/{n_parts}; expected i/n with 1 <= i <= n")
    sources = find(paths, id_prefix=id_prefix)
    files = [file for file in sources.files if n_parts == 1 or _part_of(file, n_parts) == part]
    if on_start is not None:
        on_start(len(files))
    moved = _moved(store, fingerprint, files) if prune else []
    for doc_id in moved:
        store.delete_document(fingerprint, doc_id)
    report = prefill_files(files, on_progress)
    report.failed[:0] = [Failure(*problem) for problem in sources.problems]
    report.skipped = [Failure(*problem) for problem in sources.skipped]
    vanished = _vanished(store, fingerprint, paths, {file.source for file in sources.files})
    mine = {file.doc_id for file in files}
    elsewhere = [file for file in sources.files if file.doc_id not in mine]
    report.pruned = moved + _delete_outdated(store, fingerprint, elsewhere)
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


def read_documents(files: Iterable[SourceFile]) -> Iterator[InputDocument | Failure]:
    """The documents in files, one after the other; a file that cannot be read is a `Failure`."""
    for file in files:
        try:
            content = read(file.path)
        except DocumentError as error:
            yield Failure(file.doc_id, str(error).removeprefix(f"{file.path}: "))
            continue
        yield file_document(file.doc_id, file.source, content)


def file_document(doc_id: str, source: str, content: SourceText) -> InputDocument:
    """A file's document. Its metadata is its front matter and title, and above them what the file itself is."""
    folder, name = posixpath.split(doc_id)
    own = {"media_type": content.media_type, "folder": folder, "suffix": posixpath.splitext(name)[1].lower()}
    if hidden := sorted(own.keys() & content.front_matter.keys()):
        logger.warning("%s: its front matter has %s, which the file's own replaces", printable(doc_id), hidden)
    title = {"title": content.title} if content.title else {}
    return InputDocument(doc_id, content.text, source, content.pages, {**title, **content.front_matter, **own})


def _part_of(file: SourceFile, n_parts: int) -> int:
    """1-based part that a file's content falls to, the same on every machine; what cannot be read counts as empty."""
    hasher = blake3.blake3()
    with contextlib.suppress(OSError):
        hasher.update_mmap(file.path)
    return int.from_bytes(hasher.digest(8), "big") % n_parts + 1


def _delete_outdated(store: ChunkStore, fingerprint: ModelFingerprint, files: Sequence[SourceFile]) -> list[str]:
    """Delete documents that come from these files of other parts, but are no longer what the file holds now."""
    sources = {info.doc_id: info.source for info in store.documents(fingerprint)} if files else {}
    deleted = []
    for document in read_documents(file for file in files if sources.get(file.doc_id) == file.source):
        if isinstance(document, Failure):
            continue
        now = text_id(document.text), as_stored(document)
        with contextlib.suppress(DocumentNotFoundError):  # looked at once more: its own part may be at work here
            held = store.document(fingerprint, document.doc_id)
            if (held.text_id, dict(held.metadata)) != now:
                store.delete_document(fingerprint, document.doc_id)
                deleted.append(document.doc_id)
    return deleted


def _moved(store: ChunkStore, fingerprint: ModelFingerprint, files: Sequence[SourceFile]) -> list[str]:
    """Documents that a file is to take over because it has their id and their own file is gone."""
    sources = {file.doc_id: file.source for file in files}
    return [
        info.doc_id
        for info in store.documents(fingerprint)
        if sources.get(info.doc_id, info.source) != info.source and _is_gone(info.source)
    ]


def _vanished(
    store: ChunkStore, fingerprint: ModelFingerprint, paths: Sequence[str | PathLike[str]], seen: set[str]
) -> dict[Path, list[str]]:
    """Per folder of `paths` the documents that came from below it and whose file is gone; none that was just seen."""
    roots = list(dict.fromkeys(Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)))
    vanished: dict[Path, list[str]] = {}
    for info in store.documents(fingerprint):
        root = next((root for root in roots if Path(info.source).is_relative_to(root)), None)
        if root is not None and info.source not in seen and _is_gone(info.source):
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
