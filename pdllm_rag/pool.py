"""Chunk KV kept in memory between questions: least recently used first out, bounded in bytes.

Entries are content-addressed and never change, so an entry can be old but never wrong. A question holds references to
the tensors that it uses: eviction frees an entry for the pool, not under a running answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from pdllm_store import ChunkId, ChunkKV, ChunkStore, Fetched


class KVPool:
    """A bounded cache in front of a store.

    Args:
        fetch: gets the KV that is not in memory; None asks the store.
        budget_bytes: most bytes kept; one acquisition may exceed it while it lasts.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        fetch: Callable[[Sequence[ChunkId]], Fetched] | None = None,
        budget_bytes: int = 1 << 30,
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"pool budget is {budget_bytes} bytes; expected 0 or more")
        self._store = store
        self._fetch = fetch or store.fetch
        self._budget = budget_bytes
        self._entries: OrderedDict[ChunkId, ChunkKV] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def acquire(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        """KV of every chunk, from memory, else from the store, which computes again what it lacks.

        Raises:
            ChunkNotFoundError: a chunk is known to nobody.
            RecordDamagedError: a chunk is damaged beyond its KV.
        """
        wanted = list(dict.fromkeys(chunk_ids))
        held: dict[ChunkId, ChunkKV] = {}
        with self._lock:
            for chunk_id in wanted:
                if chunk_id in self._entries:
                    self._entries.move_to_end(chunk_id)
                    held[chunk_id] = self._entries[chunk_id]
        if held:
            self._store.touch(held)
        fetched = self._fetch([chunk_id for chunk_id in wanted if chunk_id not in held])
        for chunk_id, entry in fetched.kv.items():
            self._keep(chunk_id, entry)
        kv = held | fetched.kv
        return Fetched({chunk_id: kv[chunk_id] for chunk_id in wanted}, fetched.recomputed)

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
