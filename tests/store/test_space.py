"""A full store says so and goes on working; compacting gives room back and loses nothing."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pdllm_store import ChunkMeta, LMDBStore, StoreError, StoreFullError, chunks
from pdllm_store.rows import document_key, pack_chunk
from pdllm_store.tables import Tables
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint(kv_dtype="float32", n_layers=64)
CAP = 2 << 20


def put_document(store: LMDBStore, doc_id: str, seeds: range) -> list[ChunkMeta]:
    """About 67 KB of KV a chunk."""
    items = [random_chunk(FINGERPRINT, seed=seed, n_tokens=16) for seed in seeds]
    store.put(FINGERPRINT, items)
    metas = [meta for meta, _ in items]
    store.add_document(FINGERPRINT, make_document(doc_id, metas))
    return metas


def fill(store: LMDBStore) -> list[str]:
    """Documents of four chunks, then of one, then of none, until not even those go in; the ids of those that did."""
    doc_ids: list[str] = []
    for n_chunks in (4, 1, 0):
        try:
            while True:
                first = 4 * len(doc_ids)
                put_document(store, f"d{first}", range(first, first + n_chunks))
                doc_ids.append(f"d{first}")
        except StoreFullError:
            continue
    return doc_ids


def test_a_full_store_names_the_figures_and_keeps_nothing_of_the_refused(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32", map_size=CAP) as store:
        put_document(store, "small", range(2))
        before = store.stats()
        items = [random_chunk(FINGERPRINT, seed=seed, n_tokens=16) for seed in range(100, 140)]
        with pytest.raises(StoreFullError, match=rf"\d+ bytes used \(.*\) of a map of {CAP}, .* \d{{7}} more needed"):
            store.put(FINGERPRINT, items)
        assert store.stats() == before
        assert len(store.missing([meta.chunk_id for meta, _ in items])) == 40
        put_document(store, "more", range(2, 4))
        assert store.verify().ok


def test_a_full_store_can_be_emptied_and_filled_again(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32", map_size=CAP) as store:
        for _ in range(3):
            doc_ids = fill(store)
            assert len(doc_ids) >= 3
            assert [info.doc_id for info in store.documents(FINGERPRINT)] == sorted(doc_ids)
            for doc_id in doc_ids:
                assert store.delete_document(FINGERPRINT, doc_id)
            orphans = [random_chunk(FINGERPRINT, seed=seed)[0].chunk_id for seed in range(2000)]
            assert store.stats().documents == 0
            store.discard(orphans)
            assert store.verify().ok
            store.compact()
        assert store.stats().chunks == 0


def test_a_larger_cap_lets_a_full_store_go_on(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32", map_size=CAP) as store:
        doc_ids = fill(store)
    with LMDBStore.open(tmp_path, map_size=2 * CAP) as store:
        put_document(store, "more", range(900, 904))
        assert len(store.documents(FINGERPRINT)) == len(doc_ids) + 1


def test_a_larger_map_of_another_process_is_taken_over(tmp_path: Path, run_child: Callable[..., str]) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32", map_size=CAP) as store:
        put_document(store, "first", range(4))
        code = """
            import sys
            from pdllm_store import LMDBStore
            from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint
            fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=64)
            with LMDBStore.open(sys.argv[1], map_size=1 << 26) as store:
                items = [random_chunk(fingerprint, seed=seed, n_tokens=16) for seed in range(100, 140)]
                store.put(fingerprint, items)
                store.add_document(fingerprint, make_document("second", [meta for meta, _ in items]))
        """
        run_child(code, str(tmp_path))
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["first", "second"]
        put_document(store, "third", range(4, 8))
        assert store.verify().ok


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        n_put = 0
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            with pytest.raises(StoreFullError, match=f"the disk under {tmp_path} is full"):  # noqa: PT012
                while n_put < 100:
                    store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=n_put, n_tokens=16)])
                    n_put += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.stats().chunks == n_put > 5
        store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=n_put, n_tokens=16)])
        assert store.verify().ok


def test_room_that_was_freed_is_used_again(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        put_document(store, "d", range(8))
        sizes = []
        for start in range(8, 80, 8):
            put_document(store, "d", range(start, start + 8))
            sizes.append(store.stats().file_bytes)
        assert sizes[-1] == sizes[2]
        assert store.stats().kv_bytes < sizes[-1] < 4 * store.stats().kv_bytes


def test_compacting_drops_orphans_and_keeps_the_rest(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        metas = put_document(store, "kept", range(4))
        put_document(store, "gone", range(4, 40))
        store.delete_document(FINGERPRINT, "gone")
        store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=seed, n_tokens=16) for seed in range(50, 60)])
        before, generation = store.stats(), store.generation
        loaded = store.load(metas[0].chunk_id)
        freed = store.compact()
        after = store.stats()
        assert (before.orphans, after.orphans, after.chunks, after.documents) == (10, 0, 4, 1)
        assert freed == before.file_bytes - after.file_bytes > 2 << 20
        assert after.file_bytes < after.kv_bytes + (1 << 17)
        assert store.generation == generation
        assert torch.equal(store.load(metas[0].chunk_id).k, loaded.k)
        assert store.verify().ok
        put_document(store, "new", range(70, 72))
        assert sorted(os.listdir(tmp_path)) == ["data.mdb", "lock.mdb", "store.lock"]
    with LMDBStore.open(tmp_path) as store:
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["kept", "new"]


def test_compacting_puts_right_what_verify_found(tmp_path: Path) -> None:
    fingerprint = tiny_fingerprint()
    with LMDBStore.open(tmp_path) as store:
        kept, lost, too_many = add_chunks(store, fingerprint, "d", [1, 2, 3])
        add_chunks(store, fingerprint, "e", [1])

        def harm(tables: Tables) -> None:
            row = chunks.chunk_row(tables, too_many.chunk_id)
            assert row is not None
            tables.put("metas", too_many.chunk_id, pack_chunk(too_many.chunk_id, row._replace(refcount=7)))
            tables.delete("documents", document_key(fingerprint.digest, "e"))
            tables.put("metas", b"x" * 16, b"a damaged row that nobody refers to")
            tables.put("kv", b"y" * 18, b"KV without a row")

        store._transactions.write(harm)
        assert len(store.verify().problems) >= 4
        store.compact()
        store.discard([lost.chunk_id])
        report = store.verify()
        assert (report.damaged, report.missing, report.problems) == ([], [lost.chunk_id], [])
        assert store.missing([kept.chunk_id]) == []
        store.delete_document(fingerprint, "d")
        assert store.stats().chunks == 0


def test_opening_waits_for_a_compaction_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LMDBStore.open(tmp_path).close()
    compacting = os.open(tmp_path / "store.lock", os.O_RDWR)
    try:
        fcntl.flock(compacting, fcntl.LOCK_EX)
        monkeypatch.setattr("pdllm_store.environment._LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(StoreError, match="being compacted"):
            LMDBStore.open(tmp_path)
        monkeypatch.setattr("pdllm_store.environment._LOCK_TIMEOUT_S", 60)
        ends = threading.Timer(0.2, fcntl.flock, (compacting, fcntl.LOCK_UN))
        ends.start()
        with LMDBStore.open(tmp_path) as store:
            assert store.stats().documents == 0
        ends.join()
    finally:
        os.close(compacting)


def test_a_store_in_use_is_not_compacted(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, tiny_fingerprint(), "d", [1])
        with LMDBStore.open(tmp_path), pytest.raises(StoreError, match="2 handles"):
            store.compact()
        in_use = os.open(tmp_path / "store.lock", os.O_RDWR)  # what another process holds
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with pytest.raises(StoreError, match="open in another process"):
            store.compact()
        os.close(in_use)
        add_chunks(store, tiny_fingerprint(), "e", [2])
        store.compact()
        assert store.stats().documents == 2


def test_compacting_needs_room_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, tiny_fingerprint(), "d", [1])
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, 1))
            with pytest.raises(StoreFullError, match="1 free"):
                store.compact()
        assert store.stats().documents == 1
        store.compact()


def test_a_copy_left_by_a_killed_compaction_is_removed(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, tiny_fingerprint(), "d", [1])
    (tmp_path / "compact.tmp").mkdir()
    (tmp_path / "compact.tmp" / "data.mdb").write_bytes(b"half")
    with LMDBStore.open(tmp_path) as store:
        assert store.stats().documents == 1
    assert not (tmp_path / "compact.tmp").exists()
