"""Chunk KV by whichever way is cheaper on this machine: reading it from the store, or computing it again.

A model with many KV heads and a fast processor can compute a chunk sooner than a disk delivers it (docs/models.md has
figures). Both rates are measured while questions are answered: the first question reads, the second computes half of
its chunks (one alone would say little: a GPU takes hardly longer for several), and from then on the cheaper way is
taken and its rate kept up to date.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pdllm_store import ChunkId, ChunkKV, ChunkStore, Fetched, Recompute

_NEWEST = 0.3  # weight of the latest measurement


class CheaperFetch:
    """`ChunkStore.fetch`, or computing; which one it was is in `Fetched.recomputed`.

    Raises:
        ValueError: the store keeps int8; what is computed would differ from it, and answers would depend on timing.
    """

    def __init__(self, store: ChunkStore, recompute: Recompute) -> None:
        if store.kv_dtype == "int8":
            raise ValueError(
                "KV is loaded from an int8 store only: computed KV is not rounded like it, so answers would depend on "
                "which way was faster; leave `load` at 'store', or use a bfloat16 store"
            )
        self._store = store
        self._recompute = recompute
        self._lock = threading.Lock()
        self._load_s: float | None = None  # of one token
        self._compute_s: float | None = None

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Seconds a token that loading and computing took lately; None while it was never measured."""
        return self._load_s, self._compute_s

    def __call__(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        """KV of distinct chunks.

        Raises:
            ChunkNotFoundError, RecordDamagedError: as `ChunkStore.fetch`.
        """
        if not chunk_ids or self._load_s is None:
            return self._load(chunk_ids)
        if self._compute_s is None:
            half = -(-len(chunk_ids) // 2)
            probe, rest = self._compute(chunk_ids[:half]), self._load(chunk_ids[half:])
            return Fetched({**probe.kv, **rest.kv}, probe.recomputed | rest.recomputed)
        return self._compute(chunk_ids) if self._compute_s < self._load_s else self._load(chunk_ids)

    def _load(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        started = time.perf_counter()
        fetched = self._store.fetch(chunk_ids)
        if fetched.kv and not fetched.recomputed:
            self._load_s = self._updated(self._load_s, started, fetched.kv)
        return fetched

    def _compute(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        started = time.perf_counter()
        metas = [self._store.meta(chunk_id) for chunk_id in chunk_ids]
        kv = {meta.chunk_id: chunk for batch in self._recompute(metas) for meta, chunk in batch}
        self._compute_s = self._updated(self._compute_s, started, kv)
        self._store.touch(chunk_ids)
        return Fetched({chunk_id: kv[chunk_id] for chunk_id in chunk_ids}, frozenset(kv))

    def _updated(self, rate: float | None, started: float, kv: dict[ChunkId, ChunkKV]) -> float:
        latest = (time.perf_counter() - started) / sum(chunk.k.shape[1] for chunk in kv.values())
        with self._lock:
            return latest if rate is None else (1 - _NEWEST) * rate + _NEWEST * latest
