"""Chunk KV kept in memory between questions: least recently used first out, bounded in bytes.

- Entries are content-addressed and never change, so an entry can be old but never wrong. A question holds references to
  the tensors that it uses: eviction frees an entry for the pool, not under a running answer. What running questions
  hold of evicted entries comes on top of the budget.
- One copy a chunk: whoever misses a chunk loads it, and others that want it meanwhile wait for that.
- On a CUDA device entries are contiguous tensors of the device in the model's dtype (see `uploads`); elsewhere they are
  what the store gives.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from pdllm_store import ChunkId, ChunkKV, ChunkStore, Fetched

from pdllm_rag.lanes import CudaLane, Mark
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.uploads import Uploads

LEAST_BYTES = 1 << 30  # of a default budget
DEVICE_SHARE = 0.2  # of a GPU's free memory: the default budget there

_pools: weakref.WeakSet[KVPool] = weakref.WeakSet()


def default_budget(device: torch.device) -> int:
    """Bytes of a pool whose user names none: 1 GiB, or a fifth of what is free on a GPU now, if that is more."""
    if device.type != "cuda":
        return LEAST_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(LEAST_BYTES, int(DEVICE_SHARE * free))


class _Entry(NamedTuple):
    kv: ChunkKV
    ready: Mark | None  # behind the copies that fill it; None: it is filled

    @property
    def n_bytes(self) -> int:
        return self.kv.k.nbytes + self.kv.v.nbytes


class _Flight:
    """One thread's load, which others may wait for."""

    def __init__(self) -> None:
        self.chunk_ids: list[ChunkId] = []
        self.entries: dict[ChunkId, _Entry] = {}  # empty if the load failed
        self.unwanted: set[ChunkId] = set()  # not to be kept, because they were dropped meanwhile
        self.ended = threading.Event()


class KVPool:
    """A bounded cache in front of a store.

    Args:
        fetch: gets the KV that is not in memory; None asks the store.
        budget_bytes: most bytes kept; one acquisition may exceed it while it lasts.
        uploads: brings what is missing to a device; None keeps it as it is got.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        fetch: Callable[[Sequence[ChunkId]], Fetched] | None = None,
        budget_bytes: int = LEAST_BYTES,
        uploads: Uploads | None = None,
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"pool budget is {budget_bytes} bytes; expected 0 or more")
        self._store = store
        self._fetch = fetch
        self._uploads = uploads
        self._budget = budget_bytes
        self._entries: OrderedDict[ChunkId, _Entry] = OrderedDict()
        self.renew()
        _pools.add(self)

    @classmethod
    def beside(
        cls,
        backbone: Backbone,
        store: ChunkStore,
        *,
        fetch: Callable[[Sequence[ChunkId]], Fetched] | None = None,
        budget_bytes: int | None = None,
    ) -> KVPool:
        """A pool for a model, on the model's device if that is a CUDA device, else in the host's memory.

        Args:
            budget_bytes: None takes `default_budget`.
        """
        uploads = None
        if backbone.device.type == "cuda":
            shape = (backbone.n_layers, backbone.n_kv_heads, backbone.head_dim)
            uploads = Uploads(store, CudaLane(backbone.device), shape=shape, dtype=backbone.dtype)
        budget = default_budget(backbone.device) if budget_bytes is None else budget_bytes
        return cls(store, fetch=fetch, budget_bytes=budget, uploads=uploads)

    def acquire(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        """KV of every chunk, from memory, else from the store, which computes again what it lacks.

        On a device it is for use on the stream that is current here. `recomputed` names what this call had computed,
        not what it found or waited for.

        Raises:
            ChunkNotFoundError: a chunk is known to nobody.
            RecordDamagedError: a chunk is damaged beyond its KV.
        """
        wanted = list(dict.fromkeys(chunk_ids))
        found: dict[ChunkId, _Entry] = {}
        recomputed: frozenset[ChunkId] = frozenset()
        while len(found) < len(wanted):  # again only after another thread's load has failed
            flight = _Flight()
            try:
                held, others = self._claim([chunk_id for chunk_id in wanted if chunk_id not in found], flight)
                if held:
                    self._store.touch(held)
                if flight.chunk_ids:
                    recomputed |= self._load(flight)
            finally:
                self._land(flight)
            found |= held | flight.entries
            for chunk_id, other in others.items():  # after its own load: so no two wait for each other
                other.ended.wait()
                if chunk_id in other.entries:
                    found[chunk_id] = other.entries[chunk_id]
        for kv, ready in found.values():
            if ready is not None:
                ready.follow(kv)
        return Fetched({chunk_id: found[chunk_id].kv for chunk_id in wanted}, recomputed)

    def retain(self, chunk_ids: Collection[ChunkId]) -> None:
        """Drop every entry that is not among these, after documents were deleted or replaced.

        What is being loaded now is handed to those that wait for it, and not kept either.
        """
        with self._lock:
            for chunk_id in [held for held in self._entries if held not in chunk_ids]:
                self._bytes -= self._entries.pop(chunk_id).n_bytes
            for chunk_id, flight in self._flights.items():
                if chunk_id not in chunk_ids:
                    flight.unwanted.add(chunk_id)

    @property
    def budget_bytes(self) -> int:
        """Most bytes kept."""
        return self._budget

    @property
    def n_bytes(self) -> int:
        """Bytes kept now."""
        with self._lock:
            return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def renew(self) -> None:
        """In a forked child: the parent's threads do not exist here, may have held the lock, and end no load."""
        self._lock = threading.Lock()
        self._bytes = sum(entry.n_bytes for entry in self._entries.values())
        self._flights: dict[ChunkId, _Flight] = {}

    def _claim(
        self, chunk_ids: Sequence[ChunkId], flight: _Flight
    ) -> tuple[dict[ChunkId, _Entry], dict[ChunkId, _Flight]]:
        """What is held, and who is loading what; the flight takes the rest."""
        held, others = {}, {}
        with self._lock:
            for chunk_id in chunk_ids:
                if chunk_id in self._entries:
                    self._entries.move_to_end(chunk_id)
                    held[chunk_id] = self._entries[chunk_id]
                elif chunk_id in self._flights:
                    others[chunk_id] = self._flights[chunk_id]
                else:
                    flight.chunk_ids.append(chunk_id)
                    self._flights[chunk_id] = flight
        return held, others

    def _load(self, flight: _Flight) -> frozenset[ChunkId]:
        """Fill a flight; the chunks that were computed again."""
        ready: Mark | None = None
        if self._uploads is None:
            fetched = (self._fetch or self._store.fetch)(flight.chunk_ids)
            kv = {chunk_id: _on_its_own(fetched.kv[chunk_id]) for chunk_id in flight.chunk_ids}
        else:
            if self._fetch is None:
                fetched, ready = self._uploads.load(flight.chunk_ids)
            else:
                fetched, ready = self._uploads.put(self._fetch(flight.chunk_ids))
            kv = {chunk_id: fetched.kv[chunk_id] for chunk_id in flight.chunk_ids}
        flight.entries = {chunk_id: _Entry(chunk, ready) for chunk_id, chunk in kv.items()}
        return fetched.recomputed

    def _land(self, flight: _Flight) -> None:
        """Keep what a flight brought, as far as the budget goes, and let go those that wait for it."""
        with self._lock:
            for chunk_id in flight.chunk_ids:
                if self._flights.get(chunk_id) is flight:
                    del self._flights[chunk_id]
            for chunk_id, entry in flight.entries.items():
                if chunk_id not in flight.unwanted and chunk_id not in self._entries:
                    self._entries[chunk_id] = entry
                    self._bytes += entry.n_bytes
            while self._bytes > self._budget:
                self._bytes -= self._entries.popitem(last=False)[1].n_bytes
        flight.ended.set()


def _on_its_own(kv: ChunkKV) -> ChunkKV:
    """Copies of tensors that are parts of larger ones, which would stay in memory as well and be counted nowhere."""
    return ChunkKV(
        *(
            tensor
            if tensor.untyped_storage().nbytes() == tensor.nbytes
            else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in kv
        )
    )


def _renew_pools() -> None:
    for pool in list(_pools):
        pool.renew()


os.register_at_fork(after_in_child=_renew_pools)
