"""Keeping a store below its cap: the KV that was not used for the longest time goes first.

- What goes is KV only. Documents, texts and token ids stay, so that a chunk can be computed again when it is needed.
- Pinned documents keep their KV, and so do chunks that no document refers to yet for an hour: a prefill is at work.
- LMDB needs runs of free pages for large values and never gives pages back, so the file would grow beyond the bytes in
  use. Keeping a fifth of the cap free holds the file below it (docs/store-format.md); if it comes close all the same,
  half of the cap is kept free.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from pdllm_store import chunks
from pdllm_store.counts import count_evictions
from pdllm_store.rows import ChunkRow, pack_map, parse_lru_key, unpack_map
from pdllm_store.tables import Space, Tables
from pdllm_store.types import ChunkId

UNFINISHED_MS = 3_600_000  # for so long, a chunk that no document refers to is taken for a prefill at work
PAGE_BYTES = 4096
MIN_CAP = 1 << 20
_FILL, _FILL_NEAR_CAP = 0.8, 0.5  # of the cap
_AHEAD = 64  # this part of the cap is freed at once, so that not every write has to
_LIMITS_KEY = b"limits"
_LARGE_VALUE = 2000  # bytes from which LMDB gives a value pages of its own


def now_ms() -> int:
    """Wall clock, because it must mean the same to every process and after a restart."""
    return time.time_ns() // 1_000_000


def read_max_bytes(tables: Tables) -> int | None:
    """The cap that the store remembers. Raises RecordDamagedError."""
    value = tables.get("manifest", _LIMITS_KEY)
    return None if value is None else unpack_map("limits", _LIMITS_KEY, value)["max_bytes"]


def write_max_bytes(tables: Tables, max_bytes: int | None) -> None:
    tables.put("manifest", _LIMITS_KEY, pack_map(_LIMITS_KEY, {"max_bytes": max_bytes}))


def check_max_bytes(max_bytes: int | None) -> None:
    """Raises ValueError."""
    if max_bytes is None:
        return
    if not isinstance(max_bytes, int) or not MIN_CAP <= max_bytes < 1 << 63:
        raise ValueError(f"max_bytes is {max_bytes!r}, expected whole bytes, at least {MIN_CAP}, or None for no cap")


def bytes_too_many(space: Space, needed: int, cap: int) -> int:
    """How many bytes in use must go before `needed` more may be written; 0 or less if they may be at once."""
    file_bytes = space.used_bytes + space.free_bytes
    fill = _FILL if file_bytes + needed <= cap else _FILL_NEAR_CAP
    return space.used_bytes + needed - int(fill * cap)


def could_ever_hold(cap: int) -> int:
    """Bytes that one write may take at most."""
    return int(_FILL * cap)


def written_bytes(sizes: Iterable[int]) -> int:
    """The most that values of these sizes take of a file, trees included."""
    total = 4 * PAGE_BYTES
    for size in sizes:
        total += _pages(size + 16) if size > _LARGE_VALUE else 2 * (size + 64)
    return total


def most_written(encoded: Iterable[chunks.EncodedChunk]) -> int:
    """As `written_bytes`, of encoded chunks and their rows."""
    sizes = [[*map(len, chunk.records), len(chunk.row.token_ids) + len(chunk.row.sketch or b"")] for chunk in encoded]
    return written_bytes(itertools.chain.from_iterable(sizes))


def evict(
    tables: Tables, n_bytes: int | None, *, used_before_ms: int | None = None, partly: bool = False
) -> int | None:
    """Drop the KV that was not used for the longest time; returns the number of chunks.

    Args:
        n_bytes: at least so many, None for all that may go.
        used_before_ms: only what was not used since.
        partly: drop what there is if it is less; otherwise nothing is changed then, and None returned.
    """
    freed, strays = 0, []
    victims: list[tuple[ChunkId, ChunkRow]] = []
    for key, chunk_id, row in _oldest_first(tables, used_before_ms):
        if n_bytes is not None and freed >= n_bytes:
            break
        if row is None:
            strays.append(key)
        else:
            victims.append((chunk_id, row))
            freed += row.n_groups * _pages(-(-row.kv_bytes // row.n_groups) + 16)
    if n_bytes is not None and freed < n_bytes and not partly:
        return None
    for key in strays:
        tables.delete("lru", key)
    for chunk_id, row in victims:
        chunks.evict(tables, chunk_id, row)
    count_evictions(tables, len(victims))
    return len(victims)


def mark(tables: Tables) -> None:
    """Write something, and nothing new: LMDB uses freed pages again after another transaction only."""
    count_evictions(tables, 0)


def bytes_ahead(cap: int) -> int:
    """How much more than needed is freed at once."""
    return cap // _AHEAD


def _oldest_first(tables: Tables, used_before_ms: int | None) -> Iterator[tuple[bytes, ChunkId, ChunkRow | None]]:
    """Entries of the order of use with the chunks that may go, None where an entry is none of its chunk."""
    finished_before = now_ms() - UNFINISHED_MS
    for key in tables.keys("lru"):
        used_ms, chunk_id = parse_lru_key(key)
        if used_before_ms is not None and used_ms >= used_before_ms:
            return
        row = chunks.sound_row(tables, chunk_id)
        if chunks.lru_entry(chunk_id, row) != key:
            yield key, chunk_id, None
        elif row is not None and (row.refcount or used_ms < finished_before):
            yield key, chunk_id, row


def _pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
