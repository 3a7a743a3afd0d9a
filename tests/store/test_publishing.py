"""What is published in an object store and when, who wins, and what is not believed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from far import FINGERPRINT, doc_ids, folder_of, objects, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pdllm_store import (
    DocumentConflictError,
    ObjectChunkStore,
    RecordDamagedError,
    StoreConflictError,
    StoreError,
    StoreFormatError,
    TieredChunkStore,
    following,
    published,
)
from pdllm_store.bucket import Bucket
from pdllm_store.published import chunk_name
from pdllm_store.testing import add_chunks, bits, make_document, random_chunk

# -- publishing ----------------------------------------------------------------------------------------------


def test_a_document_is_visible_elsewhere_once_it_is_published(
    store: ObjectChunkStore, other: ObjectChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, kv = random_chunk(FINGERPRINT, seed=1)
    store.put(FINGERPRINT, [(meta, kv)])
    assert doc_ids(other) == []
    assert other.missing([meta.chunk_id]) == [meta.chunk_id]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    swap = store._bucket.swap
    monkeypatch.setattr(store._bucket, "swap", killed)  # everything is written but the pointer
    with pytest.raises(KeyboardInterrupt):
        store.add_document(FINGERPRINT, make_document("d", [meta]))
    assert (doc_ids(store), doc_ids(other)) == ([], [])
    monkeypatch.setattr(store._bucket, "swap", swap)
    store.add_document(FINGERPRINT, make_document("d", [meta]))
    assert (doc_ids(store), doc_ids(other)) == (["d"], ["d"])
    assert torch.equal(bits(other.load(meta.chunk_id).k), bits(kv.k))
    assert other.generation == store.generation


def test_who_publishes_second_builds_on_the_first(
    store: ObjectChunkStore, other: ObjectChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, lost = store._bucket.swap, []

    def second(*given: Any) -> Any:
        if not lost:
            add_chunks(other, FINGERPRINT, "b", [1, 2])
        lost.append(swap(*given))
        return lost[-1]

    monkeypatch.setattr(store._bucket, "swap", second)
    add_chunks(store, FINGERPRINT, "a", [2, 3])
    assert [result is None for result in lost] == [True, False]
    assert doc_ids(store) == doc_ids(other) == ["a", "b"]
    with pytest.raises(DocumentConflictError):
        other.add_document(FINGERPRINT, make_document("a", [], source="/elsewhere"))
    assert store.verify().ok
    assert store.stats().chunks == 3


def test_what_was_true_is_looked_up_again_before_a_document_is_refused(
    store: ObjectChunkStore, other: ObjectChunkStore
) -> None:
    add_chunks(other, FINGERPRINT, "d", [1], source="/theirs")
    store.refresh()
    other.delete_document(FINGERPRINT, "d")
    add_chunks(store, FINGERPRINT, "d", [2], source="/ours")
    assert other.generation
    assert doc_ids(other) == ["d"]


def test_documents_that_were_deleted_elsewhere_go_even_if_no_segment_says_so(
    store: ObjectChunkStore, other: ObjectChunkStore
) -> None:
    for doc_id in ("a", "b"):
        add_chunks(store, FINGERPRINT, doc_id, [1])
    assert doc_ids(other) == ["a", "b"]
    store.delete_document(FINGERPRINT, "a")
    store.collect_garbage(grace_s=0)  # nothing is left that would tell of the deletion
    assert doc_ids(other) == ["b"]


def test_a_store_that_was_set_back_is_noticed(url: str, store: ObjectChunkStore) -> None:
    pointer = (folder_of(url) / "store").read_bytes()
    add_chunks(store, FINGERPRINT, "a", [1])
    (folder_of(url) / "store").write_bytes(pointer)
    with pytest.raises(RecordDamagedError, match="set back to an earlier state"):
        store.refresh()


@pytest.mark.parametrize("n_writers", [4])
def test_no_document_of_any_writer_is_lost(url: str, n_writers: int) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with ObjectChunkStore.open(url) as store:
                for index in range(5):
                    write(store, f"{number}-{index}", [number, 10 + index])
                store.delete_document(FINGERPRINT, f"{number}-0")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with ObjectChunkStore.open(url) as store:
        assert doc_ids(store) == [f"{number}-{index}" for number in range(n_writers) for index in range(1, 5)]
        assert store.verify().ok


def test_who_never_gets_through_is_told_and_has_changed_nothing(
    store: ObjectChunkStore, other: ObjectChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PAUSE_S", 0.0)
    monkeypatch.setattr(following, "_RACE_S", 0.0)
    meta, kv = random_chunk(FINGERPRINT, seed=1)
    store.put(FINGERPRINT, [(meta, kv)])
    swap, numbers = store._bucket.swap, iter(range(100))

    def too_late(*given: Any) -> Any:
        other.add_document(FINGERPRINT, make_document(f"other-{next(numbers)}", []))
        return swap(*given)

    monkeypatch.setattr(store._bucket, "swap", too_late)
    with pytest.raises(StoreConflictError, match="other writers published first each time"):
        store.add_document(FINGERPRINT, make_document("d", [meta]))
    assert doc_ids(store) == doc_ids(other) == ["other-0"]
    monkeypatch.setattr(store._bucket, "swap", swap)
    store.add_document(FINGERPRINT, make_document("d", [meta]))
    assert "d" in doc_ids(other)


def test_without_conditional_writes_nothing_is_published(tmp_path: Path) -> None:
    from obstore.store import LocalStore

    bucket = Bucket(LocalStore(tmp_path), "file:///x")  # whose replacing is not told about the lock
    known = bucket.get_versioned("store") or bucket.swap("store", b"1", None)
    with pytest.raises(StoreError, match="no conditional writes"):
        bucket.swap("store", b"2", known)
    bucket.close()


def test_segments_stay_few_and_say_the_same_as_one(url: str) -> None:
    with ObjectChunkStore.open(url) as store:
        for index in range(20):
            add_chunks(store, FINGERPRINT, f"d{index:02}", [index, index + 1], text="x" * (20 + 7 * index))
        for index in range(0, 20, 3):
            store.delete_document(FINGERPRINT, f"d{index:02}")
        add_chunks(store, FINGERPRINT, "d01", [99])
        store.set_pinned(FINGERPRINT, "d02", pinned=True)
        n_segments = len(store._following._head.manifest.segments)
        assert n_segments <= 7  # 28 changes, of which each byte was written again at most five times
        with ObjectChunkStore.open(url) as fresh:
            assert fresh.documents(FINGERPRINT) == store.documents(FINGERPRINT)
            assert fresh.refs(FINGERPRINT) == store.refs(FINGERPRINT)
            assert fresh.stats()._replace(hits=0, fetched=0, misses=0, used_bytes=0, free_bytes=0, file_bytes=0) == (
                store.stats()._replace(hits=0, fetched=0, misses=0, used_bytes=0, free_bytes=0, file_bytes=0)
            )
            for info in fresh.documents(FINGERPRINT):
                assert fresh.document(FINGERPRINT, info.doc_id) == store.document(FINGERPRINT, info.doc_id)


Step = tuple[int, str, str, list[int]]
steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["add", "add", "delete", "collect"]),
        st.sampled_from("abc"),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_all_handles_see_the_same_after_any_changes(
    steps: list[Step], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two machines and one with a cache, in turns; the merging of segments is forced to differ from step to step."""
    folder = tmp_path_factory.mktemp("many")
    url = (folder / "far").as_uri()
    expected: dict[str, list[bytes]] = {}
    chunks = {seed: random_chunk(FINGERPRINT, seed=seed) for seed in range(4)}
    with (
        ObjectChunkStore.open(url) as one,
        ObjectChunkStore.open(url) as two,
        TieredChunkStore.open(url, cache=folder / "cache") as tiered,
    ):
        handles = (one, two, tiered)
        for which, action, doc_id, seeds in steps:
            store = handles[which]
            if action == "add":
                assert write(store, doc_id, seeds) is (doc_id in expected)
                expected[doc_id] = [chunks[seed][0].chunk_id for seed in seeds]
            elif action == "delete":
                assert store.delete_document(FINGERPRINT, doc_id) is (expected.pop(doc_id, None) is not None)
            else:
                store.collect_garbage(grace_s=0)
        held = {chunk_id for ids in expected.values() for chunk_id in ids}
        for store in handles:
            store.refresh()
            found = {info.doc_id: list(info.chunk_ids) for info in store.documents(FINGERPRINT)}
            assert found == expected
            assert {meta.chunk_id for meta in store.iter_meta(FINGERPRINT)} == held
            for meta, kv in chunks.values():
                if meta.chunk_id in held:
                    assert torch.equal(store.load(meta.chunk_id).k, kv.k)
        assert len({store.generation for store in handles}) == 1
        assert one.verify().ok
        one.collect_garbage(grace_s=0)
        kept = {name for name in objects(url) if name.startswith("chunks")}
        assert kept == {chunk_name(chunk_id) for chunk_id in held}


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["manifests", "segments"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_objects_of_the_protocol_are_never_believed(url: str, kind: str, damage: str) -> None:
    with ObjectChunkStore.open(url) as store:
        add_chunks(store, FINGERPRINT, "d", [1])
        head = store._following._head
    name = head.name if kind == "manifests" else head.manifest.segments[0].name
    path = folder_of(url) / kind / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(
            content[: len(content) // 2] + (b"" if damage == "cut" else b"\0" + content[len(content) // 2 + 1 :])
        )
    with pytest.raises(RecordDamagedError, match=rf"{kind}|segments are gone"):
        ObjectChunkStore.open(url)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", msgpack.packb([1, {}, [[b"k", [1, 2]]]]), msgpack.packb({"a": 1})]
)
def test_an_object_of_another_form_is_damaged_even_under_its_right_name(url: str, content: bytes) -> None:
    with ObjectChunkStore.open(url) as store:
        bucket, head = store._bucket, store._following._head
        manifest = head.manifest._replace(generation=5, segments=(published.SegmentRef(published.digest(content), 9),))
        assert published.publish_manifest(bucket, head, manifest, {published.digest(content): content}) is not None
        with pytest.raises(RecordDamagedError, match="is no segment"):
            store.refresh()
        odd = published.pack_map(b"manifest", {"format": 1, "kv_dtype": "bfloat16"})
        bucket.create(f"manifests/{published.digest(odd)}", odd)
        bucket.replace("store", published.pack_map(b"store", {"format": 1, "manifest": published.digest(odd)}))
        with pytest.raises(StoreFormatError, match="cannot read"):
            store.refresh()
