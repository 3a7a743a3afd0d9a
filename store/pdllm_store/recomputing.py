"""Computing KV again that was evicted, lost or damaged, by a function that the owner of the model gives."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pdllm_store.chunks import sound_row
from pdllm_store.codec import TORCH_DTYPES, decode, encode
from pdllm_store.errors import ChunkNotFoundError, RecordDamagedError, StoreError, StoreReadOnlyError
from pdllm_store.loading import Failure, Read
from pdllm_store.types import ChunkId, ChunkKV, ChunkMeta, KVDtype, ModelFingerprint, Recompute

logger = logging.getLogger(__name__)

Put = Callable[[ModelFingerprint, Iterable[tuple[ChunkMeta, ChunkKV]]], int]
Discard = Callable[[Iterable[ChunkId]], None]
Load = Callable[[ChunkId], ChunkKV]

# The same weights in another batch, dtype or thread count round otherwise; another chunk's KV is off by about 1.4.
TOLERANCE: dict[KVDtype, float] = {"float32": 0.05, "bfloat16": 0.05, "int8": 0.1}
_COMPARED_AT_ONCE = 32
_PAGE_ROWS = 512  # of one read transaction


class Comparison(NamedTuple):
    """What computing a sample again has shown."""

    n_compared: int
    differing: list[ChunkId]


class Recomputing:
    """One function for each model."""

    def __init__(self, kv_dtype: KVDtype) -> None:
        self.lock = threading.RLock()  # whoever holds it computes; the others wait for the result
        self._kv_dtype: KVDtype = kv_dtype
        self._known: dict[bytes, tuple[ModelFingerprint, Recompute]] = {}

    def use(self, fingerprint: ModelFingerprint, recompute: Recompute | None) -> None:
        """Take this function for a model, or none any more."""
        self._known.pop(fingerprint.digest, None)
        if recompute is not None:
            self._known[fingerprint.digest] = (fingerprint, recompute)

    def run(
        self, failures: Mapping[ChunkId, Failure], *, read: Read, put: Put, discard: Discard
    ) -> dict[ChunkId, ChunkKV]:
        """Compute chunks again and write them back; what cannot be written is handed out all the same, and logged.

        Raises:
            ChunkNotFoundError, RecordDamagedError: the failure of a chunk whose token ids or model are not known.
        """
        metas = self._metas(list(failures), read)
        for chunk_id, failure in failures.items():
            if chunk_id not in metas:
                raise failure
            logger.info("computed again: %s", failure)
        damaged = [chunk_id for chunk_id, failure in failures.items() if isinstance(failure, RecordDamagedError)]
        if damaged:
            with _logged("%d damaged chunks stay in the store: %s", len(damaged)):
                discard(damaged)
        found: dict[ChunkId, ChunkKV] = {}
        for fingerprint, given in self._batches(metas):
            batch = list(given)
            with _logged("%d chunks were computed again but not written back: %s", len(batch)):
                put(fingerprint, batch)
            found |= {meta.chunk_id: self._as_stored(kv) for meta, kv in batch}
        for chunk_id in failures:
            if chunk_id not in found:
                raise failures[chunk_id]
        return found

    def check_share(self, share: float) -> None:
        """Raises ValueError if the share is none, or no model has a function to compute it with."""
        if not 0 <= share <= 1:
            raise ValueError(f"the share to compute again is {share}, expected 0 to 1")
        if share and not self._known:
            raise ValueError("no model can compute chunks again here; give the store one by recompute_with")

    def compare(self, chunk_ids: Sequence[ChunkId], *, share: float, seed: int, read: Read, load: Load) -> Comparison:
        """Compute a sample of sound chunks again and compare it with what is stored."""
        if not share:
            return Comparison(0, [])
        known: list[ChunkId] = []
        for start in range(0, len(chunk_ids), _PAGE_ROWS):
            known += self._metas(chunk_ids[start : start + _PAGE_ROWS], read)
        known.sort()
        sample = random.Random(seed).sample(known, math.ceil(share * len(known)))
        differing = []
        n_compared = 0
        for start in range(0, len(sample), _COMPARED_AT_ONCE):
            metas = self._metas(sample[start : start + _COMPARED_AT_ONCE], read)
            for _, batch in self._batches(metas):
                for meta, kv in batch:
                    try:
                        stored = load(meta.chunk_id)
                    except (ChunkNotFoundError, RecordDamagedError):
                        continue  # it was deleted, evicted or damaged since it was found sound
                    n_compared += 1
                    if not difference(stored, kv) <= TOLERANCE[self._kv_dtype]:  # NaN is no agreement
                        differing.append(meta.chunk_id)
        return Comparison(n_compared, differing)

    def _metas(self, chunk_ids: Sequence[ChunkId], read: Read) -> dict[ChunkId, tuple[bytes, ChunkMeta]]:
        """Digest and meta of each chunk whose row is whole and whose model has a function."""
        found = {}
        with read() as tables:
            for chunk_id in chunk_ids:
                row = sound_row(tables, chunk_id)
                if row is not None and row.fingerprint in self._known:
                    found[chunk_id] = (row.fingerprint, row.meta(chunk_id))
        return found

    def _batches(
        self, metas: Mapping[ChunkId, tuple[bytes, ChunkMeta]]
    ) -> Iterator[tuple[ModelFingerprint, Sequence[tuple[ChunkMeta, ChunkKV]]]]:
        for digest in {digest for digest, _ in metas.values()}:
            fingerprint, recompute = self._known[digest]
            wanted = [meta for owner, meta in metas.values() if owner == digest]
            for batch in recompute(wanted):
                yield fingerprint, batch

    def _as_stored(self, kv: ChunkKV) -> ChunkKV:
        """What the store would hand out, so that the first answer after an eviction is that of the next one."""
        if self._kv_dtype == "int8":
            return ChunkKV(*(decode(encode(tensor, "int8"), "int8", tensor.shape) for tensor in kv))
        dtype = TORCH_DTYPES[self._kv_dtype]
        # Copies: a chunk that is a part of its batch's tensor would keep all of it in memory.
        return ChunkKV(*(t.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format) for t in kv))


def difference(stored: ChunkKV, computed: ChunkKV) -> float:
    """The largest relative L2 distance of a layer's keys or values."""
    largest = torch.zeros(())
    for a, b in zip(stored, computed, strict=True):
        held, again = a.to(torch.float32).flatten(1), b.to("cpu", torch.float32).flatten(1)
        distance = (held - again).norm(dim=1) / again.norm(dim=1).clamp_min(1e-30)
        largest = torch.maximum(largest, distance.max())  # keeps a NaN
    return float(largest)


@contextmanager
def _logged(message: str, n_chunks: int) -> Iterator[None]:
    """A change that the answer does not need: if the store refuses it, that is logged."""
    try:
        yield
    except StoreError as error:
        level = logging.INFO if isinstance(error, StoreReadOnlyError) else logging.WARNING
        logger.log(level, message, n_chunks, error)
