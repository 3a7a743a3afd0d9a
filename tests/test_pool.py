"""The pool counts exactly, loads a chunk once, keeps what was used last, and hands out what the store holds."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_lane import LateLane
from pdllm_store import ChunkKV, ChunkMeta, ChunkNotFoundError, Fetched, LMDBStore, MemoryStore
from pdllm_store.codec import TORCH_DTYPES
from pdllm_store.testing import bits, make_document, random_chunk, tiny_fingerprint

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.pool import LEAST_BYTES, KVPool, default_budget
from pdllm_rag.staging import StagingRing
from pdllm_rag.uploads import Uploads

SHAPE = (3, 2, 4)  # layers, key/value heads, head dim of the tiny fingerprint
TOKEN_BYTES = 2 * 3 * 2 * 4 * 4  # float32


def named(number: int) -> bytes:
    return number.to_bytes(16, "big")


def entry_of(chunk_id: bytes) -> ChunkKV:
    """KV that follows from the id; chunks have 1 to 8 tokens."""
    number = int.from_bytes(chunk_id, "big")
    k = torch.full((3, 1 + number % 8, 2, 4), float(number))
    return ChunkKV(k, -k)


class Loads:
    """`fetch` of a store that holds everything: it counts, can be slow, and can fail."""

    def __init__(self, *, fails: Callable[[bytes], bool] = lambda _: False) -> None:
        self.counts: Counter[bytes] = Counter()
        self.running: Counter[bytes] = Counter()
        self.most_at_once = 0
        self.before: Callable[[Sequence[bytes]], None] = lambda _: None
        self._fails = fails
        self._lock = threading.Lock()

    def __call__(self, chunk_ids: Sequence[bytes]) -> Fetched:
        with self._lock:
            self.counts.update(chunk_ids)
            self.running.update(chunk_ids)
            self.most_at_once = max(self.most_at_once, *(self.running[chunk_id] for chunk_id in chunk_ids))
        try:
            self.before(chunk_ids)
            if bad := [chunk_id for chunk_id in chunk_ids if self._fails(chunk_id)]:
                raise ChunkNotFoundError(f"chunk {bad[0].hex()} is gone", tuple(bad))
            return Fetched({chunk_id: entry_of(chunk_id) for chunk_id in chunk_ids}, frozenset())
        finally:
            with self._lock:
                self.running.subtract(chunk_ids)


def pool_over(loads: Loads, budget_bytes: int = 1 << 30) -> KVPool:
    return KVPool(MemoryStore(kv_dtype="float32"), fetch=loads, budget_bytes=budget_bytes)


def check_counts(pool: KVPool) -> None:
    assert pool.n_bytes == sum(entry.kv.k.nbytes + entry.kv.v.nbytes for entry in pool._entries.values())
    assert pool.n_bytes <= pool.budget_bytes
    assert not pool._flights


def in_threads(*bodies: Callable[[], object]) -> list[BaseException]:
    """Run all at once; what they raised."""
    raised: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return raised


# -- what is kept ---------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.integers(0, 11), min_size=1, max_size=5),
            st.frozensets(st.integers(0, 11), max_size=8),
        ),
        max_size=30,
    ),
    budget_tokens=st.integers(0, 30),
)
def test_it_keeps_what_was_used_last_and_counts_it(steps: list[list[int] | frozenset[int]], budget_tokens: int) -> None:
    """Lists are acquisitions, sets what is retained; beside a model that evicts after every chunk."""
    loads = Loads()
    pool = pool_over(loads, budget_tokens * TOKEN_BYTES)
    kept: OrderedDict[bytes, int] = OrderedDict()
    expected: Counter[bytes] = Counter()
    for step in steps:
        if isinstance(step, frozenset):
            wanted = [named(number) for number in step]
            pool.retain(wanted)
            kept = OrderedDict((chunk_id, size) for chunk_id, size in kept.items() if chunk_id in wanted)
        else:
            wanted = [named(number) for number in step]
            got = pool.acquire(wanted)
            assert list(got.kv) == list(dict.fromkeys(wanted))
            assert all(torch.equal(kv.v, entry_of(chunk_id).v) for chunk_id, kv in got.kv.items())
            for chunk_id in [one for one in dict.fromkeys(wanted) if one in kept]:
                kept.move_to_end(chunk_id)
            for chunk_id in [one for one in dict.fromkeys(wanted) if one not in kept]:
                expected[chunk_id] += 1
            for chunk_id in [one for one in dict.fromkeys(wanted) if one not in kept]:
                kept[chunk_id] = TOKEN_BYTES * (1 + int.from_bytes(chunk_id, "big") % 8)
                while sum(kept.values()) > pool.budget_bytes:
                    kept.popitem(last=False)
        assert list(pool._entries) == list(kept)
        assert pool.n_bytes == sum(kept.values())
        assert loads.counts == expected
        check_counts(pool)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        KVPool(MemoryStore(), budget_bytes=-1)


def test_an_entry_that_is_evicted_or_dropped_stays_what_it_was_for_who_holds_it() -> None:
    pool = pool_over(Loads(), 8 * TOKEN_BYTES)
    held = pool.acquire([named(7)]).kv[named(7)]
    pool.acquire([named(15)])
    pool.acquire([named(23)])
    pool.retain([])
    assert len(pool) == pool.n_bytes == 0
    assert torch.equal(held.k, entry_of(named(7)).k)


def test_a_part_of_a_larger_tensor_is_kept_without_the_rest() -> None:
    batch = torch.arange(3 * 10 * 2 * 4, dtype=torch.float32).view(3, 10, 2, 4)
    parts = {named(i): ChunkKV(batch[:, 2 * i : 2 * i + 2], batch[:, :2]) for i in range(5)}
    pool = KVPool(MemoryStore(), fetch=lambda ids: Fetched({i: parts[i] for i in ids}, frozenset(ids)))
    got = pool.acquire(list(parts))
    assert pool.n_bytes == sum(t.untyped_storage().nbytes() for kv in got.kv.values() for t in kv)
    assert all(torch.equal(kv.k, parts[name].k) and kv.k.is_contiguous() for name, kv in got.kv.items())
    whole = entry_of(named(3))
    again = KVPool(MemoryStore(), fetch=lambda ids: Fetched(dict.fromkeys(ids, whole), frozenset()))
    assert again.acquire([named(3)]).kv[named(3)].k is whole.k  # what is on its own is kept as it is given


def test_nothing_is_fetched_where_all_is_held_and_hits_are_told_to_the_store() -> None:
    touched: list[bytes] = []

    class Touched(MemoryStore):
        def touch(self, chunk_ids: Iterable[bytes]) -> None:
            touched.extend(chunk_ids)

    loads = Loads()
    pool = KVPool(Touched(), fetch=loads)
    pool.acquire([named(1), named(2)])
    assert touched == []
    pool.acquire([named(2), named(1), named(2)])
    assert touched == [named(2), named(1)]
    assert loads.counts == {named(1): 1, named(2): 1}
    assert pool.acquire([]) == Fetched({}, frozenset())


# -- several threads ------------------------------------------------------------------------------------------------


def test_threads_that_miss_one_chunk_share_one_load() -> None:
    loads = Loads()
    pool = pool_over(loads, 0)  # even if nothing is kept
    chosen = 2 * [[named(3), named(4)], [named(4)], [named(3)], [named(4), named(3)]]
    all_ask = threading.Barrier(len(chosen))
    claim = pool._claim
    claimed: list[object] = []

    def counted(*args: Any) -> Any:
        found = claim(*args)
        claimed.append(found)
        return found

    def before(_: Sequence[bytes]) -> None:
        until = time.monotonic() + 10
        while len(claimed) < len(chosen) and time.monotonic() < until:
            time.sleep(0.001)

    pool._claim = counted  # type: ignore[method-assign]
    loads.before = before
    got: list[torch.Tensor] = []

    def ask(chunk_ids: list[bytes]) -> None:
        all_ask.wait(10)
        got.append(pool.acquire(chunk_ids).kv[chunk_ids[0]].k)

    assert in_threads(*(lambda ids=ids: ask(ids) for ids in chosen)) == []
    assert loads.most_at_once == 1
    assert loads.counts == {named(3): 1, named(4): 1}
    assert len({tensor.data_ptr() for tensor in got}) == 2
    check_counts(pool)


def test_only_who_had_a_chunk_computed_again_reports_it() -> None:
    started = threading.Event()

    def fetch(chunk_ids: Sequence[bytes]) -> Fetched:
        started.set()
        time.sleep(0.05)
        return Fetched({chunk_id: entry_of(chunk_id) for chunk_id in chunk_ids}, frozenset(chunk_ids))

    pool = KVPool(MemoryStore(), fetch=fetch)
    reports: list[frozenset[bytes]] = []

    def late() -> None:
        started.wait()
        reports.append(pool.acquire([named(1)]).recomputed)

    assert in_threads(lambda: reports.append(pool.acquire([named(1)]).recomputed), late) == []
    assert sorted(reports, key=len) == [frozenset(), {named(1)}]


def test_a_load_that_fails_loses_nothing_and_fails_for_who_wants_the_bad_chunk_alone() -> None:
    bad = named(5)
    loads = Loads(fails=lambda chunk_id: chunk_id == bad)
    claimed, asked = threading.Event(), threading.Event()

    def before(chunk_ids: Sequence[bytes]) -> None:
        if len(chunk_ids) == 2:
            claimed.set()
            asked.wait(10)
            time.sleep(0.05)  # so that the other thread waits for this load

    loads.before = before
    pool = pool_over(loads)
    got: list[Fetched] = []

    def other() -> None:
        claimed.wait(10)
        asked.set()
        got.append(pool.acquire([named(4), named(6)]))

    raised = in_threads(lambda: pool.acquire([named(4), bad]), other)
    assert [type(error) for error in raised] == [ChunkNotFoundError]
    assert [list(fetched.kv) for fetched in got] == [[named(4), named(6)]]
    assert set(pool._entries) == {named(4), named(6)}
    check_counts(pool)
    with pytest.raises(ChunkNotFoundError):
        pool.acquire([bad])
    check_counts(pool)


def test_who_waits_for_a_load_that_fails_gets_his_own_failure() -> None:
    loads = Loads(fails=lambda _: True)
    loads.before = lambda _: time.sleep(0.02)
    pool = pool_over(loads)
    raised = in_threads(*[lambda: pool.acquire([named(1)])] * 4)
    assert [type(error) for error in raised] == [ChunkNotFoundError] * 4
    assert loads.most_at_once == 1
    check_counts(pool)


def test_an_interrupted_load_leaves_no_one_waiting() -> None:
    loads = Loads()

    def interrupt(_: Sequence[bytes]) -> None:
        loads.before = lambda _: None
        raise KeyboardInterrupt

    loads.before = interrupt
    pool = pool_over(loads)
    with pytest.raises(KeyboardInterrupt):
        pool.acquire([named(1)])
    check_counts(pool)
    assert in_threads(lambda: pool.acquire([named(1)])) == []


def test_what_is_dropped_while_it_is_loaded_is_handed_out_and_not_kept() -> None:
    loads = Loads()
    loads.before = lambda _: pool.retain([named(2)])
    pool = pool_over(loads)
    assert set(pool.acquire([named(1), named(2)]).kv) == {named(1), named(2)}
    assert set(pool._entries) == {named(2)}
    check_counts(pool)


def test_a_forked_child_does_not_wait_for_a_load_of_its_parents_thread() -> None:
    """The state that a child inherits: a load under way, and a lock that nobody will release."""
    loads = Loads()
    pool = pool_over(loads)
    pool.acquire([named(2)])
    begun, over = threading.Event(), threading.Event()

    def before(_: Sequence[bytes]) -> None:
        loads.before = lambda _: None
        begun.set()
        over.wait(10)

    loads.before = before
    thread = threading.Thread(target=lambda: pool.acquire([named(1)]), daemon=True)
    thread.start()
    begun.wait(10)
    pool._lock.acquire()
    pool.renew()  # what happens in a child after a fork
    assert set(pool.acquire([named(1), named(2)]).kv) == {named(1), named(2)}
    check_counts(pool)
    over.set()
    thread.join(10)
    check_counts(pool)


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_exact_whatever_races(seed: int) -> None:
    """Threads acquire, retain and fail; each gets the right tensors, and in the end every byte is accounted for."""
    chance = random.Random(seed)
    flaky = threading.Lock()

    def fails(chunk_id: bytes) -> bool:
        with flaky:
            return int.from_bytes(chunk_id, "big") % 7 == 0 and chance.random() < 0.5

    loads = Loads(fails=fails)
    loads.before = lambda _: time.sleep(random.Random().choice((0, 0, 0.001)))
    pool = pool_over(loads, 25 * TOKEN_BYTES)
    failed: list[bytes] = []

    def ask(own: random.Random) -> None:
        for _ in range(120):
            wanted = [named(own.randrange(24)) for _ in range(own.randrange(1, 6))]
            try:
                got = pool.acquire(wanted)
            except ChunkNotFoundError as error:
                failed.extend(error.chunk_ids)
                continue
            assert list(got.kv) == list(dict.fromkeys(wanted))
            for chunk_id, kv in got.kv.items():
                assert torch.equal(kv.k, entry_of(chunk_id).k)
                assert torch.equal(kv.v, entry_of(chunk_id).v)
            assert pool.n_bytes <= pool.budget_bytes

    def drop(own: random.Random) -> None:
        for _ in range(60):
            pool.retain({named(number) for number in range(24) if own.random() < 0.7})
            time.sleep(0.001)

    bodies: list[Callable[[], object]] = [lambda i=i: ask(random.Random(100 * seed + i)) for i in range(6)]
    assert in_threads(*bodies, lambda: drop(random.Random(seed))) == []
    assert loads.most_at_once == 1
    assert {int.from_bytes(chunk_id, "big") % 7 for chunk_id in failed} <= {0}
    check_counts(pool)
    pool.retain([])
    assert len(pool) == pool.n_bytes == 0


# -- onto a device --------------------------------------------------------------------------------------------------


def filled_store(store: Any, lens: Sequence[int], kv_dtype: Any = "float32") -> list[bytes]:
    """Put one chunk of each length and a document of them; their ids."""
    fingerprint = tiny_fingerprint(kv_dtype=kv_dtype)
    items = [random_chunk(fingerprint, seed=seed, n_tokens=n_tokens) for seed, n_tokens in enumerate(lens)]
    store.put(fingerprint, items)
    store.add_document(fingerprint, make_document("d", [meta for meta, _ in items]))
    known = {meta.chunk_id: (meta, kv) for meta, kv in items}

    def recompute(metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        yield [known[meta.chunk_id] for meta in metas]

    store.recompute_with(fingerprint, recompute)
    return [meta.chunk_id for meta, _ in items]


def assert_same(got: ChunkKV, stored: ChunkKV, dtype: torch.dtype) -> None:
    for tensor, expected in zip(got, stored, strict=True):
        assert (tensor.dtype, tensor.is_contiguous()) == (dtype, True)
        assert torch.equal(bits(tensor), bits(expected.to(dtype)))


@pytest.mark.parametrize("slot_tokens", [100, 12, 2, 1])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_on_a_device_are_bit_for_bit_what_the_store_hands_out(
    kv_dtype: Any, dtype: torch.dtype, slot_tokens: int
) -> None:
    """Through buffers for all chunks, for some, for some layers of one, and for not even one layer of the longest."""
    store = MemoryStore(kv_dtype=kv_dtype)
    lens = [1, 5, 3, 6, 2, 2, 4, 5, 2]  # tokens; with one token a chunk is a BOS
    ids = filled_store(store, lens, kv_dtype)
    lane = LateLane()
    slot_bytes = slot_tokens * 2 * 3 * 2 * 4 * TORCH_DTYPES[kv_dtype].itemsize
    uploads = Uploads(store, lane, shape=SHAPE, dtype=dtype, slot_bytes=slot_bytes, n_slots=2)
    pool = KVPool(store, uploads=uploads, budget_bytes=1 << 20)
    for wanted in (ids[2:5], ids[::-1], ids):
        got = pool.acquire(wanted)
        assert list(got.kv) == wanted
        assert got.recomputed == frozenset()
        for chunk_id in wanted:
            assert_same(got.kv[chunk_id], store.load(chunk_id), dtype)
    assert pool.n_bytes == sum(2 * 3 * n * 2 * 4 * dtype.itemsize for n in lens)
    assert len(lane.made) <= 2
    assert sum(tensor.nbytes for tensor in lane.made) <= 2 * slot_bytes


def test_a_chunk_loaded_in_parts_counts_as_one_load() -> None:
    store = MemoryStore(kv_dtype="float32")
    ids = filled_store(store, [4, 4])
    Uploads(store, LateLane(), shape=SHAPE, dtype=torch.float32, slot_bytes=TOKEN_BYTES * 2).load(ids)
    assert (store.stats().hits, store.stats().misses) == (2, 0)


def test_what_the_store_lacks_is_computed_again_written_back_and_reported(tmp_path: Any) -> None:
    """One chunk evicted, one with a flipped bit between sound ones that share its buffer, one never put."""
    with LMDBStore.open(tmp_path / "kb", kv_dtype="float32") as store:
        ids = filled_store(store, [4, 5, 6, 3, 2])
        expected = {chunk_id: store.load(chunk_id) for chunk_id in ids}
        store.discard([ids[0]])

        def flip(tables: Any) -> None:
            (key,) = tables.keys("kv", ids[2])
            data = bytearray(tables.get("kv", key))
            data[-3] ^= 4
            tables.put("kv", key, bytes(data))

        store._transactions.write(flip)
        for slot_bytes in (1 << 20, 9 * TOKEN_BYTES, 2 * TOKEN_BYTES):
            before = store.stats()
            uploads = Uploads(store, LateLane(), shape=SHAPE, dtype=torch.float32, slot_bytes=slot_bytes)
            pool = KVPool(store, uploads=uploads)
            got = pool.acquire(ids)
            assert got.recomputed == {ids[0], ids[2]}
            for chunk_id in ids:
                assert_same(got.kv[chunk_id], expected[chunk_id], torch.float32)
            assert store.missing(ids) == []
            assert store.stats().misses - before.misses == 1  # the evicted chunk, once
            assert pool.acquire(ids).recomputed == frozenset()
            with pytest.raises(ChunkNotFoundError):
                pool.acquire([ids[1], bytes(16)])
            check_counts(pool)
            store.discard([ids[0]])
            store._transactions.write(flip)


def test_a_given_fetch_is_brought_to_the_device_as_well() -> None:
    loads = Loads()
    store = MemoryStore(kv_dtype="float32")
    lane = LateLane()
    uploads = Uploads(store, lane, shape=SHAPE, dtype=torch.bfloat16, slot_bytes=3 * 4, n_slots=2)
    pool = KVPool(store, fetch=loads, uploads=uploads)
    ids = [named(number) for number in (3, 7, 6)]
    got = pool.acquire(ids)
    for chunk_id in ids:
        assert_same(got.kv[chunk_id], entry_of(chunk_id), torch.bfloat16)
    assert pool.n_bytes == sum(2 * 3 * n * 2 * 4 * 2 for n in (4, 8, 7))
    assert sum(tensor.nbytes for tensor in lane.made) <= 2 * 3 * 4
    batch = torch.randn(3, 10, 2, 4)  # parts of a batch, with strides of their own
    pair = uploads.put(Fetched({named(1): ChunkKV(batch[:, 2:5], batch[:, 5:8])}, frozenset()))[0].kv[named(1)]
    lane.mark().wait()
    assert_same(pair, ChunkKV(batch[:, 2:5].contiguous(), batch[:, 5:8].contiguous()), torch.bfloat16)


def test_entries_are_ready_for_whoever_finds_them() -> None:
    """A second question finds an entry before the one that loaded it has let its stream follow the copies."""
    store = MemoryStore(kv_dtype="float32")
    (chunk_id,) = filled_store(store, [4])
    uploads = Uploads(store, LateLane(), shape=SHAPE, dtype=torch.float32)
    pool = KVPool(store, uploads=uploads)
    found: list[torch.Tensor] = []

    class Interrupted:
        def __init__(self, mark: Any) -> None:
            self._mark = mark

        def follow(self, tensors: Iterable[torch.Tensor]) -> None:
            if not found:
                found.append(torch.empty(0))
                found.append(pool.acquire([chunk_id]).kv[chunk_id].k.clone())
            self._mark.follow(tensors)

    load = uploads.load

    def interrupted(chunk_ids: Sequence[bytes]) -> Any:
        fetched, mark = load(chunk_ids)
        return fetched, Interrupted(mark)

    uploads.load = interrupted  # type: ignore[method-assign]
    pool.acquire([chunk_id])
    assert torch.equal(found[1], store.load(chunk_id).k)


@pytest.mark.parametrize("seed", range(3))
def test_threads_on_a_device_share_few_buffers_and_get_what_the_store_holds(tmp_path: Any, seed: int) -> None:
    with LMDBStore.open(tmp_path / "kb", kv_dtype="bfloat16") as store:
        lens = [2 + (7 * i) % 9 for i in range(16)]
        ids = filled_store(store, lens, "bfloat16")
        expected = {chunk_id: store.load(chunk_id) for chunk_id in ids}
        lane = LateLane()
        uploads = Uploads(store, lane, shape=SHAPE, dtype=torch.float32, slot_bytes=6 * TOKEN_BYTES // 2, n_slots=3)
        pool = KVPool(store, uploads=uploads, budget_bytes=20 * TOKEN_BYTES)

        def ask(own: random.Random) -> None:
            for _ in range(40):
                if own.random() < 0.1:
                    store.discard([own.choice(ids)])
                wanted = own.sample(ids, own.randrange(1, 6))
                got = pool.acquire(wanted)
                for chunk_id in wanted:
                    assert_same(got.kv[chunk_id], expected[chunk_id], torch.float32)

        bodies: list[Callable[[], object]] = [lambda i=i: ask(random.Random(10 * seed + i)) for i in range(5)]
        assert in_threads(*bodies) == []
        check_counts(pool)
        assert len(lane.made) <= 3


# -- staging --------------------------------------------------------------------------------------------------------


def test_a_buffer_comes_back_only_behind_its_copies_and_a_new_one_is_made_meanwhile() -> None:
    lane = LateLane()
    ring = StagingRing(lane, slot_bytes=8, n_slots=2)
    target = torch.zeros(3, 8, dtype=torch.uint8)
    used = []
    for number in range(3):
        with ring.slot() as slot:
            used.append(slot.data_ptr())
            slot.fill_(number + 1)
            lane.copy(target[number], slot)
            assert lane.n_done == max(0, number - 1)  # waited for the copy from the buffer that is used again
    assert used[0] == used[2] != used[1]
    lane.mark().wait()
    assert target[:, 0].tolist() == [1, 2, 3]
    with ring.slot() as slot:
        assert slot.data_ptr() == used[1]
    assert len(lane.made) == 2
    with pytest.raises(ValueError, match="0 slots"):
        StagingRing(lane, n_slots=0)


def test_threads_wait_for_a_buffer_and_a_failing_one_gives_his_back() -> None:
    lane = LateLane()
    ring = StagingRing(lane, slot_bytes=8, n_slots=1)
    entered: list[int] = []

    def use(number: int) -> None:
        with ring.slot():
            entered.append(number)
            assert len(entered) % 2 == 1
            time.sleep(0.002)
            entered.append(number)
            if number % 3 == 0:
                raise RuntimeError("failed")

    raised = in_threads(*(lambda n=n: use(n) for n in range(12)))
    assert [type(error) for error in raised] == [RuntimeError] * 4
    assert len(entered) == 24


# -- in an engine ---------------------------------------------------------------------------------------------------


def test_a_pool_without_a_budget_takes_a_gibibyte_on_a_cpu_and_obeys_a_given_one(tiny_model: LoadedModel) -> None:
    assert default_budget(torch.device("cpu")) == LEAST_BYTES == 1 << 30
    for given_bytes, expected in ((None, 1 << 30), (0, 0), (12345, 12345)):
        engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, pool_bytes=given_bytes)
        assert engine._pool.budget_bytes == expected


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_answers_are_the_same_over_entries_on_a_device(tiny_model: LoadedModel, kv_dtype: Any) -> None:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    store = MemoryStore(kv_dtype=kv_dtype)
    text = "\n\n".join(f"Paragraph {i} says that codeword p{i} opens door number {i * 7}." for i in range(8))
    engine = RagEngine.open(store, tiny_model, chunk_len=72, options=options)
    engine.prefill([InputDocument("d", text, "d")])
    questions = [f"Which codeword opens door {7 * n}?" for n in range(3)]
    expected = [engine.answer(question).text for question in questions]
    backbone = tiny_model.backbone
    shape = (backbone.n_layers, backbone.n_kv_heads, backbone.head_dim)
    uploads = Uploads(store, LateLane(), shape=shape, dtype=backbone.dtype, slot_bytes=1 << 16)
    other = RagEngine.open(store, tiny_model, chunk_len=72, options=options)
    other._pool._uploads = uploads
    assert [other.answer(question).text for question in questions] == expected
    assert len(uploads._ring._free) > 0
