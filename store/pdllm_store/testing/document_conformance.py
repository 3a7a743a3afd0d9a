"""What every chunk store must do with documents."""

from __future__ import annotations

from typing import Any

import pytest

from pdllm_store.errors import (
    ChunkNotFoundError,
    DocumentConflictError,
    DocumentNotFoundError,
)
from pdllm_store.protocol import ChunkStore
from pdllm_store.testing.fakes import add_chunks, make_document, random_chunk
from pdllm_store.types import ChunkRef, ModelFingerprint


class DocumentConformance:
    """Needs the fixtures `store` and `fingerprint`."""

    def test_a_document_comes_back_whole(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        metadata = {"title": "Über", "n": 3, "x": 0.5, "none": None, "deep": {"k": [1, None, True]}}
        document = make_document("a/ü 1", [meta, meta], metadata=metadata, text="é" * 20 + "\ud800")
        assert store.add_document(fingerprint, document) is False
        assert store.document(fingerprint, "a/ü 1") == document
        (info,) = store.documents(fingerprint)
        assert info.chunk_ids == (meta.chunk_id, meta.chunk_id)
        assert info.n_bytes == store.stats().kv_bytes
        assert info.metadata == metadata
        assert info.pinned is False

    def test_an_id_may_be_longer_than_any_key(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        doc_id = "é" * 5000
        add_chunks(store, fingerprint, doc_id, [1])
        assert store.document(fingerprint, doc_id).doc_id == doc_id
        assert store.delete_document(fingerprint, doc_id) is True

    def test_documents_and_refs_come_in_document_order(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        expected = []
        for doc_id in ("b", "é", "a", "a/1", "B"):
            metas = add_chunks(store, fingerprint, doc_id, range(3))
            expected += [(doc_id, ordinal, meta.chunk_id) for ordinal, meta in enumerate(metas)]
        assert [ref[:3] for ref in store.refs(fingerprint)] == sorted(expected)
        assert [info.doc_id for info in store.documents(fingerprint)] == ["B", "a", "a/1", "b", "é"]

    def test_pages_come_back(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        refs = tuple(ChunkRef("d", n, meta.chunk_id, 0, 5, page) for n, page in enumerate((None, 1, 7)))
        store.add_document(fingerprint, make_document("d", [meta], chunks=refs))
        assert store.refs(fingerprint) == list(refs)

    def test_a_document_without_chunks_is_one(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        store.add_document(fingerprint, make_document("blank", []))
        assert [info.doc_id for info in store.documents(fingerprint)] == ["blank"]
        assert store.refs(fingerprint) == []

    def test_a_document_with_a_missing_chunk_stays_out(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        here, gone = random_chunk(fingerprint, seed=1), random_chunk(fingerprint, seed=2)
        store.put(fingerprint, [here])
        before = store.stats()
        with pytest.raises(ChunkNotFoundError) as caught:
            store.add_document(fingerprint, make_document("d", [here[0], gone[0]]))
        assert caught.value.chunk_ids == (gone[0].chunk_id,)
        with pytest.raises(DocumentNotFoundError):
            store.document(fingerprint, "d")
        assert store.stats() == before

    def test_documents_are_added_together_and_one_that_is_wrong_keeps_no_other_out(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        items = [random_chunk(fingerprint, seed=seed) for seed in range(3)]
        store.put(fingerprint, items[:2])
        metas = [meta for meta, _ in items]
        add_chunks(store, fingerprint, "held", [9])
        results = store.add_documents(
            fingerprint,
            [
                make_document("a", metas[:1]),
                make_document("lacks a chunk", metas[2:]),
                make_document("held", [], source="/elsewhere"),
                make_document("no JSON", [], metadata={"when": object()}),
                make_document("", []),
                make_document("held", metas[:2]),
                make_document("b", metas[:2]),
            ],
        )
        kinds = [result if isinstance(result, bool) else type(result) for result in results]
        assert kinds == [False, ChunkNotFoundError, DocumentConflictError, ValueError, ValueError, True, False]
        assert [info.doc_id for info in store.documents(fingerprint)] == ["a", "b", "held"]
        assert (store.stats().chunks, store.stats().orphans) == (2, 0)
        assert store.add_documents(fingerprint, []) == []

    @pytest.mark.parametrize(
        ("metadata", "named"),
        [
            ({"when": object()}, r"metadata\['when'\]"),
            ({"deep": {"k": [1, {2}]}}, r"metadata\['deep'\]\['k'\]\[1\]"),
            ({"n": 2**70}, r"metadata\['n'\]"),
            ({"x": float("nan")}, r"metadata\['x'\]"),
            ({1: "one"}, "metadata has the key 1"),
            ({"raw": b"bytes"}, r"metadata\['raw'\]"),
        ],
    )
    def test_metadata_that_is_no_json_is_refused_by_name(
        self, store: ChunkStore, fingerprint: ModelFingerprint, metadata: dict[Any, Any], named: str
    ) -> None:
        before = store.stats()
        with pytest.raises(ValueError, match=named):
            store.add_document(fingerprint, make_document("d", [], metadata=metadata))
        assert store.stats() == before

    def test_a_document_that_contradicts_itself_is_refused(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        (meta,) = add_chunks(store, fingerprint, "other", [1])
        ref = ChunkRef("d", 0, meta.chunk_id, 0, 5)
        for wrong in (
            ref._replace(doc_id="x"),
            ref._replace(ordinal=1),
            ref._replace(char_end=11),
            ref._replace(char_start=6),
            ref._replace(page=0),
        ):
            with pytest.raises(ValueError, match="document 'd': chunk 0"):
                store.add_document(fingerprint, make_document("d", [meta], chunks=(wrong,)))
        with pytest.raises(ValueError, match="must not be empty"):
            store.add_document(fingerprint, make_document("", []))

    def test_replacing_drops_only_the_chunks_that_went(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        old = add_chunks(store, fingerprint, "d", [1, 2, 3])
        items = [random_chunk(fingerprint, seed=seed) for seed in (1, 4, 3)]
        store.put(fingerprint, items)
        assert store.add_document(fingerprint, make_document("d", [meta for meta, _ in items])) is True
        assert store.missing([meta.chunk_id for meta in old]) == [old[1].chunk_id]
        assert store.missing([meta.chunk_id for meta, _ in items]) == []
        with pytest.raises(ChunkNotFoundError):
            store.meta(old[1].chunk_id)
        stats = store.stats()
        assert (stats.documents, stats.chunks, stats.orphans) == (1, 3, 0)

    def test_an_id_of_another_source_is_a_conflict(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        metas = add_chunks(store, fingerprint, "d", [1])
        before = store.stats()
        with pytest.raises(DocumentConflictError, match=r"/src/d.*/other"):
            store.add_document(fingerprint, make_document("d", metas, source="/other"))
        assert store.stats() == before

    def test_two_documents_share_a_chunk_until_the_last_goes(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        (shared,) = add_chunks(store, fingerprint, "a", [1])
        add_chunks(store, fingerprint, "b", [1, 1])
        assert store.stats().chunks == 1
        assert store.delete_document(fingerprint, "b") is True
        assert store.missing([shared.chunk_id]) == []
        assert store.delete_document(fingerprint, "a") is True
        assert store.missing([shared.chunk_id]) == [shared.chunk_id]
        stats = store.stats()
        assert (stats.documents, stats.chunks, stats.tokens, stats.kv_bytes) == (0, 0, 0, 0)

    def test_deleting_twice_or_an_unknown_id_is_false(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        add_chunks(store, fingerprint, "d", [1])
        assert store.delete_document(fingerprint, "d") is True
        generation = store.generation
        assert store.delete_document(fingerprint, "d") is False
        assert store.delete_document(fingerprint, "never") is False
        assert store.generation == generation

    def test_a_deleted_document_can_be_added_again(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        add_chunks(store, fingerprint, "d", [1, 2])
        store.delete_document(fingerprint, "d")
        metas = add_chunks(store, fingerprint, "d", [1, 2])
        assert [ref.chunk_id for ref in store.refs(fingerprint)] == [meta.chunk_id for meta in metas]
        assert store.missing([meta.chunk_id for meta in metas]) == []
