"""What the tables hold of chunks: one row each, and while their KV is whole, one record for each layer group.

Every function works inside one transaction, so a chunk is either whole or absent for everybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from pdllm_store import record
from pdllm_store.codec import Buffer, block_bytes
from pdllm_store.counts import count_chunk, write_recount
from pdllm_store.errors import ChunkNotFoundError, RecordDamagedError
from pdllm_store.rows import (
    ChunkRow,
    kv_key,
    lru_key,
    pack_chunk,
    unpack_chunk,
    unpack_document,
    unpack_ref,
)
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ChunkId, ChunkKV, ChunkMeta, ModelFingerprint

GROUP_BYTES = 1 << 20  # LMDB writes records of about this size two to three times faster than larger ones


class EncodedChunk(NamedTuple):
    """A chunk ready to be written; made outside the transaction, so that the writer's lock is held briefly."""

    chunk_id: ChunkId
    row: ChunkRow  # with no references yet
    records: Sequence[Buffer]


def check_chunk(fingerprint: ModelFingerprint, meta: ChunkMeta, kv: ChunkKV) -> None:
    """Raises ValueError if the id is not that of the tokens under the fingerprint, or a shape does not fit."""
    token_ids = np.asarray(meta.token_ids)
    if token_ids.dtype.kind not in "iu" or (token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < 2**31):
        raise ValueError(f"token ids are {token_ids.dtype}, expected integers in [0, 2**31)")
    if token_ids.ndim != 1 or token_ids.size == 0:
        raise ValueError(f"a chunk has at least one token id in one axis, got shape {token_ids.shape}")
    # A chunk under a wrong id would be a silent wrong hit for ever.
    if meta.chunk_id != (expected := fingerprint.chunk_id(token_ids)):
        raise ValueError(
            f"chunk id {meta.chunk_id.hex()} is not that of its tokens under this fingerprint, {expected.hex()}"
        )
    shape = (fingerprint.n_layers, token_ids.size, fingerprint.n_kv_heads, fingerprint.head_dim)
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of a chunk has shape {tuple(tensor.shape)}, expected [Y, T, G, D] = {shape}")


def check_chunk_ids(chunk_ids: Iterable[ChunkId]) -> None:
    """Raises ValueError if one is no chunk id."""
    for chunk_id in chunk_ids:
        if not isinstance(chunk_id, bytes) or len(chunk_id) != ID_BYTES:
            raise ValueError(f"a chunk id is {chunk_id!r}, expected {ID_BYTES} bytes")


def encode_chunk(
    fingerprint: ModelFingerprint, meta: ChunkMeta, kv: ChunkKV, *, now_ms: int, group_bytes: int = GROUP_BYTES
) -> EncodedChunk:
    """Encode a checked chunk in layer groups of about `group_bytes`.

    Raises:
        ValueError: its dtype cannot be stored in the fingerprint's.
    """
    token_ids = np.ascontiguousarray(meta.token_ids, dtype="<i4")
    headers = layout(fingerprint, meta.chunk_id, token_ids.size, group_bytes=group_bytes)
    records = []
    for header in headers:
        layers = slice(header.layer_start, header.layer_start + header.n_layers)
        records.append(record.build(header, kv.k[layers], kv.v[layers]))
    sketch = None if meta.sketch is None else np.ascontiguousarray(meta.sketch, dtype="<f2").tobytes()
    kv_bytes = sum(len(data) for data in records)
    row = ChunkRow(
        refcount=0,
        pins=0,
        n_groups=len(records),
        group_layers=headers[0].n_layers,
        kv_bytes=kv_bytes,
        used_ms=now_ms,
        fingerprint=fingerprint.digest,
        token_ids=token_ids.tobytes(),
        sketch=sketch,
    )
    return EncodedChunk(meta.chunk_id, row, records)


def encode_missing(
    fingerprint: ModelFingerprint,
    items: Iterable[tuple[ChunkMeta, ChunkKV]],
    missing: Callable[[Sequence[ChunkId]], Sequence[ChunkId]],
    *,
    now_ms: int,
) -> list[EncodedChunk]:
    """Check all chunks, and encode each that is missing once. Raises ValueError."""
    encoded: dict[ChunkId, EncodedChunk] = {}
    for meta, kv in items:
        check_chunk(fingerprint, meta, kv)
        if meta.chunk_id not in encoded and missing([meta.chunk_id]):
            encoded[meta.chunk_id] = encode_chunk(fingerprint, meta, kv, now_ms=now_ms)
    return list(encoded.values())


def layout(
    fingerprint: ModelFingerprint, chunk_id: ChunkId, n_tokens: int, *, group_bytes: int = GROUP_BYTES
) -> list[record.RecordHeader]:
    """What the records of a chunk say of themselves, in order: layer groups of about `group_bytes`."""
    n_layers, n_kv_heads, head_dim = fingerprint.n_layers, fingerprint.n_kv_heads, fingerprint.head_dim
    layer_bytes = 2 * block_bytes((n_tokens, n_kv_heads, head_dim), fingerprint.kv_dtype)
    n_each = min(n_layers, max(1, group_bytes // layer_bytes))
    whole = record.RecordHeader(
        chunk_id, fingerprint.digest, 0, n_layers, n_layers, n_tokens, n_kv_heads, head_dim, fingerprint.kv_dtype
    )
    starts = range(0, n_layers, n_each)
    return [whole._replace(layer_start=start, n_layers=min(n_each, n_layers - start)) for start in starts]


def chunk_row(tables: Tables, chunk_id: ChunkId) -> ChunkRow | None:
    """Raises RecordDamagedError."""
    value = tables.get("metas", chunk_id)
    return None if value is None else unpack_chunk(chunk_id, value)


def sound_row(tables: Tables, chunk_id: ChunkId) -> ChunkRow | None:
    """As `chunk_row`, but None for a damaged row too, where nothing can be done about it."""
    try:
        return chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return None


def missing(tables: Tables, chunk_ids: Iterable[ChunkId]) -> list[ChunkId]:
    """The distinct ids without whole KV, in the order given; a chunk whose row is damaged counts as missing."""
    return [chunk_id for chunk_id in dict.fromkeys(chunk_ids) if not _is_whole(tables, chunk_id)]


def put_chunks(tables: Tables, chunks: Sequence[EncodedChunk]) -> int:
    """Write the chunks that are not held yet; returns the bytes of their KV records."""
    n_written = 0
    for chunk in chunks:
        if _is_whole(tables, chunk.chunk_id):
            continue
        refcount, pins = _references(tables, chunk.chunk_id)
        write_row(tables, chunk.chunk_id, chunk.row._replace(refcount=refcount, pins=pins))
        _drop_kv(tables, chunk.chunk_id)  # of a damaged row, in groups that nobody knows
        for group, data in enumerate(chunk.records):
            tables.put("kv", kv_key(chunk.chunk_id, group), data)
            n_written += len(data)
    return n_written


def evicted(tables: Tables, chunk_ids: Iterable[ChunkId]) -> list[ChunkId]:
    """Those of the distinct ids whose KV gave way to others, in the order given."""
    return [chunk_id for chunk_id in dict.fromkeys(chunk_ids) if _is_evicted(tables, chunk_id)]


def discard(tables: Tables, chunk_ids: Iterable[ChunkId]) -> None:
    """Drop KV, keep the rows that documents refer to; a damaged row stays for `put_chunks` to replace."""
    for chunk_id in dict.fromkeys(chunk_ids):
        try:
            row = chunk_row(tables, chunk_id)
        except RecordDamagedError:
            _drop_kv(tables, chunk_id)
            continue
        if row is not None and row.n_groups:
            _drop(tables, chunk_id, row, kv_bytes=0)


def drop_orphans(tables: Tables, chunk_ids: Iterable[ChunkId]) -> None:
    """Delete those of the chunks that no document refers to."""
    for chunk_id in dict.fromkeys(chunk_ids):
        row = sound_row(tables, chunk_id)
        if row is not None and not row.refcount:
            delete(tables, chunk_id)


def recount_references(tables: Tables, chunk_ids: Iterable[ChunkId]) -> None:
    """Set references and pins of chunks by a scan of all references, after a document's row was lost."""
    counted = count_references(tables)
    for chunk_id in chunk_ids:
        row = sound_row(tables, chunk_id)
        if row is not None:
            refcount, pins = counted.get(chunk_id, (0, 0))
            write_row(tables, chunk_id, row._replace(refcount=refcount, pins=pins))


def evict(tables: Tables, chunk_id: ChunkId, row: ChunkRow) -> None:
    """As `discard`, but remember that the chunk was sound."""
    _drop(tables, chunk_id, row, kv_bytes=row.kv_bytes)


def _drop(tables: Tables, chunk_id: ChunkId, row: ChunkRow, *, kv_bytes: int) -> None:
    left = row._replace(n_groups=0, group_layers=0, kv_bytes=kv_bytes) if row.refcount else None
    write_row(tables, chunk_id, left)
    _drop_kv(tables, chunk_id)


def touch(tables: Tables, used_ms: Mapping[ChunkId, int]) -> None:
    """Note when chunks were last used; ids that are not held are passed over."""
    for chunk_id, now_ms in used_ms.items():
        row = sound_row(tables, chunk_id)
        if row is not None and row.n_groups and row.used_ms < now_ms:
            write_row(tables, chunk_id, row._replace(used_ms=now_ms))


def meta(tables: Tables, chunk_id: ChunkId) -> ChunkMeta:
    """Raises ChunkNotFoundError and RecordDamagedError."""
    row = chunk_row(tables, chunk_id)
    if row is None:
        raise not_found(chunk_id, "was never put")
    return row.meta(chunk_id)


def page_of_rows(tables: Tables, after: ChunkId, limit: int) -> Iterator[tuple[ChunkId, ChunkRow | RecordDamagedError]]:
    """At most `limit` chunk rows behind an id, in order of id, with the error in the place of a damaged one."""
    for key, value in tables.scan("metas", after=after):
        if limit == 0:
            return
        limit -= 1
        try:
            yield key, unpack_chunk(key, value)
        except RecordDamagedError as error:
            yield key, error


def refer(tables: Tables, chunk_id: ChunkId, change: int, *, pins: int = 0) -> None:
    """Add to a chunk's references and pins; without any reference left, the chunk is deleted with its KV."""
    row = sound_row(tables, chunk_id)
    if row is None:  # or damaged: its references are counted anew when it is put again
        return
    if row.refcount + change > 0:
        write_row(tables, chunk_id, row._replace(refcount=row.refcount + change, pins=max(0, row.pins + pins)))
    else:
        delete(tables, chunk_id)


def delete(tables: Tables, chunk_id: ChunkId) -> None:
    """Delete a chunk's row and KV."""
    write_row(tables, chunk_id, None)
    _drop_kv(tables, chunk_id)


def write_row(tables: Tables, chunk_id: ChunkId, row: ChunkRow | None) -> None:
    """Replace a chunk's row and keep the order of use and the totals right."""
    try:
        old = chunk_row(tables, chunk_id)
        was_damaged = False
    except RecordDamagedError:
        old, was_damaged = None, True
    before, after = lru_entry(chunk_id, old), lru_entry(chunk_id, row)
    if before != after:
        if before is not None:
            tables.delete("lru", before)
        if after is not None:
            tables.put("lru", after, b"")
    if row is None:
        tables.delete("metas", chunk_id)
    else:
        tables.put("metas", chunk_id, pack_chunk(chunk_id, row))
    if was_damaged:  # what the old row had added, and where it stood, is unknown
        for key in [key for key in tables.keys("lru") if key.endswith(chunk_id) and key != after]:
            tables.delete("lru", key)
        write_recount(tables)
    else:
        count_chunk(tables, old, row)


def lru_entry(chunk_id: ChunkId, row: ChunkRow | None) -> bytes | None:
    """The key that a chunk has in the order of use: none unless its KV is held and may be evicted."""
    return None if row is None or not row.n_groups or row.pins else lru_key(row.used_ms, chunk_id)


def _is_whole(tables: Tables, chunk_id: ChunkId) -> bool:
    row = sound_row(tables, chunk_id)
    return row is not None and row.n_groups > 0


def _is_evicted(tables: Tables, chunk_id: ChunkId) -> bool:
    row = sound_row(tables, chunk_id)
    return row is not None and row.is_evicted


def _references(tables: Tables, chunk_id: ChunkId) -> tuple[int, int]:
    """References to a chunk, and pinned documents among those that refer to it."""
    try:
        row = chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return count_references(tables).get(chunk_id, (0, 0))
    return (0, 0) if row is None else (row.refcount, row.pins)


def count_references(tables: Tables) -> dict[ChunkId, tuple[int, int]]:
    """References and pins of every chunk, by a scan of all references."""
    refcounts: Counter[ChunkId] = Counter()
    pins: Counter[ChunkId] = Counter()
    for key, group in groupby(tables.scan("refs"), key=lambda entry: entry[0][: 2 * ID_BYTES]):
        value = tables.get("documents", key)
        if value is None:
            continue
        found: Counter[ChunkId] = Counter()
        for ref, entry in group:
            try:
                found[unpack_ref(ref, entry, "").chunk_id] += 1
            except RecordDamagedError:
                continue
        refcounts.update(found)
        if _is_pinned(key, value):
            pins.update(found.keys())
    return {chunk_id: (n_refs, pins[chunk_id]) for chunk_id, n_refs in refcounts.items()}


def _is_pinned(key: bytes, value: Buffer) -> bool:
    try:
        return unpack_document(key, value).pinned
    except RecordDamagedError:
        return False


def _drop_kv(tables: Tables, chunk_id: ChunkId) -> None:
    for key in list(tables.keys("kv", chunk_id)):
        tables.delete("kv", key)


def not_found(chunk_id: ChunkId, reason: str) -> ChunkNotFoundError:
    return ChunkNotFoundError(f"chunk {chunk_id.hex()} {reason}; prefill its document", (chunk_id,))


def stored_bytes(tables: Tables, chunk_id: ChunkId) -> int:
    """Bytes of a chunk's KV records, 0 if it is missing or its row is damaged."""
    row = sound_row(tables, chunk_id)
    return row.kv_bytes if row is not None and row.n_groups else 0
