"""What the tables hold of chunks: one row each, and while their KV is whole, one record for each layer group.

Every function works inside one transaction, so a chunk is either whole or absent for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdllm_store import record
from pdllm_store.codec import TORCH_DTYPES, block_bytes
from pdllm_store.counts import count_chunk, recount, write_counts
from pdllm_store.errors import ChunkNotFoundError, RecordDamagedError
from pdllm_store.rows import ChunkRow, kv_key, pack_chunk, unpack_chunk
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ChunkId, ChunkKV, ChunkMeta, ModelFingerprint

GROUP_BYTES = 1 << 20  # LMDB writes records of about this size two to three times faster than larger ones


class EncodedChunk(NamedTuple):
    """A chunk ready to be written; made outside the transaction, so that the writer's lock is held briefly."""

    chunk_id: ChunkId
    row: ChunkRow  # with no references yet
    records: list[bytearray]


def check_chunk(fingerprint: ModelFingerprint, meta: ChunkMeta, kv: ChunkKV) -> None:
    """Raises ValueError if the id is not that of the tokens under the fingerprint, or a shape does not fit."""
    token_ids = np.asarray(meta.token_ids)
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


def encode_chunk(
    fingerprint: ModelFingerprint, meta: ChunkMeta, kv: ChunkKV, *, group_bytes: int = GROUP_BYTES
) -> EncodedChunk:
    """Encode a checked chunk in layer groups of about `group_bytes`.

    Raises:
        ValueError: its dtype cannot be stored in the fingerprint's.
    """
    token_ids = np.ascontiguousarray(meta.token_ids, dtype="<i4")
    n_layers, n_tokens, n_kv_heads, head_dim = kv.k.shape
    layer_bytes = 2 * block_bytes((n_tokens, n_kv_heads, head_dim), fingerprint.kv_dtype)
    n_group_layers = max(1, group_bytes // layer_bytes)
    records = []
    for start in range(0, n_layers, n_group_layers):
        end = min(start + n_group_layers, n_layers)
        header = record.RecordHeader(
            chunk_id=meta.chunk_id,
            fingerprint=fingerprint.digest,
            layer_start=start,
            n_layers=end - start,
            n_layers_all=n_layers,
            n_tokens=n_tokens,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            kv_dtype=fingerprint.kv_dtype,
        )
        records.append(record.build(header, kv.k[start:end], kv.v[start:end]))
    sketch = None if meta.sketch is None else np.ascontiguousarray(meta.sketch, dtype="<f2").tobytes()
    kv_bytes = sum(len(data) for data in records)
    row = ChunkRow(0, len(records), kv_bytes, fingerprint.digest, token_ids.tobytes(), sketch)
    return EncodedChunk(meta.chunk_id, row, records)


def chunk_row(tables: Tables, chunk_id: ChunkId) -> ChunkRow | None:
    """Raises RecordDamagedError."""
    value = tables.get("metas", chunk_id)
    return None if value is None else unpack_chunk(chunk_id, value)


def missing(tables: Tables, chunk_ids: Iterable[ChunkId]) -> list[ChunkId]:
    """The distinct ids without whole KV, in the order given; a chunk whose row is damaged counts as missing."""
    return [chunk_id for chunk_id in dict.fromkeys(chunk_ids) if not _is_whole(tables, chunk_id)]


def put_chunks(tables: Tables, chunks: Sequence[EncodedChunk]) -> int:
    """Write the chunks that are not held yet; returns the bytes of their KV records."""
    n_written = 0
    for chunk in chunks:
        if _is_whole(tables, chunk.chunk_id):
            continue
        write_row(tables, chunk.chunk_id, chunk.row._replace(refcount=_refcount(tables, chunk.chunk_id)))
        for group, data in enumerate(chunk.records):
            tables.put("kv", kv_key(chunk.chunk_id, group), data)
            n_written += len(data)
    return n_written


def load(tables: Tables, chunk_id: ChunkId, *, verify: bool) -> ChunkKV:
    """Raises ChunkNotFoundError and RecordDamagedError."""
    records = _records(tables, chunk_id, verify=verify)
    header = records[0].header
    shape = (header.n_layers_all, *header.shape[1:])
    kv = ChunkKV(*(torch.empty(shape, dtype=TORCH_DTYPES[header.kv_dtype]) for _ in range(2)))
    _copy_out(records, kv)
    return kv


def load_into(tables: Tables, chunk_id: ChunkId, kv: ChunkKV, *, verify: bool) -> None:
    """As `load`, but into given tensors; on any error they are untouched.

    Raises:
        ChunkNotFoundError, RecordDamagedError, and ValueError for a wrong shape or dtype.
    """
    records = _records(tables, chunk_id, verify=verify)
    header = records[0].header
    shape = (header.n_layers_all, *header.shape[1:])
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is a {tensor.dtype} tensor {tuple(tensor.shape)}, the chunk needs a float tensor {shape}"
            )
    _copy_out(records, kv)


def check(tables: Tables, chunk_id: ChunkId) -> None:
    """Read and checksum every record of a chunk.

    Raises:
        ChunkNotFoundError: no whole KV.
        RecordDamagedError: row or KV is damaged.
    """
    _records(tables, chunk_id, verify=True)


def discard(tables: Tables, chunk_ids: Iterable[ChunkId]) -> None:
    """Drop KV, keep rows; a damaged row counts as missing already and stays for `put_chunks` to replace."""
    for chunk_id in dict.fromkeys(chunk_ids):
        try:
            row = chunk_row(tables, chunk_id)
        except RecordDamagedError:
            _drop_kv(tables, chunk_id)
            continue
        if row is not None and row.n_groups:
            write_row(tables, chunk_id, row._replace(n_groups=0, kv_bytes=0))
            _drop_kv(tables, chunk_id)


def meta(tables: Tables, chunk_id: ChunkId) -> ChunkMeta:
    """Raises ChunkNotFoundError and RecordDamagedError."""
    row = chunk_row(tables, chunk_id)
    if row is None:
        raise _not_found(chunk_id, "was never put")
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


def refer(tables: Tables, chunk_id: ChunkId, change: int) -> None:
    """Add to a chunk's references; without any left, the chunk is deleted with its KV."""
    try:
        row = chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return  # its references are counted anew when it is put again
    if row is None:
        return
    if row.refcount + change > 0:
        write_row(tables, chunk_id, row._replace(refcount=row.refcount + change))
    else:
        delete(tables, chunk_id)


def delete(tables: Tables, chunk_id: ChunkId) -> None:
    """Delete a chunk's row and KV."""
    write_row(tables, chunk_id, None)
    _drop_kv(tables, chunk_id)


def write_row(tables: Tables, chunk_id: ChunkId, row: ChunkRow | None) -> None:
    """Replace a chunk's row and keep the totals right."""
    try:
        old = chunk_row(tables, chunk_id)
        was_damaged = False
    except RecordDamagedError:
        old, was_damaged = None, True
    if row is None:
        tables.delete("metas", chunk_id)
    else:
        tables.put("metas", chunk_id, pack_chunk(chunk_id, row))
    if was_damaged:
        write_counts(tables, recount(tables))  # what the old row had added is unknown
    else:
        count_chunk(tables, old, row)


def _is_whole(tables: Tables, chunk_id: ChunkId) -> bool:
    try:
        row = chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return False
    return row is not None and row.n_groups > 0


def _refcount(tables: Tables, chunk_id: ChunkId) -> int:
    try:
        row = chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return sum(1 for _, value in tables.scan("refs") if bytes(value[8 : 8 + ID_BYTES]) == chunk_id)
    return 0 if row is None else row.refcount


def _drop_kv(tables: Tables, chunk_id: ChunkId) -> None:
    for key in [key for key, _ in tables.scan("kv", chunk_id)]:
        tables.delete("kv", key)


def _records(tables: Tables, chunk_id: ChunkId, *, verify: bool) -> list[record.Record]:
    """All groups of a chunk in layer order, each checked; views into the transaction."""
    row = chunk_row(tables, chunk_id)
    if row is None:
        raise _not_found(chunk_id, "is not in the store")
    if not row.n_groups:
        raise _not_found(chunk_id, "has no KV any more")
    records: list[record.Record] = []
    n_layers = 0
    for group in range(row.n_groups):
        data = tables.get("kv", kv_key(chunk_id, group))
        if data is None:
            raise RecordDamagedError(
                f"chunk {chunk_id.hex()}: layer group {group} of {row.n_groups} is absent; discard it and prefill again"
            )
        parsed = record.parse(data, chunk_id=chunk_id, fingerprint=row.fingerprint, layer_start=n_layers, verify=verify)
        n_layers += parsed.header.n_layers
        records.append(parsed)
    forms = {(r.header.n_layers_all, r.header.shape[1:], r.header.kv_dtype) for r in records}
    expected = (n_layers, row.n_tokens)
    if len(forms) != 1 or (records[0].header.n_layers_all, records[0].header.n_tokens) != expected:
        raise RecordDamagedError(
            f"chunk {chunk_id.hex()}: its layer groups say {sorted(forms)}, expected one form with (layers, tokens) = "
            f"{expected}; discard it and prefill again"
        )
    return records


def _copy_out(records: list[record.Record], kv: ChunkKV) -> None:
    for parsed in records:
        start, end = parsed.header.layer_start, parsed.header.layer_start + parsed.header.n_layers
        parsed.decode_into(kv.k[start:end], kv.v[start:end])


def _not_found(chunk_id: ChunkId, reason: str) -> ChunkNotFoundError:
    return ChunkNotFoundError(f"chunk {chunk_id.hex()} {reason}; prefill its document", (chunk_id,))


def stored_bytes(tables: Tables, chunk_id: ChunkId) -> int:
    """Bytes of a chunk's KV records, 0 if it is missing or its row is damaged."""
    try:
        row = chunk_row(tables, chunk_id)
    except RecordDamagedError:
        return 0
    return 0 if row is None else row.kv_bytes
