"""Read everything that a store holds and say what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import blake3

from pdllm_store import chunks
from pdllm_store.counts import Counts, read_counts, recount
from pdllm_store.errors import RecordDamagedError, StoreClosedError, StoreError
from pdllm_store.rows import ChunkRow, unpack_document, unpack_fingerprint, unpack_ref, unpack_text
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ChunkId

Progress = Callable[[int, int], None]  # chunks done, chunks in all
_PAGE_CHUNKS = 32  # of one read transaction: a long one would keep the pages that others free


class VerifyReport(NamedTuple):
    """What `verify` found."""

    checked_chunks: int
    checked_documents: int
    damaged: list[ChunkId]  # discard them and prefill their documents again
    missing: list[ChunkId]  # referred to by a document, without KV: prefill the document again
    problems: list[str]  # one sentence each, for everything else

    @property
    def ok(self) -> bool:
        return not (self.damaged or self.missing or self.problems)


class _Readable(Protocol):
    def read(self) -> AbstractContextManager[Tables]: ...


def verify(transactions: _Readable, progress: Progress | None) -> VerifyReport:
    """Check every record, row and reference; other threads and processes may go on working."""
    damaged: list[ChunkId] = []
    missing: list[ChunkId] = []
    problems: list[str] = []
    n_chunks = n_documents = 0
    try:
        n_chunks = _check_chunks(transactions, damaged, progress)
        with transactions.read() as tables:
            refcounts = Counter(_check_refs(tables, problems))
            n_documents = _check_documents(tables, problems)
            _check_rows(tables, refcounts, missing, problems)
            _check_totals(tables, problems)
    except StoreClosedError:
        raise
    except StoreError as error:
        problems.append(f"the rest could not be read: {error}")
    return VerifyReport(n_chunks, n_documents, damaged, missing, problems)


def _check_chunks(transactions: _Readable, damaged: list[ChunkId], progress: Progress | None) -> int:
    with transactions.read() as tables:
        n_all = sum(1 for _ in tables.scan("metas"))
    after, n_done = b"", 0
    while True:
        with transactions.read() as tables:
            page = list(chunks.page_of_rows(tables, after, _PAGE_CHUNKS))
            damaged += [chunk_id for chunk_id, row in page if not _is_sound(tables, chunk_id, row)]
        if not page:
            return n_done
        after = page[-1][0]
        n_done += len(page)
        if progress is not None:
            progress(n_done, max(n_done, n_all))


def _is_sound(tables: Tables, chunk_id: ChunkId, row: ChunkRow | RecordDamagedError) -> bool:
    if isinstance(row, RecordDamagedError):
        return False
    if blake3.blake3(row.fingerprint + row.token_ids).digest(ID_BYTES) != chunk_id:
        return False
    try:
        if row.n_groups:
            chunks.check(tables, chunk_id)
    except RecordDamagedError:
        return False
    return True


def _check_refs(tables: Tables, problems: list[str]) -> Iterator[ChunkId]:
    """The chunk of every reference that is whole."""
    for key, value in tables.scan("refs"):
        try:
            ref = unpack_ref(key, value, "")
        except RecordDamagedError as error:
            problems.append(str(error))
            continue
        if tables.get("documents", key[: 2 * ID_BYTES]) is None:
            problems.append(f"reference {key.hex()} belongs to no document; run `compact`")
        yield ref.chunk_id


def _check_documents(tables: Tables, problems: list[str]) -> int:
    n_documents = 0
    counted: Counter[bytes] = Counter()
    for key, value in tables.scan("documents"):
        n_documents += 1
        counted[key[:ID_BYTES]] += 1
        try:
            row = unpack_document(key, value)
            text = tables.get("texts", key)
            if text is None:
                problems.append(f"document {row.doc_id!r} has lost its text; add it again")
            else:
                unpack_text(key, text)
        except RecordDamagedError as error:
            problems.append(str(error))
            continue
        n_refs = sum(1 for _ in tables.scan("refs", key))
        if n_refs != row.n_chunks:
            problems.append(f"document {row.doc_id!r} has {n_refs} references instead of {row.n_chunks}; add it again")
    for digest, value in tables.scan("fingerprints"):
        try:
            n_said = unpack_fingerprint(digest, value)[1]
        except RecordDamagedError as error:
            problems.append(str(error))
            continue
        if n_said != (n_counted := counted[digest]):
            problems.append(f"fingerprint {digest.hex()} says {n_said} documents, there are {n_counted}; run `compact`")
    return n_documents


def _check_rows(tables: Tables, refcounts: Counter[ChunkId], missing: list[ChunkId], problems: list[str]) -> None:
    held = set()
    for chunk_id, row in chunks.page_of_rows(tables, b"", -1):
        held.add(chunk_id)
        if isinstance(row, RecordDamagedError):
            continue
        if row.refcount != refcounts[chunk_id]:
            problems.append(
                f"chunk {chunk_id.hex()} says {row.refcount} references, there are {refcounts[chunk_id]}; run `compact`"
            )
        if not row.n_groups and refcounts[chunk_id]:
            missing.append(chunk_id)
    missing += sorted(refcounts.keys() - held)
    strays = {key[:ID_BYTES] for key, _ in tables.scan("kv")} - held
    problems += [f"KV of {chunk_id.hex()} belongs to no chunk; run `compact`" for chunk_id in sorted(strays)]


def _check_totals(tables: Tables, problems: list[str]) -> None:
    counted = recount(tables)
    try:
        said: Counts | None = read_counts(tables)
    except RecordDamagedError as error:
        problems.append(str(error))
        return
    if said != counted:
        problems.append(f"the totals say {said}, there are {counted}; run `compact`")
