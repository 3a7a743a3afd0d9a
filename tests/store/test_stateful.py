"""Any sequence of operations leaves both stores as a dictionary says they should be."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pdllm_store import (
    ChunkId,
    ChunkNotFoundError,
    DocumentConflictError,
    DocumentNotFoundError,
    LMDBStore,
    MemoryStore,
)
from pdllm_store.table_store import TableStore
from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint

MODELS = (tiny_fingerprint(n_layers=1), tiny_fingerprint(n_layers=1, weights="ff"))
CHUNKS = {
    meta.chunk_id: (meta, kv)
    for model in MODELS
    for meta, kv in (random_chunk(model, seed=seed, n_tokens=1 + seed) for seed in range(5))
}
IDS = [list(CHUNKS)[:5], list(CHUNKS)[5:]]  # of each model

models = st.integers(0, 1)
seeds = st.integers(0, 4)
doc_ids = st.sampled_from(["a", "b", "ü" * 600])


class StoreMachine(RuleBasedStateMachine):
    store: TableStore

    def __init__(self) -> None:
        super().__init__()
        self.whole: set[ChunkId] = set()
        self.known: set[ChunkId] = set()  # with a meta
        self.evicted: set[ChunkId] = set()
        self.pinned: set[tuple[int, str]] = set()
        self.documents: dict[tuple[int, str], tuple[str, list[ChunkId]]] = {}

    def used(self) -> set[ChunkId]:
        return {chunk_id for _, ids in self.documents.values() for chunk_id in ids}

    def drop_unused(self, candidates: set[ChunkId]) -> None:
        gone = candidates - self.used()
        self.whole -= gone
        self.known -= gone
        self.evicted -= gone

    @rule(model=models, chosen=st.lists(seeds, max_size=4))
    def put(self, model: int, chosen: list[int]) -> None:
        ids = [IDS[model][seed] for seed in chosen]
        n_bytes = self.store.put(MODELS[model], [CHUNKS[chunk_id] for chunk_id in ids])
        assert (n_bytes > 0) == bool(set(ids) - self.whole)
        self.whole |= set(ids)
        self.known |= set(ids)
        self.evicted -= set(ids)

    @rule(model=models, doc_id=doc_ids, chosen=st.lists(seeds, max_size=4), source=st.sampled_from(["x", "x", "y"]))
    def add(self, model: int, doc_id: str, chosen: list[int], source: str) -> None:
        ids = [IDS[model][seed] for seed in chosen]
        document = make_document(doc_id, [CHUNKS[chunk_id][0] for chunk_id in ids], source=source)
        held = self.documents.get((model, doc_id))
        if held is not None and held[0] != source:
            with pytest.raises(DocumentConflictError):
                self.store.add_document(MODELS[model], document)
        elif absent := [chunk_id for chunk_id in dict.fromkeys(ids) if chunk_id not in self.whole | self.evicted]:
            with pytest.raises(ChunkNotFoundError) as caught:
                self.store.add_document(MODELS[model], document)
            assert list(caught.value.chunk_ids) == absent
        else:
            assert self.store.add_document(MODELS[model], document) is (held is not None)
            self.documents[model, doc_id] = (source, ids)
            self.drop_unused(set(held[1]) if held else set())

    @rule(model=models, doc_id=doc_ids)
    def delete(self, model: int, doc_id: str) -> None:
        held = self.documents.pop((model, doc_id), None)
        self.pinned.discard((model, doc_id))
        assert self.store.delete_document(MODELS[model], doc_id) is (held is not None)
        self.drop_unused(set(held[1]) if held else set())

    @rule(model=models, chosen=st.lists(seeds, max_size=3))
    def discard(self, model: int, chosen: list[int]) -> None:
        ids = {IDS[model][seed] for seed in chosen}
        self.store.discard(ids)
        self.known -= (ids & self.whole) - self.used()
        self.whole -= ids

    @rule()
    def evict(self) -> None:
        kept = {chunk_id for key in self.pinned for chunk_id in self.documents[key][1]}
        gone = (self.whole & self.used()) - kept
        assert self.store.evict() == len(gone)
        self.whole -= gone
        self.evicted |= gone

    @rule(model=models, doc_id=doc_ids, pinned=st.booleans())
    def pin(self, model: int, doc_id: str, pinned: bool) -> None:
        if (model, doc_id) not in self.documents:
            with pytest.raises(DocumentNotFoundError):
                self.store.set_pinned(MODELS[model], doc_id, pinned=pinned)
            return
        changed = ((model, doc_id) in self.pinned) != pinned
        assert self.store.set_pinned(MODELS[model], doc_id, pinned=pinned) is changed
        (self.pinned.add if pinned else self.pinned.discard)((model, doc_id))

    @rule(model=models, chosen=st.lists(seeds, max_size=3))
    def fetch(self, model: int, chosen: list[int]) -> None:
        fingerprint, ids = MODELS[model], [IDS[model][seed] for seed in chosen]
        self.store.recompute_with(fingerprint, lambda metas: iter([[CHUNKS[meta.chunk_id] for meta in metas]]))
        if set(ids) - self.known:
            with pytest.raises(ChunkNotFoundError):
                self.store.fetch(ids)
            return
        fetched = self.store.fetch(ids)
        assert fetched.recomputed == set(ids) - self.whole
        assert all(torch.equal(fetched.kv[chunk_id].v, CHUNKS[chunk_id][1].v) for chunk_id in ids)
        self.whole |= set(ids)
        self.evicted -= set(ids)

    @invariant()
    def chunks_are_as_expected(self) -> None:
        every = list(CHUNKS)
        assert set(self.store.evicted(every)) == self.evicted
        assert self.store.missing(every) == [chunk_id for chunk_id in every if chunk_id not in self.whole]
        for chunk_id, (_, kv) in CHUNKS.items():
            if chunk_id in self.whole:
                assert torch.equal(self.store.load(chunk_id).k, kv.k)
            if chunk_id in self.known:
                assert self.store.meta(chunk_id).chunk_id == chunk_id
            else:
                with pytest.raises(ChunkNotFoundError):
                    self.store.meta(chunk_id)

    @invariant()
    def documents_are_as_expected(self) -> None:
        for model, fingerprint in enumerate(MODELS):
            expected = {doc_id: ids for (held, doc_id), (_, ids) in self.documents.items() if held == model}
            assert {info.doc_id: list(info.chunk_ids) for info in self.store.documents(fingerprint)} == expected
            refs = [(ref.doc_id, ref.chunk_id) for ref in self.store.refs(fingerprint)]
            assert refs == [(doc_id, chunk_id) for doc_id in sorted(expected) for chunk_id in expected[doc_id]]
            in_use = {chunk_id for ids in expected.values() for chunk_id in ids}
            assert [meta.chunk_id for meta in self.store.iter_meta(fingerprint)] == sorted(in_use)
            for doc_id in ("a", "b"):
                if doc_id not in expected:
                    with pytest.raises(DocumentNotFoundError):
                        self.store.document(fingerprint, doc_id)

    @invariant()
    def totals_are_as_expected(self) -> None:
        stats = self.store.stats()
        assert stats.documents == len(self.documents)
        assert stats.chunks == len(self.whole)
        assert stats.orphans == len(self.whole - self.used())
        assert stats.tokens == sum(len(CHUNKS[chunk_id][0].token_ids) for chunk_id in self.whole)
        report = self.store.verify()
        assert (report.damaged, report.problems) == ([], [])
        assert set(report.missing) == self.used() - self.whole - self.evicted
        assert (report.n_evicted, stats.evicted) == (len(self.evicted), len(self.evicted))

    def teardown(self) -> None:
        self.store.close()


class MemoryMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()


class LMDBMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.store = LMDBStore.open(self.folder)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = LMDBStore.open(self.folder, create=False)

    @rule()
    def compact(self) -> None:
        assert isinstance(self.store, LMDBStore)
        self.store.compact()
        self.drop_unused(set(CHUNKS))

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


BUDGET = settings(max_examples=30, stateful_step_count=20, deadline=None)

TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = BUDGET
TestLMDBStore = LMDBMachine.TestCase
TestLMDBStore.settings = BUDGET
