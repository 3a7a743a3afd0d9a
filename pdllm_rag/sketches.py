"""The sketch stage: which chunks' mean keys point where the question's mean key points.

A chunk's sketch is the mean of its un-rotated keys in the model's middle layer, BOS left out, kept in the store beside
its KV; the question's is the same, of the question encoded alone as a chunk would be. Nothing is learnt and no KV is
read, but a model's keys are made for attention within a text, not for search: see docs/quality.md for how well it does
before taking it for anything but a comparison.

- The sketches of all chunks are held in memory as unit vectors in float16: 2 * G * D bytes a chunk (384 MB for a
  million chunks of the bundled model); a question multiplies them in blocks of 8,192, each turned to float32 for it.
- They follow the store: when its generation has moved, only what is new is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pdllm_store import ChunkId, ChunkNotFoundError, ChunkRef, ChunkStore, ModelFingerprint, RecordDamagedError

from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.first_stage import Candidate
from pdllm_rag.models.loader import LoadedModel

logger = logging.getLogger(__name__)

BLOCK = 8192  # sketches that are multiplied together


class _Held(NamedTuple):
    """What was read of a generation.

    unit: float16 [M, G*D], of length 1 each, 0 for a chunk without a sketch; in document order of first places.
    refs: every place of each of these chunks, in document order.
    """

    generation: int
    unit: NDArray[np.float16]
    refs: dict[ChunkId, list[ChunkRef]]


class SketchIndex:
    """Cosine search over the sketches of a store, in step with it whenever it is asked."""

    def __init__(self, model: LoadedModel, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        self._model = model
        self._store = store
        self._fingerprint = fingerprint
        self._encoder = ChunkEncoder(model, fingerprint)
        self._held: _Held | None = None
        self._lock = threading.Lock()

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """The n best chunks by cosine, best first, ties in document order; each stands at its first allowed place.

        Raises:
            ValueError: there are chunks, and none of them has a sketch.
        """
        held = self._current()
        places = [_first_place(refs, doc_ids) for refs in held.refs.values()]
        cosine = self._cosine(held.unit, self.of_text(text))
        best = (int(row) for row in np.argsort(-cosine, kind="stable"))
        found = ((place, float(cosine[row])) for row in best if (place := places[row]) is not None)
        return [Candidate(place, score) for (place, score), _ in zip(found, range(n), strict=False)]

    def of_text(self, text: str) -> NDArray[np.float32]:
        """float32 [G*D]: the sketch of a text encoded alone, of length 1."""
        ids = np.array([self._model.spec.bos_id, *self._model.tokenizer.encode(text)], dtype=np.int32)
        (sketch,) = self._encoder.capture([ids]).sketches
        return _unit(sketch.cpu().numpy().astype(np.float32))

    def _cosine(self, unit: NDArray[np.float16], query: NDArray[np.float32]) -> NDArray[np.float32]:
        cosine = np.empty(len(unit), dtype=np.float32)
        for start in range(0, len(unit), BLOCK):
            rows = slice(start, start + BLOCK)
            cosine[rows] = unit[rows].astype(np.float32) @ query
        return cosine

    def _current(self) -> _Held:
        with self._lock:
            if self._held is None or self._held.generation != self._store.generation:
                self._held = self._read(self._held)
            return self._held

    def _read(self, before: _Held | None) -> _Held:
        generation = self._store.generation
        refs: dict[ChunkId, list[ChunkRef]] = {}
        for ref in self._store.refs(self._fingerprint):
            refs.setdefault(ref.chunk_id, []).append(ref)
        known = {} if before is None else dict(zip(before.refs, before.unit, strict=True))
        found: dict[ChunkId, NDArray[np.float16]] = {}
        n_without = 0
        for chunk_id in refs:
            if chunk_id in known:
                found[chunk_id] = known[chunk_id]
                continue
            try:
                sketch = self._store.meta(chunk_id).sketch
            except ChunkNotFoundError:
                continue  # deleted meanwhile; the generation has moved on, so the next call looks again
            except RecordDamagedError as error:
                logger.warning("chunk %s is left out of the sketches: %s", chunk_id.hex(), error)
                continue
            n_without += sketch is None
            size = self._fingerprint.n_kv_heads * self._fingerprint.head_dim
            found[chunk_id] = (
                np.zeros(size, np.float16) if sketch is None else _unit(sketch.astype(np.float32)).astype(np.float16)
            )
        if n_without:
            if n_without == len(found):
                raise ValueError(
                    f"none of the {n_without} chunks in {self._store.path} has a sketch; take first stage 'bm25', or "
                    "prefill the documents again with this version"
                )
            logger.warning("%d of %d chunks have no sketch and come last", n_without, len(found))
        unit = np.stack(list(found.values())) if found else np.zeros((0, 1), np.float16)
        return _Held(generation, unit, {chunk_id: refs[chunk_id] for chunk_id in found})


def _first_place(refs: Sequence[ChunkRef], doc_ids: Collection[str] | None) -> ChunkRef | None:
    return next((ref for ref in refs if doc_ids is None or ref.doc_id in doc_ids), None)


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector
