"""A store with a cap stays below it, and what it drops is what was not used for the longest time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from pdllm_store import ChunkKV, ChunkMeta, ChunkNotFoundError, LMDBStore, MemoryStore, StoreFullError
from pdllm_store import eviction as eviction_module
from pdllm_store.table_store import TableStore
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

MIB = 1 << 20
CAP = 2 * MIB
FINGERPRINT = tiny_fingerprint(kv_dtype="float32", n_layers=64)  # a chunk of 16 tokens takes 64 KiB


def chunk(seed: int, n_tokens: int = 16) -> tuple[ChunkMeta, ChunkKV]:
    return random_chunk(FINGERPRINT, seed=seed, n_tokens=n_tokens)


def put_document(store: TableStore, doc_id: str, seeds: Sequence[int], *, n_tokens: int = 16) -> list[bytes]:
    items = [chunk(seed, n_tokens) for seed in seeds]
    store.put(FINGERPRINT, items)
    store.add_document(FINGERPRINT, make_document(doc_id, [meta for meta, _ in items]))
    return [meta.chunk_id for meta, _ in items]


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TableStore]:
    if request.param == "disk":
        store: TableStore = LMDBStore.open(tmp_path / "s", kv_dtype="float32", max_bytes=CAP)
    else:
        store = MemoryStore(kv_dtype="float32", max_bytes=CAP)
    yield store
    store.close()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a millisecond later, so that no two uses are at once."""
    start = time.time_ns() // 1_000_000
    ticks = iter(range(start, start + 1_000_000))
    monkeypatch.setattr(eviction_module, "now_ms", lambda: next(ticks))


def test_documents_stay_known_when_their_kv_gives_way(store: TableStore) -> None:
    ids = {f"d{i}": put_document(store, f"d{i}", [i]) for i in range(60)}
    stats = store.stats()
    assert [info.doc_id for info in store.documents(FINGERPRINT)] == sorted(ids)
    assert 0 < stats.evicted == stats.evictions == 60 - stats.chunks < 60
    every = [chunk_id for found in ids.values() for chunk_id in found]
    assert len(store.missing(every)) == stats.evicted == len(store.evicted(every))
    for chunk_id in every:
        assert len(store.meta(chunk_id).token_ids) == 16
    report = store.verify()
    assert report.ok
    assert report.n_evicted == stats.evicted
    listed = {info.doc_id: info.n_bytes for info in store.documents(FINGERPRINT)}
    assert listed["d59"] > 0 == listed["d0"]


@pytest.mark.usefixtures("ticking")
def test_what_was_read_last_stays(store: TableStore) -> None:
    ids = [put_document(store, f"d{i}", [i])[0] for i in range(10)]
    store.load(ids[0])
    store.touch([ids[3]])
    n = 10
    while not store.stats().evictions:
        ids += put_document(store, f"d{n}", [n])
        n += 1
    n_gone = store.stats().evictions
    assert store.evicted(ids) == [chunk_id for chunk_id in ids if chunk_id not in (ids[0], ids[3])][:n_gone]


def test_pinned_documents_keep_their_kv(store: TableStore) -> None:
    pinned = put_document(store, "pinned", [1000, 1001])
    shared = put_document(store, "shares", [1001, 1002])
    assert store.set_pinned(FINGERPRINT, "pinned", pinned=True) is True
    assert store.set_pinned(FINGERPRINT, "pinned", pinned=True) is False
    for i in range(60):
        put_document(store, f"d{i}", [i])
    assert store.missing([*pinned, *shared]) == [shared[1]]
    store.set_pinned(FINGERPRINT, "pinned", pinned=False)
    assert store.verify().ok
    for i in range(100, 160):
        put_document(store, f"d{i}", [i])
    assert store.missing(pinned) == pinned


def test_a_replaced_pinned_document_pins_its_new_chunks(store: TableStore) -> None:
    put_document(store, "p", [1, 2])
    store.set_pinned(FINGERPRINT, "p", pinned=True)
    (kept, new) = put_document(store, "p", [2, 3])
    store.evict()
    assert store.missing([kept, new]) == []
    assert store.verify().ok
    store.delete_document(FINGERPRINT, "p")
    assert store.stats().chunks == 0
    assert store.verify().ok


def test_when_all_is_pinned_the_store_is_full_and_says_so(store: TableStore) -> None:
    ids: list[bytes] = []
    with pytest.raises(StoreFullError, match=rf"of a cap of {CAP}.*pinned, unfinished or no KV"):  # noqa: PT012
        for i in range(60):
            ids += put_document(store, f"d{i}", [i])
            store.set_pinned(FINGERPRINT, f"d{i}", pinned=True)
    assert store.missing(ids) == []
    assert store.stats().evictions == 0
    assert store.delete_document(FINGERPRINT, "d0")
    assert store.delete_document(FINGERPRINT, "d1")
    put_document(store, "fits now", [500])
    assert store.verify().ok


def test_what_could_never_fit_costs_nobody_their_kv(store: TableStore) -> None:
    ids = put_document(store, "d", range(8))
    with pytest.raises(StoreFullError):
        store.put(FINGERPRINT, [chunk(seed) for seed in range(100, 140)])
    assert store.missing(ids) == []
    assert store.stats().orphans == 0


def test_a_prefill_at_work_is_not_evicted_but_an_old_one_is(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = [chunk(seed) for seed in range(10)]
    store.put(FINGERPRINT, at_work)
    for i in range(100, 140):
        put_document(store, f"d{i}", [i])
    ids = [meta.chunk_id for meta, _ in at_work]
    assert store.missing(ids) == []
    later = eviction_module.now_ms() + eviction_module.UNFINISHED_MS + 1
    monkeypatch.setattr(eviction_module, "now_ms", lambda: later)
    for i in range(200, 240):
        put_document(store, f"d{i}", [i])
    assert store.missing(ids) == ids
    with pytest.raises(ChunkNotFoundError, match="never put"):
        store.meta(ids[0])
    assert store.verify().ok


def test_evict_drops_what_was_not_used_for_long(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = put_document(store, "old", [1, 2]), put_document(store, "new", [3])
    start = eviction_module.now_ms()
    monkeypatch.setattr(eviction_module, "now_ms", lambda: start + 10_000)
    store.touch(new)
    assert store.evict(unused_for_s=60) == 0
    assert store.evict(unused_for_s=5) == 2
    assert store.evicted([*old, *new]) == old
    assert store.evict(n_bytes=1) == 1
    assert store.evicted(new) == new
    assert store.evict() == 0
    assert store.stats().evictions == 3


def test_a_document_may_refer_to_chunks_that_were_evicted(store: TableStore) -> None:
    ids = put_document(store, "a", [1, 2])
    store.evict()
    metas = [chunk(1)[0], chunk(2)[0]]
    assert store.add_document(FINGERPRINT, make_document("a", metas, text="x" * 20)) is True
    assert store.add_document(FINGERPRINT, make_document("b", metas)) is False
    store.delete_document(FINGERPRINT, "a")
    assert store.evicted(ids) == ids
    store.delete_document(FINGERPRINT, "b")
    assert store.evicted(ids) == []
    assert store.verify().ok


def test_evicted_kv_comes_back_by_putting_it_again(store: TableStore) -> None:
    (chunk_id,) = put_document(store, "a", [1])
    store.evict()
    meta, kv = chunk(1)
    assert store.put(FINGERPRINT, [(meta, kv)]) > 0
    assert torch.equal(store.load(chunk_id).k, kv.k)
    assert store.stats().evicted == 0
    assert store.verify().ok


@pytest.mark.parametrize("seed", range(3))
def test_the_file_stays_below_the_cap_whatever_sizes_come(tmp_path: Path, seed: int) -> None:
    cap, chance = 12 * MIB, random.Random(seed)
    with LMDBStore.open(tmp_path, kv_dtype="float32", max_bytes=cap) as store:
        live: list[str] = []
        for i in range(150):
            seeds = range(10 * i, 10 * i + chance.randint(1, 4))
            put_document(store, f"d{i}", seeds, n_tokens=chance.randint(1, 130))
            live.append(f"d{i}")
            if chance.random() < 0.2:
                store.delete_document(FINGERPRINT, live.pop(chance.randrange(len(live))))
            if chance.random() < 0.3:
                refs = store.document(FINGERPRINT, chance.choice(live)).chunks
                store.touch([ref.chunk_id for ref in refs])
            stats = store.stats()
            assert stats.used_bytes + stats.free_bytes <= cap
            assert stats.file_bytes <= cap + MIB  # LMDB's lock file, and blocks of the file system
        assert stats.evictions > 20
        assert store.verify().ok


def test_the_cap_and_the_order_of_use_survive_a_killed_process(tmp_path: Path, run_child: Callable[..., str]) -> None:
    code = """
        import os, signal, sys
        from pdllm_store import LMDBStore
        from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint
        fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=64)
        store = LMDBStore.open(sys.argv[1], kv_dtype="float32", max_bytes=2 << 20)
        for seed in range(40):
            meta, kv = random_chunk(fingerprint, seed=seed, n_tokens=16)
            store.put(fingerprint, [(meta, kv)])
            store.add_document(fingerprint, make_document(f"d{seed}", [meta]))
            store.touch([random_chunk(fingerprint, seed=0, n_tokens=16)[0].chunk_id])
        print(store.stats().evictions, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    evictions = int(run_child(code, str(tmp_path), status=-9))
    with LMDBStore.open(tmp_path) as store:
        stats = store.stats()
        assert (stats.max_bytes, stats.evictions, stats.documents) == (CAP, evictions, 40)
        assert stats.chunks == 40 - evictions
        first = chunk(0)[0].chunk_id
        assert store.missing([first]) == []
        for i in range(100, 110):
            put_document(store, f"d{i}", [i])
        assert store.missing([first]) == []
        assert store.verify().ok


def test_a_cap_can_be_changed_and_lifted(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        assert store.max_bytes is None
        put_document(store, "d", range(20))
        store.set_max_bytes(CAP // 2)
        assert store.stats().max_bytes == store.max_bytes == CAP // 2
        with pytest.raises(ValueError, match="at least 1048576"):
            store.set_max_bytes(MIB - 1)
        put_document(store, "more", [50])
        assert store.stats().evictions > 0
        store.set_max_bytes(None)
        put_document(store, "much more", range(100, 160))
        assert store.missing([chunk(seed)[0].chunk_id for seed in range(100, 160)]) == []
    with LMDBStore.open(tmp_path, max_bytes=CAP) as store:
        assert store.max_bytes == CAP
    with LMDBStore.open(tmp_path) as store:
        assert store.max_bytes == CAP
        with pytest.raises(ValueError, match="read-only keeps its cap"):
            LMDBStore.open(tmp_path, read_only=True, max_bytes=CAP)


def test_compaction_brings_a_file_below_a_lower_cap(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        put_document(store, "d", range(60))
        store.set_max_bytes(CAP)
        put_document(store, "more", [100])
        assert store.stats().file_bytes > CAP
        store.compact()
        stats = store.stats()
        assert stats.file_bytes <= CAP
        assert stats.documents == 2
        assert store.verify().ok


def test_two_writers_share_one_cap(tmp_path: Path, run_child: Callable[..., str]) -> None:
    code = """
        import os, sys
        from pdllm_store import LMDBStore
        from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint
        fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=64)
        children = []
        for number in range(3):
            if not (child := os.fork()):
                with LMDBStore.open(sys.argv[1], kv_dtype="float32", max_bytes=4 << 20) as store:
                    for seed in range(1000 * number, 1000 * number + 60):
                        meta, kv = random_chunk(fingerprint, seed=seed, n_tokens=16)
                        store.put(fingerprint, [(meta, kv)])
                        store.add_document(fingerprint, make_document(f"d{seed}", [meta]))
                        stats = store.stats()
                        assert stats.used_bytes + stats.free_bytes <= 4 << 20, stats
                os._exit(0)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
    """
    assert run_child(code, str(tmp_path)).strip() == "[0, 0, 0]"
    with LMDBStore.open(tmp_path) as store:
        stats = store.stats()
        assert stats.documents == 180 == stats.chunks + stats.evicted
        assert store.verify().ok


def test_a_damaged_cap_is_no_cap_and_is_logged(store: TableStore, caplog: pytest.LogCaptureFixture) -> None:
    store._transactions.write(lambda tables: tables.put("manifest", b"limits", b"damaged"))
    add_chunks(store, FINGERPRINT, "d", [1])
    assert store.max_bytes is None
    assert "has no cap until it is set again" in caplog.text
    store.set_max_bytes(CAP)
    assert store.max_bytes == CAP


def test_the_file_does_not_grow_beyond_the_cap_while_an_old_snapshot_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdllm_store.capped._SNAPSHOT_S", 0.05)
    cap = 8 * MIB
    with LMDBStore.open(tmp_path, kv_dtype="float32", max_bytes=cap) as store:
        put_document(store, "first", range(4))
        reading, done = threading.Event(), threading.Event()

        def read() -> None:
            with store._transactions.read():
                reading.set()
                done.wait(60)

        reader = threading.Thread(target=read)
        reader.start()
        reading.wait(10)
        with pytest.raises(StoreFullError, match=r"snapshot \d+ transactions old"):  # noqa: PT012
            for i in range(300):
                put_document(store, f"d{i}", [1000 + i])
        stats = store.stats()
        assert stats.used_bytes + stats.free_bytes <= cap
        done.set()
        reader.join()
        for i in range(300, 400):
            put_document(store, f"d{i}", [1000 + i])
        stats = store.stats()
        assert stats.used_bytes + stats.free_bytes <= cap
        assert store.verify().ok


def test_a_writer_that_hangs_keeps_no_reader_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdllm_store.capped._USES_AT_ONCE", 2)
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        ids = put_document(store, "d", range(8), n_tokens=1024)  # enough for two threads
        writing, done = threading.Event(), threading.Event()

        def hang(_tables: object) -> None:
            writing.set()
            done.wait(60)

        writer = threading.Thread(target=lambda: store._transactions.write(hang))
        writer.start()
        writing.wait(10)
        try:
            started = time.monotonic()
            for _ in range(6):
                store.fetch(ids)
            assert time.monotonic() - started < 30  # not until the writer ends
        finally:
            done.set()
            writer.join()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1048576.5, 10**30, -1, "1MiB"])
def test_a_cap_that_is_none_is_refused_and_not_kept(store: TableStore, wrong: object) -> None:
    with pytest.raises(ValueError, match="max_bytes is"):
        store.set_max_bytes(wrong)  # type: ignore[arg-type]
    assert store.max_bytes == CAP
    for call in (lambda: store.touch([b""]), lambda: store.fetch([b"short"]), lambda: store.evict(unused_for_s=-5)):
        with pytest.raises(ValueError, match="expected"):
            call()
    put_document(store, "d", [1])
