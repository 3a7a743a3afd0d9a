"""Read everything that a store holds and say what is wrong with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import blake3

from pdllm_store import chunks, loading
from pdllm_store.counts import read_counts, read_state, recount
from pdllm_store.errors import RecordDamagedError, StoreClosedError, StoreError
from pdllm_store.eviction import read_max_bytes
from pdllm_store.loading import Read
from pdllm_store.recomputing import Comparison
from pdllm_store.rows import unpack_document, unpack_fingerprint, unpack_ref, unpack_text
from pdllm_store.tables import TABLES, Tables
from pdllm_store.types import ID_BYTES, ChunkId
from pdllm_store.workers import Workers

Progress = Callable[[int, int], None]  # chunks done, chunks in all
_PAGE_CHUNKS = 32  # of one read transaction: a long one would keep the pages that others free


class VerifyReport(NamedTuple):
    """What `verify` found."""

    checked_chunks: int
    checked_documents: int
    damaged: list[ChunkId]  # discard them and prefill their documents again
    missing: list[ChunkId]  # referred to by a document, without KV: prefill the document again
    problems: list[str]  # one sentence each, for everything else
    n_evicted: int  # chunks whose KV gave way to others; nothing is wrong with them
    n_compared: int  # chunks that were computed again
    differing: list[ChunkId]  # those of them that are stored otherwise: discard them

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not (self.damaged or self.missing or self.problems or self.differing)


def verify(
    read: Read, workers: Workers, progress: Progress | None, compare: Callable[[list[ChunkId]], Comparison]
) -> VerifyReport:
    """Check every record, row and reference; other threads and processes may go on working.

    Args:
        compare: computes a sample of these sound chunks again.
    """
    sound: list[ChunkId] = []
    damaged: list[ChunkId] = []
    missing: list[ChunkId] = []
    problems: list[str] = []
    comparison = Comparison(0, [])
    n_chunks = n_documents = n_evicted = 0
    try:
        n_chunks = _check_chunks(read, workers, sound, damaged, progress)
        with read() as tables:
            refcounts = chunks.count_references(tables)
            _check_refs(tables, problems)
            n_documents = _check_documents(tables, problems)
            n_evicted = _check_rows(tables, refcounts, missing, problems)
            _check_totals(tables, problems)
            _check_lookups(tables, problems)
        comparison = compare(sound)
    except StoreClosedError:
        raise
    except StoreError as error:
        problems.append(f"the rest could not be read: {error}")
    return VerifyReport(n_chunks, n_documents, sorted(damaged), missing, problems, n_evicted, *comparison)


def _check_chunks(
    read: Read, workers: Workers, sound: list[ChunkId], damaged: list[ChunkId], progress: Progress | None
) -> int:
    with read() as tables:
        ids = list(tables.keys("metas"))
    pages = deque(ids[start : start + _PAGE_CHUNKS] for start in range(0, len(ids), _PAGE_CHUNKS))
    n_done = 0
    telling = threading.Lock()

    def check(_worker: int) -> None:
        nonlocal n_done
        while True:
            try:
                page = pages.popleft()
            except IndexError:
                return
            with read() as tables:
                for chunk_id in page:
                    if (is_sound := _is_sound(tables, chunk_id)) is not None:
                        (sound if is_sound else damaged).append(chunk_id)
            with telling:
                n_done += len(page)
                if progress is not None:
                    progress(n_done, len(ids))

    workers.map(check, range(workers.n_threads))
    return len(ids)


def _is_sound(tables: Tables, chunk_id: ChunkId) -> bool | None:
    """None for a chunk without KV, or one that was deleted meanwhile."""
    try:
        row = chunks.chunk_row(tables, chunk_id)
        if row is None:
            return None
        if blake3.blake3(row.fingerprint + row.token_ids).digest(ID_BYTES) != chunk_id:
            return False
        if not row.n_groups:
            return None
        loading.check(tables, chunk_id)
    except RecordDamagedError:
        return False
    return True


def _check_refs(tables: Tables, problems: list[str]) -> None:
    for key, value in tables.scan("refs"):
        try:
            unpack_ref(key, value, "")
        except RecordDamagedError as error:
            problems.append(str(error))
            continue
        if tables.get("documents", key[: 2 * ID_BYTES]) is None:
            problems.append(f"reference {key.hex()} belongs to no document; run `compact`")


def _check_documents(tables: Tables, problems: list[str]) -> int:
    n_documents = 0
    for key, value in tables.scan("documents"):
        n_documents += 1
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
        n_refs = sum(1 for _ in tables.keys("refs", key))
        if n_refs != row.n_chunks:
            problems.append(f"document {row.doc_id!r} has {n_refs} references instead of {row.n_chunks}; add it again")
    for digest, value in tables.scan("fingerprints"):
        try:
            unpack_fingerprint(digest, value)
        except RecordDamagedError as error:
            problems.append(str(error))
    return n_documents


def _check_rows(
    tables: Tables, references: Mapping[ChunkId, tuple[int, int]], missing: list[ChunkId], problems: list[str]
) -> int:
    """The number of evicted chunks."""
    held = set()
    in_order: set[bytes] = set()
    n_evicted = 0
    for chunk_id, row in chunks.page_of_rows(tables, b"", -1):
        held.add(chunk_id)
        if isinstance(row, RecordDamagedError):
            continue
        counted = references.get(chunk_id, (0, 0))
        if (row.refcount, row.pins) != counted:
            problems.append(
                f"chunk {chunk_id.hex()} says {(row.refcount, row.pins)} references and pins, there are {counted}; "
                "run `compact`"
            )
        if entry := chunks.lru_entry(chunk_id, row):
            in_order.add(entry)
        n_evicted += row.is_evicted
        if not row.n_groups and not row.is_evicted and counted[0]:
            missing.append(chunk_id)
    missing += sorted(references.keys() - held)
    strays = {key[:ID_BYTES] for key in tables.keys("kv")} - held
    problems += [f"KV of {chunk_id.hex()} belongs to no chunk; run `compact`" for chunk_id in sorted(strays)]
    wrong = in_order ^ set(tables.keys("lru"))
    problems += [f"the order of use is wrong at {key.hex()}; run `compact`" for key in sorted(wrong)]
    return n_evicted


def _check_lookups(tables: Tables, problems: list[str]) -> None:
    """A damaged tree can list what it does not find, and a row under another key is no row of ours."""
    for table in TABLES:
        if table == "kv":  # read by key above
            continue
        for key in tables.keys(table):
            if tables.get(table, key) is None:
                problems.append(f"table {table} lists {key.hex()} and does not find it; restore a copy")
    known = {b"manifest", b"state", b"limits", b"followed"}
    problems += [f"the manifest holds an unknown row {key!r}" for key in tables.keys("manifest") if key not in known]


def _check_totals(tables: Tables, problems: list[str]) -> None:
    counted = recount(tables)
    try:
        read_state(tables)
        read_max_bytes(tables)
        said = {key: counts for key, counts in read_counts(tables).items() if any(counts)}
    except RecordDamagedError as error:
        problems.append(str(error))
        return
    if said != counted:
        problems.append(f"the totals say {said}, there are {counted}; run `compact`")
