"""An object store: how it is opened, what is read, and what is deleted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from far import FINGERPRINT, Moto, Proxy, doc_ids, folder_of, make_old, objects
from pdllm_store import (
    ChunkKV,
    LMDBStore,
    ObjectChunkStore,
    StoreError,
    StoreFormatError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReadOnlyError,
    TieredChunkStore,
    following,
    garbage,
    is_url,
    open_store,
    published,
    real_location,
)
from pdllm_store.garbage import RENEW_S
from pdllm_store.published import chunk_name
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

# -- opening -------------------------------------------------------------------------------------------------


def test_a_store_is_found_again_with_its_dtype_and_documents(url: str) -> None:
    with ObjectChunkStore.open(url, kv_dtype="int8") as store:
        (meta,) = add_chunks(store, fingerprint := tiny_fingerprint(kv_dtype="int8"), "d", [1])
        before, generation = store.load(meta.chunk_id), store.generation
    with ObjectChunkStore.open(url, create=False) as store:
        assert (store.kv_dtype, store.generation) == ("int8", generation)
        assert store.fingerprints() == [fingerprint]
        assert store.document(fingerprint, "d") == make_document("d", [meta])
        assert torch.equal(store.load(meta.chunk_id).k, before.k)
        assert store.verify().ok
    with pytest.raises(StoreMismatchError, match=r"int8.*bfloat16"):
        ObjectChunkStore.open(url, kv_dtype="bfloat16")


def test_nothing_is_made_where_nothing_may_be(url: str) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(StoreNotFoundError, match="no store at"):
            ObjectChunkStore.open(url, **options)
    assert not folder_of(url).exists()
    with pytest.raises(ValueError, match="kv_dtype is 'int4'"):
        ObjectChunkStore.open(url, kv_dtype="int4")  # type: ignore[arg-type]


def test_what_is_no_store_of_ours_is_left_alone(url: str, store: ObjectChunkStore) -> None:
    pointer = folder_of(url) / "store"
    newer = published.pack_map(b"store", {"format": 99, "manifest": "x"})
    for content, said in ((b"something else", "not ours"), (newer, "format 99")):
        pointer.write_bytes(content)
        with pytest.raises(StoreFormatError, match=said):
            ObjectChunkStore.open(url)
        with pytest.raises(StoreFormatError, match=said):
            store.refresh()
        assert pointer.read_bytes() == content


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("s3://user:password@bucket/x", "credentials and settings belong into the environment"),
        ("s3://bucket/x?token=abc", "credentials and settings belong into the environment"),
        ("ftp://machine/x", "expected one of s3://"),
        ("s3://", "expected one of s3://"),
        ("file://tmp/x", "expected file:///tmp/x"),
    ],
)
def test_a_wrong_url_is_refused_without_repeating_secrets(location: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        open_store(location)
    assert "password" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_one_door_opens_every_kind(tmp_path: Path, url: str) -> None:
    cache = tmp_path / "cache"
    with open_store(tmp_path / "folder") as folder, open_store(url) as far, open_store(url, cache=cache) as tiered:
        assert [type(store) for store in (folder, far, tiered)] == [LMDBStore, ObjectChunkStore, TieredChunkStore]
        assert (far.path, tiered.path) == (url, url)
    assert (is_url(url), is_url(tmp_path), is_url("a/b")) == (True, False, False)
    assert real_location(url + "/") == url
    assert real_location(str(tmp_path / "x" / "..")) == os.path.realpath(tmp_path)
    for location, options in (
        (url, {"max_bytes": 1 << 30}),
        (url, {"key": bytes(32)}),
        (url, {"cache_bytes": 1 << 30}),
        (tmp_path / "folder", {"cache": cache}),
        ("memory://", {"cache": cache}),
    ):
        with pytest.raises(ValueError, match=r"cache|of stores in a folder"):
            open_store(location, **options)
    with pytest.raises(StoreFormatError, match="is the cache of a store"):
        open_store(cache)
    with open_store(cache, read_only=True) as opened:
        assert opened.read_only


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, url: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot make the folder"):
        ObjectChunkStore.open((tmp_path / "file" / "far").as_uri())
    (tmp_path / "far" / "store.lock").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"could not replace store: Is a directory"):
        ObjectChunkStore.open(url)


def test_a_store_without_its_package_says_what_to_install(url: str, run_child: Callable[..., str]) -> None:
    code = """
        import sys
        sys.modules["obstore"] = None
        from pdllm_store import StoreError, open_store
        try:
            open_store(sys.argv[1])
        except StoreError as error:
            print(error)
    """
    assert "pip install 'pdllm-rag[scale]'" in run_child(code, url)


def test_a_read_only_store_changes_nothing(url: str, store: ObjectChunkStore) -> None:
    (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
    before = objects(url)
    with ObjectChunkStore.open(url, read_only=True) as reader:
        assert reader.read_only
        assert torch.equal(reader.load(meta.chunk_id).k, store.load(meta.chunk_id).k)
        for change in (
            lambda: reader.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=2)]),
            lambda: reader.add_document(FINGERPRINT, make_document("e", [meta])),
            lambda: reader.delete_document(FINGERPRINT, "d"),
            lambda: reader.discard([meta.chunk_id]),
            lambda: reader.collect_garbage(grace_s=0),
        ):
            with pytest.raises(StoreReadOnlyError, match="read-only"):
                change()
        assert reader.collect_garbage(dry_run=True) == (0, 0, 0)
    assert objects(url) == before


def test_what_only_files_have_is_refused(store: ObjectChunkStore) -> None:
    assert (store.max_bytes, store.derived_dir is not None) == (None, True)
    for change in (lambda: store.evict(), lambda: store.set_max_bytes(1 << 30)):
        with pytest.raises(StoreError, match="a cache in front of it"):
            change()


def test_a_handle_pickles_as_its_url(store: ObjectChunkStore) -> None:
    (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
    with pickle.loads(pickle.dumps(store)) as again:
        assert torch.equal(again.load(meta.chunk_id).v, store.load(meta.chunk_id).v)


def test_a_forked_child_is_told_to_spawn_instead(s3: Moto, run_child: Callable[..., str]) -> None:
    code = """
        import os, sys
        from pdllm_store import ObjectChunkStore, StoreError
        store = ObjectChunkStore.open(sys.argv[1])
        if os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        try:
            store.refresh()
        except StoreError as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)
    """
    assert "spawn" in run_child(code, s3.new_url())


# -- reading -------------------------------------------------------------------------------------------------


@pytest.fixture
def large(url: str) -> Iterator[tuple[ObjectChunkStore, bytes, ChunkKV]]:
    """A chunk of eight layers in four groups."""
    fingerprint = replace(tiny_fingerprint(n_layers=8), n_kv_heads=4, head_dim=64)
    with ObjectChunkStore.open(url) as store:
        meta, kv = random_chunk(fingerprint, seed=1, n_tokens=512)
        store.put(fingerprint, [(meta, kv)])
        store.add_document(fingerprint, make_document("d", [meta]))
        yield store, meta.chunk_id, kv


@pytest.mark.parametrize("layers", [None, range(2), range(2, 6), range(6, 8), range(3, 4)])
def test_no_more_is_read_than_the_layers_need(
    large: tuple[ObjectChunkStore, bytes, ChunkKV], layers: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chunk_id, kv = large
    n_read: list[int] = []
    whole, part = store._bucket.get, store._bucket.range
    monkeypatch.setattr(store._bucket, "range", lambda *given: n_read.append(given[2] - given[1]) or part(*given))
    monkeypatch.setattr(store._bucket, "get", lambda name: n_read.append(1 << 30) or whole(name))
    chosen = layers or range(8)
    out = ChunkKV(*(torch.zeros(len(chosen), *kv.k.shape[1:], dtype=kv.k.dtype) for _ in range(2)))
    store.load_into([chunk_id], [out], layers=layers)
    assert torch.equal(out.k, kv.k[chosen.start : chosen.stop])
    assert torch.equal(out.v, kv.v[chosen.start : chosen.stop])
    n_group_layers = 2
    n_needed = len(range(chosen.start // n_group_layers, -(-chosen.stop // n_group_layers))) * n_group_layers
    assert len(n_read) == 1
    assert sum(n_read) <= 1.05 * n_needed * 2 * kv.k[0].nbytes


# -- garbage -------------------------------------------------------------------------------------------------


def test_garbage_is_deleted_after_its_grace_and_nothing_else(url: str, store: ObjectChunkStore) -> None:
    kept = add_chunks(store, FINGERPRINT, "kept", [1, 2], text="remember this" + "." * 10)
    add_chunks(store, FINGERPRINT, "gone", [2, 3], text="a secret" + "." * 20)
    store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=4)])  # of a prefill at work
    store.delete_document(FINGERPRINT, "gone")
    before = objects(url)
    assert store.collect_garbage() == (0, 0, 0)  # all of it is young
    counted = store.collect_garbage(grace_s=0, dry_run=True)
    assert counted.chunks == 2
    assert set(before) <= set(objects(url))
    done = store.collect_garbage(grace_s=0)
    assert (done.chunks, done.n_bytes >= counted.n_bytes) == (2, True)
    left = objects(url)
    assert {name for name in left if name.startswith("chunks")} == {chunk_name(meta.chunk_id) for meta in kept}
    assert not any(b"a secret" in content for content in left.values())
    assert any(b"remember this" in content for content in left.values())
    assert len(left) == 2 + 1 + 1 + 1  # chunks, a segment, a manifest, the pointer
    with ObjectChunkStore.open(url) as fresh:
        assert doc_ids(fresh) == doc_ids(store) == ["kept"]
        assert fresh.verify().ok
    with pytest.raises(ValueError, match="grace"):
        store.collect_garbage(grace_s=-1)


def test_a_writer_does_not_rely_on_an_old_object_that_may_be_collected(
    url: str, store: ObjectChunkStore, other: ObjectChunkStore
) -> None:
    meta, kv = random_chunk(FINGERPRINT, seed=1)
    store.put(FINGERPRINT, [(meta, kv)])  # and is killed
    make_old(url, 2 * RENEW_S)
    other.put(FINGERPRINT, [(meta, kv)])
    assert store.collect_garbage(grace_s=RENEW_S).chunks == 0
    other.add_document(FINGERPRINT, make_document("d", [meta]))
    make_old(url, 2 * RENEW_S)
    assert store.collect_garbage(grace_s=RENEW_S).chunks == 0
    assert torch.equal(store.load(meta.chunk_id).k, kv.k)


def test_what_is_published_or_renewed_while_garbage_is_collected_stays(
    url: str, store: ObjectChunkStore, other: ObjectChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (random_chunk(FINGERPRINT, seed=seed) for seed in range(3))
    for chunk in (first, second, third):
        other.put(FINGERPRINT, [chunk])
    make_old(url, 2 * RENEW_S)
    read_head, calls = garbage.read_head, iter(range(100))

    def meanwhile(*given: Any) -> Any:
        if next(calls) == 2:  # between the choice of what goes and its deletion
            other.add_document(FINGERPRINT, make_document("d", [first[0]]))
        return read_head(*given)

    head = store._bucket.head
    monkeypatch.setattr(garbage, "read_head", meanwhile)

    def renewing(name: str) -> Any:
        if name == chunk_name(second[0].chunk_id):
            os.utime(folder_of(url) / name)
        return head(name)

    monkeypatch.setattr(store._bucket, "head", renewing)
    assert store.collect_garbage(grace_s=RENEW_S).chunks == 1
    left = {name for name in objects(url) if name.startswith("chunks")}
    assert left == {chunk_name(chunk[0].chunk_id) for chunk in (first, second)}


def test_a_reader_survives_the_collection_of_what_it_was_following(
    store: ObjectChunkStore, other: ObjectChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_chunks(store, FINGERPRINT, "a", [1])
    read_segments, calls = following.read_segments, iter(range(100))

    def too_late(*given: Any) -> Any:
        if next(calls) == 0:  # the manifest is read, its segments are not
            add_chunks(store, FINGERPRINT, "b", [2])
            store.delete_document(FINGERPRINT, "a")
            store.collect_garbage(grace_s=0)
        return read_segments(*given)

    monkeypatch.setattr(following, "read_segments", too_late)
    assert doc_ids(other) == ["b"]


# -- S3 ------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire_are_those_that_are_needed(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    fingerprint = replace(tiny_fingerprint(n_layers=8), n_kv_heads=4, head_dim=64)
    items = [random_chunk(fingerprint, seed=seed, n_tokens=512) for seed in range(3)]
    with ObjectChunkStore.open(s3.new_url()) as store:
        store.put(fingerprint, items)
        store.add_document(fingerprint, make_document("d", [meta for meta, _ in items]))
        proxy.n_bytes = 0
        ids = [meta.chunk_id for meta, _ in items]
        out = [ChunkKV(*(torch.zeros_like(kv.k[:4]) for _ in range(2))) for _, kv in items]
        store.load_into(ids, out, layers=range(4))
        n_needed = sum(kv.k[:4].nbytes + kv.v[:4].nbytes for _, kv in items)
        assert n_needed <= proxy.n_bytes <= 1.05 * n_needed
        for (_, kv), loaded in zip(items, out, strict=True):
            assert torch.equal(loaded.v, kv.v[:4])
    proxy.close()
