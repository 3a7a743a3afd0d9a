"""A small store with every kind of row in it, made alike on disk and in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from pdllm_store.table_store import TableStore
from pdllm_store.testing.fakes import make_document, random_chunk, tiny_fingerprint
from pdllm_store.types import ChunkId, Document, KVDtype, ModelFingerprint

_N_SMALL = 24  # chunks whose records lie within a leaf page
_N_MEDIUM = 6  # chunks whose records take overflow pages of their own
_LONG = "long" * 150  # an id that is longer than LMDB's keys may be
_CAP = 1 << 30  # bytes: far away
_EVICTED, _DISCARDED = 16, 17  # chunks without KV
_TWO_GROUPS = 11_000  # tokens; layers of bfloat16 that no longer fit one group


class Names(NamedTuple):
    """Everything that a specimen can be asked for, what it has lost included."""

    fingerprints: list[ModelFingerprint]
    doc_ids: list[str]
    chunk_ids: list[ChunkId]


class Specimen:
    """The contents, from numbers; `fill`, `finish` and `change` bring a store from one known state to the next."""

    def __init__(self, kv_dtype: KVDtype, *, key: bytes | None = None) -> None:
        self.kv_dtype: KVDtype = kv_dtype
        self.key = key
        self._model = tiny_fingerprint(kv_dtype=kv_dtype)
        self._other = tiny_fingerprint(kv_dtype=kv_dtype, weights="22")
        self._unused = tiny_fingerprint(kv_dtype=kv_dtype, weights="33")
        sizes = [5] * _N_SMALL + [60] * _N_MEDIUM + [1] + ([_TWO_GROUPS] if kv_dtype == "bfloat16" else [])
        self._items = [
            random_chunk(self._model, seed=seed, n_tokens=size, sketch=seed % 5 != 4) for seed, size in enumerate(sizes)
        ]
        self._elsewhere = [random_chunk(self._other, seed=seed, n_tokens=9) for seed in range(3)]
        self._later = [random_chunk(self._model, seed=1000 + seed, n_tokens=50) for seed in range(3)]

    @property
    def kind(self) -> str:
        return f"{self.kv_dtype}, keyed" if self.key else self.kv_dtype

    @property
    def names(self) -> Names:
        items = [*self._items, *self._elsewhere, *self._later]
        doc_ids = [*(f"d{number:02}" for number in range(12)), _LONG, "evicted", "later", "paged/ü", "replaced", "same"]
        return Names([self._model, self._other, self._unused], doc_ids, [meta.chunk_id for meta, _ in items])

    def fill(self, store: TableStore) -> None:
        """Everything but the last transaction."""
        store.set_max_bytes(_CAP)
        store.register(self._unused)
        store.put(self._model, [self._items[_EVICTED]])
        store.add_document(self._model, self._document("evicted", [_EVICTED]))
        store.evict()  # of what is there so far
        evicted = self._items[_EVICTED]
        for first in range(0, len(self._items), 10):
            store.put(self._model, [item for item in self._items[first : first + 10] if item is not evicted])
        store.put(self._other, self._elsewhere)
        for number in range(12):
            store.add_document(self._model, self._document(f"d{number:02}", range(number, number + 4)))
        store.add_document(self._model, self._document(_LONG, range(20, len(self._items) - 1)))
        paged = self._document("paged/ü", [3, 3, 25], text="Zeile für Zeile \ud800 " * 400)
        pages = tuple(ref._replace(page=ref.ordinal + 1) for ref in paged.chunks)
        store.add_document(self._model, replace(paged, chunks=pages))
        store.add_document(self._model, self._document("replaced", [1, 2, 26], text="the old text " * 500))
        store.add_document(self._model, self._document("same", [1]))
        store.add_document(self._other, make_document("same", [meta for meta, _ in self._elsewhere[:2]]))
        store.set_pinned(self._model, "d03", pinned=True)
        store.delete_document(self._model, "d07")
        store.delete_document(self._model, "d09")
        store.discard([self._items[_DISCARDED][0].chunk_id])
        store.add_document(self._model, self._document("d09", [9, 10, 27]))

    def finish(self, store: TableStore) -> None:
        """The last transaction: a document gets another text and other chunks."""
        store.add_document(self._model, self._document("replaced", [2, 4, 28], text="the new text " * 500))

    def change(self, store: TableStore) -> None:
        """Go on writing: take pages into use, free others."""
        store.put(self._model, [*self._later, self._items[_EVICTED], self._items[_DISCARDED]])
        store.add_document(self._model, make_document("later", [meta for meta, _ in self._later], text="later " * 900))
        store.add_document(self._model, self._document("d01", [28, 2, 2], text="again " * 900))
        store.delete_document(self._model, "paged/ü")
        store.delete_document(self._model, "d11")

    def _document(self, doc_id: str, seeds: Iterable[int], **changes: Any) -> Document:
        metas = [self._items[seed][0] for seed in seeds]
        metadata = {"title": f"Ü {doc_id[:8]}", "n": 3, "x": 0.5, "none": None, "deep": {"k": [1, None, True]}}
        return make_document(doc_id, metas, metadata=metadata, **changes)
