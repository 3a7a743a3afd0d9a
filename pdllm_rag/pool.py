"""Chunk KV kept in memory between questions: least recently used first out, bounded in bytes.

Entries are content-addressed and never change, so an entry can be old but never wrong. A question holds references to
the tensors that it uses: eviction frees an entry for the pool, not under a running answer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkKV, ChunkNotFoundError, ChunkStore, RecordDamagedError

logger = logging.getLogger(__name__)


class Acquired(NamedTuple):
    """KV of the chunks asked for, and which of them had to be computed again."""

    kv: dict[ChunkId, ChunkKV]
    recomputed: frozenset[ChunkId]


class KVPool:
    """A bounded cache in front of a store.

    Args:
        recompute: encodes and stores a chunk anew whose record is gone or damaged.
        budget_bytes: most bytes kept; one acquisition may exceed it while it lasts.
    """

    def __init__(
        self, store: ChunkStore, recompute: Callable[[ChunkId], ChunkKV], *, budget_bytes: int = 1 << 30
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"pool budget is {budget_bytes} bytes; expected 0 or more")
        self._store = store
        self._recompute = recompute
        self._budget = budget_bytes
        self._entries: OrderedDict[ChunkId, ChunkKV] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def acquire(self, chunk_ids: Sequence[ChunkId]) -> Acquired:
        """KV of every chunk, from memory, else from the store, else computed again.

        Raises:
            ChunkNotFoundError: a chunk is known to nobody.
        """
        kv: dict[ChunkId, ChunkKV] = {}
        recomputed = set()
        for chunk_id in dict.fromkeys(chunk_ids):
            with self._lock:
                entry = self._entries.get(chunk_id)
                if entry is not None:
                    self._entries.move_to_end(chunk_id)
            if entry is None:
                try:
                    entry = self._store.load(chunk_id)
                except (RecordDamagedError, ChunkNotFoundError) as error:
                    logger.warning("chunk %s is computed again: %s", chunk_id.hex(), error)
                    entry = self._recompute(chunk_id)
                    recomputed.add(chunk_id)
                self._keep(chunk_id, entry)
            kv[chunk_id] = entry
        return Acquired(kv, frozenset(recomputed))

    def retain(self, chunk_ids: Collection[ChunkId]) -> None:
        """Drop every entry that is not among these, after documents were deleted or replaced."""
        with self._lock:
            for chunk_id in [held for held in self._entries if held not in chunk_ids]:
                self._bytes -= _size(self._entries.pop(chunk_id))

    def __len__(self) -> int:
        return len(self._entries)

    def _keep(self, chunk_id: ChunkId, entry: ChunkKV) -> None:
        with self._lock:
            if chunk_id in self._entries:
                return
            self._entries[chunk_id] = entry
            self._bytes += _size(entry)
            while self._bytes > self._budget and self._entries:
                _, evicted = self._entries.popitem(last=False)
                self._bytes -= _size(evicted)


def _size(kv: ChunkKV) -> int:
    return kv.k.nbytes + kv.v.nbytes
