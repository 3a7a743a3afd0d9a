"""Handles, threads, processes and forks work on one store at the same time."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pdllm_store import ChunkKV, ChunkNotFoundError, LMDBStore, StoreClosedError, StoreError
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()


def test_handles_on_one_path_by_any_spelling_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("s")
    absolute = LMDBStore.open(tmp_path / "s")
    others = [LMDBStore.open(path) for path in ("s", "./s/../s", "link", tmp_path / "link")]
    assert {store.path for store in others} == {absolute.path}
    metas = add_chunks(absolute, FINGERPRINT, "d", [1])
    for store in others:
        assert store.missing([metas[0].chunk_id]) == []
        store.close()
    absolute.close()
    with LMDBStore.open("link/../s") as store:
        assert store.stats().documents == 1


def test_closing_one_handle_leaves_the_other_working(tmp_path: Path) -> None:
    first, second = LMDBStore.open(tmp_path), LMDBStore.open(tmp_path)
    add_chunks(first, FINGERPRINT, "a", [1])
    first.close()
    first.close()
    with pytest.raises(StoreClosedError):
        first.stats()
    add_chunks(second, FINGERPRINT, "b", [2])
    assert second.stats().documents == 2
    assert second.stats().hits == 0
    second.close()


def test_another_cap_than_the_open_one_is_an_error(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, map_size=1 << 24):
        LMDBStore.open(tmp_path, map_size=1 << 24).close()
        LMDBStore.open(tmp_path).close()
        with pytest.raises(StoreError, match=r"16777216 bytes, not 33554432"):
            LMDBStore.open(tmp_path, map_size=1 << 25)


def test_many_threads_may_read_at_once(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        metas = add_chunks(store, FINGERPRINT, "d", range(4))
        expected = [store.load(meta.chunk_id).k for meta in metas]
        barrier = threading.Barrier(200)
        wrong: list[int] = []

        def read(index: int) -> None:
            barrier.wait()
            k = torch.empty(3, 5, 2, 4)
            store.load_into([metas[index % 4].chunk_id], [ChunkKV(k, k.clone())])
            if not torch.equal(k, expected[index % 4].float()):
                wrong.append(index)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.stats().hits == 204


def test_another_process_computes_the_same_ids_and_sees_the_same_store(
    tmp_path: Path, run_child: Callable[..., str]
) -> None:
    code = """
        import json, sys
        from pdllm_store import LMDBStore
        from pdllm_store.testing import add_chunks, random_chunk, tiny_fingerprint
        fingerprint = tiny_fingerprint()
        with LMDBStore.open(sys.argv[1], create=False) as store:
            n_chunks = store.stats().chunks
            metas = add_chunks(store, fingerprint, "there", [1, 2])
            n_new = store.stats().chunks - n_chunks
            store.delete_document(fingerprint, "here")
            doc_ids = [info.doc_id for info in store.documents(fingerprint)]
            print(json.dumps([fingerprint.digest.hex(), [meta.chunk_id.hex() for meta in metas], n_new, doc_ids]))
    """
    with LMDBStore.open(tmp_path) as store:
        one, two, three = add_chunks(store, FINGERPRINT, "here", [1, 2, 3])
        generation = store.generation
        told = json.loads(run_child(code, str(tmp_path), PYTHONHASHSEED="1"))  # here it is another
        assert told == [FINGERPRINT.digest.hex(), [one.chunk_id.hex(), two.chunk_id.hex()], 0, ["there"]]
        assert store.generation > generation
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["there"]
        assert store.missing([one.chunk_id, two.chunk_id, three.chunk_id]) == [three.chunk_id]


def test_two_processes_may_write_the_same_documents_at_once(tmp_path: Path, run_child: Callable[..., str]) -> None:
    code = """
        import os, sys
        from pdllm_store import LMDBStore
        from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint
        fingerprint = tiny_fingerprint()
        items = [random_chunk(fingerprint, seed=seed) for seed in range(12)]
        os.fork()
        with LMDBStore.open(sys.argv[1]) as store:
            for _ in range(20):
                for first in range(0, 12, 3):
                    store.put(fingerprint, items)
                    document = make_document(f"d{first}", [meta for meta, _ in items[first:first + 3]])
                    store.add_document(fingerprint, document)
    """
    run_child(code, str(tmp_path))  # its output ends when both have ended
    with LMDBStore.open(tmp_path) as store:
        assert store.verify().ok
        stats = store.stats()
        assert (stats.documents, stats.chunks, stats.orphans) == (4, 12, 0)


def test_readers_never_get_the_kv_of_another_chunk_while_pages_are_reused(tmp_path: Path) -> None:
    fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=16)
    items = [random_chunk(fingerprint, seed=seed, n_tokens=16) for seed in range(24)]
    metas = [meta for meta, _ in items]
    stop = threading.Event()
    wrong: list[object] = []
    n_loads = 0

    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:

        def read(start: int) -> None:
            nonlocal n_loads
            try:
                while not stop.is_set():
                    for meta, kv in items[start:] + items[:start]:
                        try:
                            loaded = store.load(meta.chunk_id)
                        except ChunkNotFoundError:
                            continue
                        n_loads += 1
                        if not (torch.equal(loaded.k, kv.k) and torch.equal(loaded.v, kv.v)):
                            wrong.append(meta.chunk_id)
            except BaseException as error:
                wrong.append(error)

        readers = [threading.Thread(target=read, args=(8 * index,)) for index in range(3)]
        for reader in readers:
            reader.start()
        for index in range(60):
            first = index * 5 % 24
            some = (items + items)[first : first + 6]
            store.put(fingerprint, some)
            store.add_document(fingerprint, make_document(f"d{index % 3}", [meta for meta, _ in some]))
        stop.set()
        for reader in readers:
            reader.join()
        assert wrong == []
        assert n_loads > 0
        assert store.verify().ok
        assert len(store.missing([meta.chunk_id for meta in metas])) >= 6


def work_in_child(store: LMDBStore, seed: int, queue: multiprocessing.Queue[object]) -> None:
    try:
        add_chunks(store, FINGERPRINT, f"child{seed}", [seed])
        queue.put([info.doc_id for info in store.documents(FINGERPRINT)])
        store.close()
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_and_its_parent_both_go_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with LMDBStore.open(tmp_path) as store, LMDBStore.open(tmp_path) as second:
        metas = add_chunks(store, FINGERPRINT, "parent", [1])
        stop = threading.Event()
        loads = 0
        failures: list[BaseException] = []

        def read() -> None:
            nonlocal loads
            try:
                while not stop.is_set():
                    store.load(metas[0].chunk_id)
                    loads += 1
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        queue: multiprocessing.Queue[object] = context.Queue()
        for seed in (2, 3, 4):
            child = context.Process(target=work_in_child, args=(store, seed, queue))
            child.start()
            got = queue.get(timeout=60)
            child.join(timeout=60)
            assert child.exitcode == 0
            assert got == [*(f"child{n}" for n in range(2, seed + 1)), "parent"]
        stop.set()
        for reader in readers:
            reader.join()
        queue.close()
        queue.join_thread()
        assert failures == []
        assert loads > 0
        add_chunks(second, FINGERPRINT, "after", [9])
        assert store.stats().documents == 5
        assert store.verify().ok


def test_killed_readers_do_not_use_up_the_slots(tmp_path: Path, run_child: Callable[..., str]) -> None:
    code = """
        import os, signal, sys, time
        from pdllm_store import LMDBStore, environment
        environment._MAX_READERS = 8
        store = LMDBStore.open(sys.argv[1])
        for _ in range(3):
            children = []
            for _ in range(8):
                reading, writing = os.pipe()
                child = os.fork()
                if child == 0:
                    with store._transactions.read():
                        os.write(writing, b"!")
                        time.sleep(60)
                assert os.read(reading, 1) == b"!"
                os.close(reading)
                os.close(writing)
                children.append(child)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            print(store.stats().documents)
    """
    assert run_child(code, str(tmp_path)).split() == ["0"] * 3
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, FINGERPRINT, "d", [1])


def test_a_document_is_visible_to_others_whole_or_not_at_all(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        items = [random_chunk(FINGERPRINT, seed=seed) for seed in range(8)]
        document = make_document("d", [meta for meta, _ in items])
        stop = threading.Event()
        seen: set[tuple[int, int]] = set()
        failures: list[BaseException] = []

        def watch() -> None:
            try:
                while not stop.is_set():
                    refs = store.refs(FINGERPRINT)
                    seen.add((len(refs), store.stats().documents))
            except BaseException as error:
                failures.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(20):
            store.put(FINGERPRINT, items)
            store.add_document(FINGERPRINT, document)
            store.delete_document(FINGERPRINT, "d")
        stop.set()
        watcher.join()
        assert failures == []
        assert {n_refs for n_refs, _ in seen} <= {0, 8}


def test_a_child_forked_while_a_thread_computes_again_can_fetch(tmp_path: Path, run_child: Callable[..., str]) -> None:
    code = """
        import os, sys, threading, time
        from pdllm_store import LMDBStore
        from pdllm_store.testing import add_chunks, random_chunk, tiny_fingerprint
        fingerprint = tiny_fingerprint()
        items = {meta.chunk_id: (meta, kv) for meta, kv in (random_chunk(fingerprint, seed=s) for s in range(2))}
        store = LMDBStore.open(sys.argv[1])
        ids = [meta.chunk_id for meta in add_chunks(store, fingerprint, "d", range(2))]
        store.evict()
        computing = threading.Event()

        def recompute(metas):
            computing.set()
            time.sleep(2 if threading.current_thread() is not threading.main_thread() else 0)
            yield [items[meta.chunk_id] for meta in metas]

        store.recompute_with(fingerprint, recompute)
        thread = threading.Thread(target=lambda: store.fetch(ids[:1]))
        thread.start()
        computing.wait(10)
        if not (child := os.fork()):
            os._exit(0 if store.fetch(ids[1:]).kv else 1)
        deadline = time.monotonic() + 20
        while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        print(done[0] == child and done[1] == 0)
        if not done[0]:
            os.kill(child, 9)
        thread.join()
    """
    assert run_child(code, str(tmp_path)).strip() == "True"
