"""The store's totals, kept in the transactions that change them, so that neither opening nor `stats` scans anything."""

from __future__ import annotations

import secrets
import struct
from collections import defaultdict
from typing import NamedTuple

import xxhash

from pdllm_store.errors import RecordDamagedError
from pdllm_store.rows import ChunkRow, seal, unpack_chunk, unseal
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ModelStats

_STATE_KEY = b"state"
_STATE = struct.Struct("<2Q")
_COUNTS = struct.Struct("<6Q")
_LARGEST_STEP = 1 << 31


class State(NamedTuple):
    """What is counted for the store as a whole."""

    generation: int = 0  # raised by every change of documents, in random steps
    evictions: int = 0


def read_state(tables: Tables) -> State:
    """Raises RecordDamagedError."""
    value = tables.get("manifest", _STATE_KEY)
    return State() if value is None else State(*_STATE.unpack(unseal("state", _STATE_KEY, value)))


def state_or_new(tables: Tables) -> State:
    """A damaged row counts as lost: the generation then starts above every number that was counted up to."""
    try:
        return read_state(tables)
    except RecordDamagedError:
        value = tables.get("manifest", _STATE_KEY) or b""
        # Above every number that was counted up to, and the same until the row is written again.
        return State(generation=(1 << 62) + (xxhash.xxh3_64_intdigest(bytes(value)) >> 3))


def count_generation(tables: Tables) -> None:
    """Say that documents were changed.

    The step is random, so that copies of a store that went different ways do not meet at a number again.
    """
    state = state_or_new(tables)
    _write_state(tables, state._replace(generation=state.generation + 1 + secrets.randbelow(_LARGEST_STEP)))


def set_generation(tables: Tables, generation: int) -> None:
    """Take over the number of another copy of the same documents."""
    _write_state(tables, state_or_new(tables)._replace(generation=generation))


def count_evictions(tables: Tables, n_chunks: int) -> None:
    state = state_or_new(tables)
    _write_state(tables, state._replace(evictions=state.evictions + n_chunks))


def read_counts(tables: Tables) -> dict[bytes, ModelStats]:
    """By fingerprint digest. Raises RecordDamagedError."""
    return {key: _unpack(key, value) for key, value in tables.scan("counts")}


def count_documents(tables: Tables, fingerprint: bytes, change: int) -> None:
    """Add to the number of documents of a fingerprint, after they were changed."""
    _add(tables, fingerprint, ModelStats(documents=change))


def count_chunk(tables: Tables, old: ChunkRow | None, new: ChunkRow | None) -> None:
    """Account for a chunk row (after it was put, changed or deleted)."""
    row = new or old
    before, after = _of_row(old), _of_row(new)
    if row is not None and before != after:
        _add(tables, row.fingerprint, ModelStats(*(b - a for a, b in zip(before, after, strict=True))))


def recount(tables: Tables) -> dict[bytes, ModelStats]:
    """The totals by a scan of all chunk rows and documents; damaged rows count for nothing."""
    found: dict[bytes, ModelStats] = defaultdict(ModelStats)
    for key, value in tables.scan("metas"):
        try:
            row = unpack_chunk(key, value)
        except RecordDamagedError:
            continue
        found[row.fingerprint] = _sum(found[row.fingerprint], _of_row(row))
    for key in tables.keys("documents"):
        found[key[:ID_BYTES]] = _sum(found[key[:ID_BYTES]], ModelStats(documents=1))
    return {key: counts for key, counts in found.items() if any(counts)}


def write_recount(tables: Tables) -> None:
    """Replace all totals by counting anew."""
    _write_state(tables, state_or_new(tables))
    for key in list(tables.keys("counts")):
        tables.delete("counts", key)
    for key, counts in recount(tables).items():
        tables.put("counts", key, seal(key, _COUNTS.pack(*counts)))


def _add(tables: Tables, fingerprint: bytes, change: ModelStats) -> None:
    value = tables.get("counts", fingerprint)
    try:
        counts = _sum(ModelStats() if value is None else _unpack(fingerprint, value), change)
        tables.put("counts", fingerprint, seal(fingerprint, _COUNTS.pack(*counts)))
    except (RecordDamagedError, struct.error):  # struct.error: below zero, after rows were lost
        write_recount(tables)


def _unpack(key: bytes, value: bytes | bytearray | memoryview) -> ModelStats:
    return ModelStats(*_COUNTS.unpack(unseal("counts", key, value)))


def _sum(a: ModelStats, b: ModelStats) -> ModelStats:
    return ModelStats(*(x + y for x, y in zip(a, b, strict=True)))


def _of_row(row: ChunkRow | None) -> ModelStats:
    if row is None:
        return ModelStats()
    if not row.n_groups:
        return ModelStats(evicted=int(row.is_evicted))
    return ModelStats(chunks=1, orphans=int(row.refcount == 0), tokens=row.n_tokens, kv_bytes=row.kv_bytes)


def _write_state(tables: Tables, state: State) -> None:
    tables.put("manifest", _STATE_KEY, seal(_STATE_KEY, _STATE.pack(*state)))
