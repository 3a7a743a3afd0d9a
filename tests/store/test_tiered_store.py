"""A cache in front of an object store: what it keeps, what it fetches, and that nothing depends on it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pdllm_store import (
    ChunkId,
    ChunkKV,
    ChunkMeta,
    LMDBStore,
    ObjectChunkStore,
    StoreFormatError,
    StoreMismatchError,
    TieredChunkStore,
)
from pdllm_store.garbage import RENEW_S
from pdllm_store.location import DATA_FILE
from pdllm_store.published import chunk_name
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()
WIDE = tiny_fingerprint(n_layers=40)  # chunks of some 100 KB


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def filled(url: str) -> list[ChunkId]:
    """A store that another machine has filled."""
    with ObjectChunkStore.open(url) as store:
        return [meta.chunk_id for meta in add_chunks(store, FINGERPRINT, "d", range(6))]


def kv_of(seed: int) -> ChunkKV:
    return random_chunk(FINGERPRINT, seed=seed)[1]


def wide_chunks(seeds: Sequence[int]) -> list[tuple[ChunkMeta, ChunkKV]]:
    return [random_chunk(WIDE, seed=seed, n_tokens=80) for seed in seeds]


def test_a_chunk_is_fetched_once_and_then_read_here(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        assert store.missing(filled) == store.evicted(filled) == []
        for _ in range(2):
            fetched = store.fetch(filled)
            assert fetched.recomputed == frozenset()
            assert all(torch.equal(fetched.kv[chunk_id].k, kv_of(seed).k) for seed, chunk_id in enumerate(filled))
            assert store.stats().fetched == 6
        assert (store.stats().chunks, store.stats().evicted, store.stats().misses) == (6, 0, 0)
    with TieredChunkStore.open(url, cache=cache) as store:  # a later process
        store.load(filled[0])
        assert store.stats().fetched == 0
        assert store.verify().ok


def test_layers_of_a_chunk_are_cached_with_the_others(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        for layers in (range(2, 3), range(2)):
            out = ChunkKV(*(torch.zeros(len(layers), 5, 2, 4) for _ in range(2)))
            store.load_into(filled[:1], [out], layers=layers)
            assert torch.equal(out.k, kv_of(0).k[layers.start : layers.stop].float())
        assert store.stats().fetched == 1


def test_what_is_written_here_is_there_at_once_and_not_fetched(url: str, cache: Path) -> None:
    with TieredChunkStore.open(url, cache=cache) as store, ObjectChunkStore.open(url) as elsewhere:
        (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
        elsewhere.refresh()
        assert torch.equal(elsewhere.load(meta.chunk_id).k, kv_of(1).k)
        store.load(meta.chunk_id)
        assert store.stats().fetched == 0
    shutil.rmtree(cache)
    with TieredChunkStore.open(url, cache=cache) as store:  # nothing depended on it
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["d"]
        assert torch.equal(store.load(meta.chunk_id).k, kv_of(1).k)
        assert store.stats().fetched == 1


def test_what_the_cache_evicts_is_fetched_and_never_computed(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:

        def recompute(_metas: Sequence[ChunkMeta]) -> Iterator[Any]:
            raise AssertionError("computed")

        store.recompute_with(FINGERPRINT, recompute)
        store.fetch(filled)
        assert store.evict() == 6
        assert store.missing(filled) == []
        assert store.fetch(filled).recomputed == frozenset()
        stats = store.stats()
        assert (stats.fetched, stats.recomputed, stats.evictions) == (12, 0, 6)


def test_the_cap_of_the_cache_holds_and_limits_nothing_else(url: str, cache: Path) -> None:
    n_bytes = 1 << 20
    with TieredChunkStore.open(url, cache=cache, cache_bytes=n_bytes) as store:
        assert (store.max_bytes, store.stats().max_bytes) == (None, n_bytes)
        for first in range(0, 30, 3):
            items = wide_chunks(range(first, first + 3))
            store.put(WIDE, items)
            store.add_document(WIDE, make_document(f"d{first}", [meta for meta, _ in items]))
        ids = [meta.chunk_id for meta, _ in wide_chunks(range(30))]
        for seed, chunk_id in enumerate(ids):
            assert torch.equal(store.fetch([chunk_id]).kv[chunk_id].v, wide_chunks([seed])[0][1].v)
        stats = store.stats()
        assert stats.recomputed == 0
        assert stats.chunks < 30
        assert stats.evictions > 0
        assert (cache / DATA_FILE).stat().st_size <= n_bytes
        everything = store.fetch(ids)  # more than fits at once
        assert len(everything.kv) == 30
        assert (cache / DATA_FILE).stat().st_size <= n_bytes
        large = random_chunk(WIDE, seed=99, n_tokens=2000)  # larger than the cache
        assert store.put(WIDE, [large]) > n_bytes
        store.add_document(WIDE, make_document("large", [large[0]]))
        assert torch.equal(store.load(large[0].chunk_id).k, large[1].k)
    with TieredChunkStore.open(url, cache=cache) as store:
        assert store.stats().max_bytes == n_bytes  # it is remembered


def test_two_threads_that_miss_the_same_chunk_fetch_it_once(
    url: str, cache: Path, filled: list[ChunkId], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        part, names, begun = store._bucket.range, [], threading.Event()

        def slowly(name: str, start: int, end: int) -> Any:
            names.append(name)
            begun.wait(10)
            return part(name, start, end)

        monkeypatch.setattr(store._bucket, "range", slowly)
        found: list[dict[ChunkId, ChunkKV]] = []
        wanted = [filled[:3], filled[1:4], filled[:4], filled[3:]]
        threads = [threading.Thread(target=lambda ids=ids: found.append(store.fetch(ids).kv)) for ids in wanted]
        for thread in threads:
            thread.start()
        time.sleep(0.1)  # until all of them wait
        begun.set()
        for thread in threads:
            thread.join()
        assert sorted(names) == sorted(chunk_name(chunk_id) for chunk_id in filled)
        assert store.stats().fetched == 6
        assert sorted(map(len, found)) == [3, 3, 3, 4]
        for kv in found:
            assert all(torch.equal(kv[chunk_id].k, kv_of(filled.index(chunk_id)).k) for chunk_id in kv)


def test_prefetching_brings_chunks_into_the_cache(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        store.prefetch([*filled[:2], bytes(16)])
        deadline = time.monotonic() + 20
        while store.stats().chunks < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.stats().fetched == 2
        store.load(filled[0])
        assert store.stats().fetched == 2


def test_kv_that_is_damaged_here_is_fetched_again_and_counted(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        store.fetch(filled)

        def damage(tables: Any) -> None:
            ((key, value),) = [(key, bytearray(value)) for key, value in tables.scan("kv", filled[0])]
            value[-1] ^= 1
            tables.put("kv", key, value)

        store._near._transactions.write(damage)
        for _ in range(2):
            assert torch.equal(store.fetch(filled[:1]).kv[filled[0]].v, kv_of(0).v)
        stats = store.stats()
        assert (stats.damaged, stats.recomputed, stats.fetched) == (1, 0, 7)


def test_a_cache_belongs_to_one_store(tmp_path: Path, url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as store:
        store.load(filled[0])
    elsewhere = (tmp_path / "elsewhere").as_uri()
    with pytest.raises(StoreMismatchError, match="another store"):
        TieredChunkStore.open(elsewhere, cache=cache)
    own = tmp_path / "own"
    with LMDBStore.open(own) as plain:
        add_chunks(plain, FINGERPRINT, "mine", [1])
    with pytest.raises(StoreFormatError, match="would overwrite a store"):
        TieredChunkStore.open(url, cache=own, cache_bytes=1 << 20)
    with LMDBStore.open(own) as plain:
        assert [info.doc_id for info in plain.documents(FINGERPRINT)] == ["mine"]
        assert plain.max_bytes is None


def test_two_handles_share_a_cache(url: str, cache: Path, filled: list[ChunkId]) -> None:
    with TieredChunkStore.open(url, cache=cache) as one, TieredChunkStore.open(url, cache=cache) as two:
        one.fetch(filled)
        two.fetch(filled)
        assert (one.stats().fetched, two.stats().fetched) == (6, 0)
        add_chunks(one, FINGERPRINT, "e", [7])
        add_chunks(two, FINGERPRINT, "f", [8])
        add_chunks(one, FINGERPRINT, "g", [9])
        one.delete_document(FINGERPRINT, "f")
        for store in (one, two):
            store.refresh()
            assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["d", "e", "g"]
            assert store.verify().ok


def test_the_cache_of_a_read_only_store_is_filled_all_the_same(url: str, cache: Path, filled: list[ChunkId]) -> None:
    for n_fetched in (6, 0):
        with TieredChunkStore.open(url, cache=cache, read_only=True) as store:
            store.fetch(filled)
            assert store.stats().fetched == n_fetched


def test_a_prefill_goes_on_where_it_was_killed_even_if_its_chunks_were_collected(url: str, cache: Path) -> None:
    meta, kv = random_chunk(FINGERPRINT, seed=1)
    with TieredChunkStore.open(url, cache=cache) as store:
        store.put(FINGERPRINT, [(meta, kv)])
        store.collect_garbage(grace_s=0)
    with TieredChunkStore.open(url, cache=cache) as store:
        assert store.missing([meta.chunk_id]) == []  # nothing is computed twice
        store.add_document(FINGERPRINT, make_document("d", [meta]))
    with ObjectChunkStore.open(url) as elsewhere:
        assert torch.equal(elsewhere.load(meta.chunk_id).k, kv.k)


def test_a_chunk_that_only_the_far_store_holds_counts_as_missing_once_it_may_be_collected(
    url: str, cache: Path
) -> None:
    meta, kv = random_chunk(WIDE, seed=1, n_tokens=2000)  # larger than the cache
    with TieredChunkStore.open(url, cache=cache, cache_bytes=1 << 20) as store:
        store.put(WIDE, [(meta, kv)])
        assert store.missing([meta.chunk_id]) == []
        store._uploaded[meta.chunk_id] -= 2 * RENEW_S
        assert store.missing([meta.chunk_id]) == [meta.chunk_id]
        store.put(WIDE, [(meta, kv)])
        assert store.missing([meta.chunk_id]) == []
        store.add_document(WIDE, make_document("d", [meta]))
    with TieredChunkStore.open(url, cache=cache) as store:
        assert store.missing([meta.chunk_id]) == []
        assert torch.equal(store.load(meta.chunk_id).k, kv.k)


def test_another_process_sees_what_is_published(url: str, cache: Path, run_child: Callable[..., str]) -> None:
    code = """
        import sys
        from pdllm_store import TieredChunkStore
        from pdllm_store.testing import add_chunks, tiny_fingerprint
        with TieredChunkStore.open(sys.argv[1], cache=sys.argv[2]) as store:
            add_chunks(store, tiny_fingerprint(), "child", [1, 2])
            print(store.generation)
    """
    with TieredChunkStore.open(url, cache=cache) as store:
        add_chunks(store, FINGERPRINT, "parent", [2, 3])
        generation = int(run_child(code, url, str(cache)))
        store.refresh()
        assert store.generation == generation
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["child", "parent"]
        store.fetch([random_chunk(FINGERPRINT, seed=seed)[0].chunk_id for seed in (1, 2, 3)])
        assert store.stats().fetched == 0  # the child has left its chunks in the cache


class TieredMachine(RuleBasedStateMachine):
    """Whatever the cache does in between, everything that was published is read as it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.expected: dict[str, list[int]] = {}
        self.open()

    def open(self) -> None:
        self.store = TieredChunkStore.open((self.folder / "far").as_uri(), cache=self.folder / "cache")

    @rule(doc_id=st.sampled_from("abc"), seeds=st.lists(st.integers(0, 5), max_size=3))
    def add(self, doc_id: str, seeds: list[int]) -> None:
        add_chunks(self.store, FINGERPRINT, doc_id, seeds)
        self.expected[doc_id] = seeds

    @rule(doc_id=st.sampled_from("abc"))
    def delete(self, doc_id: str) -> None:
        assert self.store.delete_document(FINGERPRINT, doc_id) is (self.expected.pop(doc_id, None) is not None)

    @rule()
    def evict(self) -> None:
        self.store.evict()

    @rule()
    def collect(self) -> None:
        self.store.collect_garbage(grace_s=0)

    @rule(lose=st.booleans())
    def reopen(self, lose: bool) -> None:
        self.store.close()
        if lose:
            shutil.rmtree(self.folder / "cache")
        self.open()

    @rule(seed=st.integers(0, 5))
    def discard(self, seed: int) -> None:
        """As after damage: it is computed again by whoever needs it."""
        meta, kv = random_chunk(FINGERPRINT, seed=seed)
        held = any(seed in seeds for seeds in self.expected.values())
        self.store.discard([meta.chunk_id])
        assert self.store.missing([meta.chunk_id]) == [meta.chunk_id]
        if held:
            self.store.put(FINGERPRINT, [(meta, kv)])

    @invariant()
    def everything_is_there(self) -> None:
        infos = self.store.documents(FINGERPRINT)
        assert {info.doc_id for info in infos} == self.expected.keys()
        for seed in {seed for seeds in self.expected.values() for seed in seeds}:
            meta, kv = random_chunk(FINGERPRINT, seed=seed)
            assert self.store.missing([meta.chunk_id]) == []
            assert torch.equal(self.store.load(meta.chunk_id).k, kv.k)
        stats = self.store.stats()
        assert stats.documents == len(self.expected)
        assert stats.recomputed == 0
        assert self.store.verify().ok

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
