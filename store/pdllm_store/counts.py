"""The store's totals, kept in the transactions that change them, so that neither opening nor `stats` scans anything."""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from pdllm_store.errors import RecordDamagedError
from pdllm_store.rows import ChunkRow, seal, unpack_chunk, unseal
from pdllm_store.tables import Tables

_KEY = b"counts"
_COUNTS = struct.Struct("<6Q")


class Counts(NamedTuple):
    documents: int = 0
    chunks: int = 0  # with whole KV
    orphans: int = 0  # with whole KV and no reference
    tokens: int = 0  # of chunks with whole KV
    kv_bytes: int = 0
    generation: int = 0  # raised by every change of documents


def read_counts(tables: Tables) -> Counts:
    """Raises RecordDamagedError."""
    value = tables.get("manifest", _KEY)
    if value is None:
        return Counts()
    payload = unseal("counts", _KEY, value)
    return Counts(*_COUNTS.unpack(payload))


def write_counts(tables: Tables, counts: Counts) -> None:
    tables.put("manifest", _KEY, seal(_KEY, _COUNTS.pack(*counts)))


def count_documents(tables: Tables, change: int) -> None:
    """Add to the number of documents (after they were changed) and raise the generation."""
    try:
        counts = read_counts(tables)
    except RecordDamagedError:
        write_counts(tables, recount(tables))
        return
    changed = counts._replace(documents=counts.documents + change, generation=counts.generation + 1)
    write_counts(tables, changed)


def count_chunk(tables: Tables, old: ChunkRow | None, new: ChunkRow | None) -> None:
    """Account for a chunk row (after it was put, changed or deleted)."""
    before, after = _of_row(old), _of_row(new)
    if before == after:
        return
    try:
        counts = read_counts(tables)
    except RecordDamagedError:
        write_counts(tables, recount(tables))
        return
    changed = counts._replace(
        chunks=counts.chunks + after.chunks - before.chunks,
        orphans=counts.orphans + after.orphans - before.orphans,
        tokens=counts.tokens + after.tokens - before.tokens,
        kv_bytes=counts.kv_bytes + after.kv_bytes - before.kv_bytes,
    )
    write_counts(tables, changed)


def recount(tables: Tables) -> Counts:
    """The totals by a scan of all chunk rows and documents; damaged rows count for nothing."""
    chunks = [Counts()]
    for key, value in tables.scan("metas"):
        try:
            chunks.append(_of_row(unpack_chunk(key, value)))
        except RecordDamagedError:
            continue
    _, n_chunks, orphans, tokens, kv_bytes, _ = (sum(column) for column in zip(*chunks, strict=True))
    n_documents = sum(1 for _ in tables.scan("documents"))
    try:
        generation = read_counts(tables).generation
    except RecordDamagedError:
        generation = time.time_ns()  # above every number that was counted up to
    return Counts(n_documents, n_chunks, orphans, tokens, kv_bytes, generation)


def _of_row(row: ChunkRow | None) -> Counts:
    if row is None or not row.n_groups:
        return Counts()
    return Counts(chunks=1, orphans=int(row.refcount == 0), tokens=row.n_tokens, kv_bytes=row.kv_bytes)
