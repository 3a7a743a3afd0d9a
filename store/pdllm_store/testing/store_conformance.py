"""What every chunk store must do: the whole suite."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from pdllm_store.errors import (
    ChunkNotFoundError,
    StoreClosedError,
    StoreMismatchError,
)
from pdllm_store.protocol import ChunkStore
from pdllm_store.testing.chunk_conformance import ChunkConformance
from pdllm_store.testing.document_conformance import DocumentConformance
from pdllm_store.testing.fakes import MakeStore, add_chunks, make_document, random_chunk, tiny_fingerprint
from pdllm_store.testing.fetch_conformance import FetchConformance
from pdllm_store.types import ModelFingerprint


class ChunkStoreConformance(ChunkConformance, FetchConformance, DocumentConformance):
    """Subclass it in a test module and give it the fixture `make_store`."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> ChunkStore:
        return make_store("bfloat16")

    @pytest.fixture
    def fingerprint(self) -> ModelFingerprint:
        return tiny_fingerprint()

    def test_discarded_kv_is_missing_until_put_again(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        (meta,) = add_chunks(store, fingerprint, "d", [1])
        store.discard([meta.chunk_id, meta.chunk_id, b"?" * 16])
        assert store.missing([meta.chunk_id]) == [meta.chunk_id]
        with pytest.raises(ChunkNotFoundError):
            store.load(meta.chunk_id)
        np.testing.assert_array_equal(store.meta(meta.chunk_id).token_ids, meta.token_ids)
        assert len(store.refs(fingerprint)) == 1
        assert store.documents(fingerprint)[0].n_bytes == 0
        assert (store.stats().chunks, store.stats().kv_bytes) == (0, 0)
        _, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        assert torch.equal(store.load(meta.chunk_id).k, kv.k)
        store.delete_document(fingerprint, "d")
        assert store.missing([meta.chunk_id]) == [meta.chunk_id]

    def test_orphans_are_kept_and_counted(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        assert (store.stats().chunks, store.stats().orphans) == (1, 1)
        assert list(store.iter_meta(fingerprint)) == []
        store.add_document(fingerprint, make_document("d", [meta]))
        assert (store.stats().chunks, store.stats().orphans) == (1, 0)

    def test_iter_meta_gives_each_chunk_of_this_model_once(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        other = tiny_fingerprint(weights="ff")
        metas = add_chunks(store, fingerprint, "a", [1, 2])
        add_chunks(store, fingerprint, "b", [2, 2])
        add_chunks(store, other, "a", [1])
        got = sorted(meta.chunk_id for meta in store.iter_meta(fingerprint))
        assert got == sorted(meta.chunk_id for meta in metas)

    def test_models_do_not_see_each_others_documents(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        other = tiny_fingerprint(weights="ff")
        add_chunks(store, fingerprint, "d", [1])
        assert store.documents(other) == []
        add_chunks(store, other, "d", [2], source="/elsewhere")
        assert store.delete_document(other, "d") is True
        assert len(store.documents(fingerprint)) == 1
        n_documents = {digest: counts.documents for digest, counts in store.stats().fingerprints.items()}
        assert n_documents == {fingerprint.digest.hex(): 1, other.digest.hex(): 0}
        assert sorted(store.fingerprints(), key=lambda f: f.weights_digest) == [fingerprint, other]

    def test_another_stored_dtype_is_refused(self, store: ChunkStore) -> None:
        other = tiny_fingerprint(kv_dtype="float32")
        with pytest.raises(StoreMismatchError, match=r"float32.*bfloat16"):
            store.register(other)
        with pytest.raises(StoreMismatchError):
            store.put(other, [random_chunk(other, seed=1)])
        with pytest.raises(StoreMismatchError):
            store.add_document(other, make_document("d", []))

    def test_register_remembers_a_model_once(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        store.register(fingerprint)
        store.register(fingerprint)
        assert store.fingerprints() == [fingerprint]

    def test_every_change_of_documents_raises_the_generation(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        seen = [store.generation]
        metas = add_chunks(store, fingerprint, "d", [1])
        seen.append(store.generation)
        store.add_document(fingerprint, make_document("d", metas))
        seen.append(store.generation)
        store.delete_document(fingerprint, "d")
        seen.append(store.generation)
        assert seen == sorted(set(seen))
        assert store.stats().generation == seen[-1]

    def test_loads_are_counted(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        store.load(meta.chunk_id)
        with pytest.raises(ChunkNotFoundError):
            store.load(bytes(16))
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.damaged) == (1, 1, 0)
        assert (stats.tokens, stats.kv_dtype, stats.path) == (5, "bfloat16", store.path)

    def test_threads_may_put_the_same_chunks(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        items = [random_chunk(fingerprint, seed=seed) for seed in range(6)]
        failures: list[BaseException] = []

        def work(shift: int) -> None:
            try:
                for index in range(6):
                    meta, kv = items[(index + shift) % 6]
                    store.put(fingerprint, [(meta, kv)])
                    assert torch.equal(store.load(meta.chunk_id).k, kv.k)
                store.add_document(fingerprint, make_document(f"d{shift}", [meta for meta, _ in items]))
                store.delete_document(fingerprint, f"d{shift}")
            except BaseException as error:
                failures.append(error)
                raise

        keep = random_chunk(fingerprint, seed=99)
        store.put(fingerprint, [*items, keep])
        store.add_document(fingerprint, make_document("kept", [meta for meta, _ in [*items, keep]]))
        threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        stats = store.stats()
        assert (stats.documents, stats.chunks, stats.orphans) == (1, 7, 0)

    def test_a_closed_store_says_so(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        store.close()
        store.close()
        with pytest.raises(StoreClosedError, match="was closed"):
            store.load(bytes(16))
        with pytest.raises(StoreClosedError):
            store.put(fingerprint, [])
        with pytest.raises(StoreClosedError):
            store.stats()
