"""On a GPU entries are bit for bit the store's, and nothing is read too early or written again too early.

`pytest -m gpu`; skipped where there is none. Long kernels that do nothing hold streams up: a copy or a read that does
not wait for what it needs then comes too early for certain.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkKV, ChunkMeta, Fetched, KVDtype, LMDBStore, MemoryStore
from pdllm_store.testing import bits, make_document, random_chunk, tiny_fingerprint

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine, load_model
from pdllm_rag.encoder import LEAST_BATCH_TOKENS, ChunkEncoder
from pdllm_rag.lanes import CudaLane
from pdllm_rag.pool import DEVICE_SHARE, LEAST_BYTES, KVPool, default_budget
from pdllm_rag.staging import StagingRing
from pdllm_rag.uploads import Uploads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 1 << 20
CYCLES = 2_000_000  # about a millisecond
WIDE = {"n_layers": 8, "n_kv_heads": 4, "head_dim": 64}
TEXT = "\n\n".join(f"Paragraph {i} says that codeword p{i} opens door number {i * 7}." for i in range(12))
OPTIONS = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False, k=3)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def on_gpu(tiny_model_path: Path) -> LoadedModel:
    return load_model(str(tiny_model_path), device="cuda", dtype=torch.float32)


def filled(store: Any, lens: Sequence[int], **shape: Any) -> tuple[list[bytes], tuple[int, int, int]]:
    """Put one chunk of each length and a document of them, which can be computed again; ids and shape."""
    fingerprint = replace(tiny_fingerprint(kv_dtype=store.kv_dtype), **shape)
    items = [random_chunk(fingerprint, seed=seed, n_tokens=n_tokens) for seed, n_tokens in enumerate(lens)]
    store.put(fingerprint, items)
    store.add_document(fingerprint, make_document("d", [meta for meta, _ in items]))
    known = {meta.chunk_id: (meta, kv) for meta, kv in items}

    def recompute(metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        yield [known[meta.chunk_id] for meta in metas]

    store.recompute_with(fingerprint, recompute)
    return list(known), (fingerprint.n_layers, fingerprint.n_kv_heads, fingerprint.head_dim)


def assert_same(got: ChunkKV, stored: ChunkKV, dtype: torch.dtype) -> None:
    for tensor, expected in zip(got, stored, strict=True):
        assert (tensor.device.type, tensor.dtype, tensor.is_contiguous()) == ("cuda", dtype, True)
        assert torch.equal(bits(tensor.cpu()), bits(expected.to(dtype)))


def hold_up(stream: torch.cuda.Stream, cycles: int = CYCLES) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


@pytest.mark.parametrize("slot_bytes", [64 * MIB, 3 * MIB, 300_000])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_are_bit_for_bit_what_the_store_hands_out(
    device: torch.device, kv_dtype: KVDtype, dtype: torch.dtype, slot_bytes: int
) -> None:
    """Through buffers for many chunks, for a few, and for some layers of one; copies start late."""
    store = MemoryStore(kv_dtype=kv_dtype)
    ids, shape = filled(store, [256, 5, 300, 2, 64, 256, 256, 200], **WIDE)
    lane = CudaLane(device)
    pool = KVPool(store, uploads=Uploads(store, lane, shape=shape, dtype=dtype, slot_bytes=slot_bytes))
    hold_up(lane._stream, 20 * CYCLES)
    for wanted in (ids[2:5], ids[::-1], ids):
        got = pool.acquire(wanted)
        assert list(got.kv) == wanted
        assert got.recomputed == frozenset()
        for chunk_id in wanted:
            assert_same(got.kv[chunk_id], store.load(chunk_id), dtype)
    assert pool.n_bytes == sum(kv.k.nbytes + kv.v.nbytes for kv in pool.acquire(ids).kv.values())


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_threads_on_streams_of_their_own_read_what_the_store_holds_while_entries_are_evicted(
    tmp_path: Path, device: torch.device, kv_dtype: KVDtype
) -> None:
    """Each reads late, and lets go at once what it has asked to be read: its memory must not be written before."""
    with LMDBStore.open(tmp_path / "kb", kv_dtype=kv_dtype) as store:
        ids, shape = filled(store, [256 - 3 * i for i in range(24)], **WIDE)
        expected = {
            chunk_id: [int(bits(tensor).to(torch.int64).sum()) for tensor in store.load(chunk_id)] for chunk_id in ids
        }
        uploads = Uploads(store, CudaLane(device), shape=shape, dtype=torch.bfloat16, slot_bytes=3 * MIB, n_slots=2)
        pool = KVPool(store, uploads=uploads, budget_bytes=10 * MIB)
        failures: list[BaseException] = []

        def ask(seed: int) -> None:
            try:
                chance, stream = random.Random(seed), torch.cuda.Stream(device)
                asked: list[bytes] = []
                sums: list[torch.Tensor] = []
                with torch.cuda.stream(stream):
                    for _ in range(60):
                        wanted = chance.sample(ids, 4)
                        got = pool.acquire(wanted)
                        torch.cuda._sleep(CYCLES // 4)
                        for chunk_id in wanted:
                            asked.append(chunk_id)
                            sums += [bits(tensor).to(torch.int64).sum() for tensor in got.kv[chunk_id]]
                        del got
                    found = torch.stack(sums).cpu().view(-1, 2).tolist()
                assert found == [expected[chunk_id] for chunk_id in asked]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert failures == []
        assert pool.n_bytes == sum(entry.n_bytes for entry in pool._entries.values()) <= 10 * MIB
        assert not pool._flights


def test_an_entry_evicted_under_a_running_answer_stays_what_it_was(device: torch.device) -> None:
    store = MemoryStore(kv_dtype="bfloat16")
    ids, shape = filled(store, [256] * 8, **WIDE)
    uploads = Uploads(store, CudaLane(device), shape=shape, dtype=torch.bfloat16)
    pool = KVPool(store, uploads=uploads, budget_bytes=4 * MIB)
    held = pool.acquire(ids[:1]).kv[ids[0]]
    for _ in range(3):
        pool.acquire(ids[1:])
    pool.retain([])
    assert pool.n_bytes == 0
    pool.acquire(ids[1:])
    assert_same(held, store.load(ids[0]), torch.bfloat16)


def test_what_the_store_lacks_is_computed_again_and_reported(tmp_path: Path, device: torch.device) -> None:
    with LMDBStore.open(tmp_path / "kb", kv_dtype="bfloat16") as store:
        ids, shape = filled(store, [64, 70, 80, 90], **WIDE)
        expected = {chunk_id: store.load(chunk_id) for chunk_id in ids}
        store.discard([ids[0]])

        def flip(tables: Any) -> None:
            key = next(iter(tables.keys("kv", ids[2])))
            data = bytearray(tables.get("kv", key))
            data[-3] ^= 4
            tables.put("kv", key, bytes(data))

        store._transactions.write(flip)
        pool = KVPool(store, uploads=Uploads(store, CudaLane(device), shape=shape, dtype=torch.bfloat16))
        got = pool.acquire(ids)
        assert got.recomputed == {ids[0], ids[2]}
        for chunk_id in ids:
            assert_same(got.kv[chunk_id], expected[chunk_id], torch.bfloat16)
        assert store.missing(ids) == []
        assert pool.acquire(ids).recomputed == frozenset()


def test_what_another_function_fetches_is_copied_from_any_memory(device: torch.device) -> None:
    """From pageable and pinned memory, from the device, and as parts of a batch; the device's own is written late."""
    batch = torch.randn(8, 512, 4, 64)
    on_device = torch.empty_like(batch, device=device)
    hold_up(torch.cuda.current_stream(device), 20 * CYCLES)
    on_device.copy_(batch)
    sources = {b"p" * 16: batch, b"q" * 16: batch.pin_memory(), b"r" * 16: on_device}

    def fetch(chunk_ids: Sequence[bytes]) -> Fetched:
        parts = {chunk_id: sources[chunk_id] for chunk_id in chunk_ids}
        return Fetched({name: ChunkKV(t[:, 100:300], t[:, 300:500]) for name, t in parts.items()}, frozenset(chunk_ids))

    store = MemoryStore(kv_dtype="float32")
    for dtype in (torch.float32, torch.bfloat16):
        uploads = Uploads(store, CudaLane(device), shape=(8, 4, 64), dtype=dtype, slot_bytes=100_000)
        got = KVPool(store, fetch=fetch, uploads=uploads).acquire(list(sources))
        assert got.recomputed == frozenset(sources)
        for kv in got.kv.values():
            expected = ChunkKV(batch[:, 100:300].contiguous(), batch[:, 300:500].contiguous())
            assert_same(kv, expected, dtype)
            assert kv.k.untyped_storage().nbytes() == 2 * kv.k.nbytes  # keys and values, nothing of the batch


def test_a_buffer_is_not_written_again_before_its_copy_is_done(device: torch.device) -> None:
    lane = CudaLane(device)
    ring = StagingRing(lane, slot_bytes=MIB, n_slots=2)
    targets = [lane.empty((MIB,), torch.uint8) for _ in range(40)]
    for number, target in enumerate(targets):
        with ring.slot() as slot:
            slot.fill_(number)
            hold_up(lane._stream, CYCLES)
            lane.copy(target, slot)
    mark = lane.mark()
    mark.follow(targets)
    assert [int(target.min()) for target in targets] == list(range(40))
    assert [int(target.max()) for target in targets] == list(range(40))
    assert mark.done()


# -- engines --------------------------------------------------------------------------------------------------------


def test_the_default_budget_is_a_share_of_what_is_free(device: torch.device, on_gpu: LoadedModel) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    assert default_budget(device) == pytest.approx(max(LEAST_BYTES, DEVICE_SHARE * free), rel=0.05)
    assert KVPool.beside(on_gpu.backbone, MemoryStore(), budget_bytes=123).budget_bytes == 123


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("pool_bytes", [None, 0, 60_000])
def test_answers_over_entries_on_the_gpu_are_those_over_entries_of_the_host(
    on_gpu: LoadedModel, kv_dtype: KVDtype, pool_bytes: int | None
) -> None:
    store = MemoryStore(kv_dtype=kv_dtype)
    engine = RagEngine.open(store, on_gpu, chunk_len=72, options=OPTIONS, pool_bytes=pool_bytes)
    assert not engine.prefill([InputDocument("d", TEXT, "d")]).failed
    hosted = RagEngine.open(store, on_gpu, chunk_len=72, options=OPTIONS)
    hosted._pool._uploads = None
    for number in range(4):
        question = f"Which codeword opens door {7 * number}?"
        assert engine.answer(question).text == hosted.answer(question).text
    for entry in engine._pool._entries.values():
        assert {(tensor.device.type, tensor.dtype) for tensor in entry.kv} == {("cuda", torch.float32)}
    assert (len(engine._pool) > 0) == (pool_bytes != 0)


def test_kv_that_is_computed_where_that_is_faster_goes_to_the_gpu_as_well(on_gpu: LoadedModel) -> None:
    engine = RagEngine.open(
        MemoryStore(kv_dtype="float32"), on_gpu, chunk_len=72, options=OPTIONS, load="auto", pool_bytes=60_000
    )
    engine.prefill([InputDocument("d", TEXT, "d")])
    answers = [engine.answer(f"Which codeword opens door {7 * n}?") for n in range(6)]
    assert any(answer.stats.chunks.recomputed for answer in answers)
    assert all(tensor.is_cuda for entry in engine._pool._entries.values() for tensor in entry.kv)


# -- encoder --------------------------------------------------------------------------------------------------------


def some_chunks(model: LoadedModel, count: int) -> list[NDArray[np.int32]]:
    chance = np.random.default_rng(0)
    lens = chance.integers(2, 200, count)
    return [np.array([model.spec.bos_id, *chance.integers(10, 200, n - 1)], dtype=np.int32) for n in lens]


def digest(kv: ChunkKV) -> bytes:
    return hashlib.sha256(b"".join(bits(tensor).numpy().tobytes() for tensor in kv)).digest()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_encoded_chunks_are_those_of_the_cpu(tiny_model: LoadedModel, on_gpu: LoadedModel, kv_dtype: KVDtype) -> None:
    chunks = some_chunks(tiny_model, 30)
    cpu, gpu = (
        [
            pair
            for batch in ChunkEncoder(model, model.fingerprint(kv_dtype), batch_tokens=500).batches(chunks)
            for pair in batch
        ]
        for model in (tiny_model, on_gpu)
    )
    tolerance = 2e-2 if kv_dtype == "bfloat16" else 1e-4
    for (meta, kv), (expected, expected_kv) in zip(gpu, cpu, strict=True):
        assert meta.chunk_id == expected.chunk_id
        assert np.array_equal(meta.token_ids, expected.token_ids)
        assert meta.sketch is not None
        assert expected.sketch is not None
        assert (meta.sketch.shape, meta.sketch.dtype) == (expected.sketch.shape, expected.sketch.dtype)
        np.testing.assert_allclose(meta.sketch, expected.sketch, rtol=1e-2, atol=1e-2)
        for tensor, wanted in zip(kv, expected_kv, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device.type) == (wanted.shape, wanted.dtype, "cpu")
            torch.testing.assert_close(tensor, wanted, rtol=tolerance, atol=tolerance)


def test_batches_are_whole_when_they_are_handed_out_and_stay_so(on_gpu: LoadedModel, device: torch.device) -> None:
    """Batches are computed late, so that a copy that does not wait for them would take what was there before."""
    encoder = ChunkEncoder(on_gpu, on_gpu.fingerprint("float32"), batch_tokens=400)
    chunks = some_chunks(on_gpu, 120)
    reference = {}
    for batch in encoder._cut(chunks):
        captured = encoder.capture(batch)
        lens = [len(chunk) for chunk in batch]
        pairs = [torch.split(torch.stack(layers).cpu(), lens, dim=1) for layers in (captured.keys, captured.values)]
        reference |= {chunk.tobytes(): ChunkKV(k, v) for chunk, k, v in zip(batch, *pairs, strict=True)}
    for _ in range(3):
        held = []
        hold_up(torch.cuda.current_stream(device), 20 * CYCLES)
        for batch in encoder.batches(chunks):
            hold_up(torch.cuda.current_stream(device), 4 * CYCLES)
            held += [(meta, kv, digest(kv)) for meta, kv in batch]
        assert len(held) == len(chunks)
        for meta, kv, at_first in held:
            assert digest(kv) == at_first
            assert kv.k.is_pinned()
            for tensor, expected in zip(kv, reference[meta.token_ids.tobytes()], strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


def test_a_prefill_fills_larger_batches_and_stores_what_the_encoder_gives(on_gpu: LoadedModel) -> None:
    store = MemoryStore(kv_dtype="float32")
    engine = RagEngine.open(store, on_gpu, chunk_len=64)
    assert engine._prefiller.encoder.batch_tokens > LEAST_BATCH_TOKENS
    sizes: list[int] = []
    put = store.put

    def counted(fingerprint: Any, items: Any) -> int:
        sizes.append(sum(len(meta.token_ids) for meta, _ in items))
        return put(fingerprint, items)

    store.put = counted  # type: ignore[method-assign]
    texts = [f"Text {i}: " + " ".join(f"word {i * j}" for j in range(300)) for i in range(20)]
    assert engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(texts)]).added == 20
    assert max(sizes) > 4 * LEAST_BATCH_TOKENS
    chunks = [store.meta(ref.chunk_id).token_ids for ref in store.refs(engine.fingerprint)][:40]
    for batch in engine._prefiller.encoder.batches(chunks):
        for meta, kv in batch:
            for stored, again in zip(store.load(meta.chunk_id), kv, strict=True):
                torch.testing.assert_close(stored, again, rtol=1e-4, atol=1e-4)
