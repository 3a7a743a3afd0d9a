"""Chunks become KV in full batches, and KV that leaves beside the computation is what it would be otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from late_lane import LateLane
from numpy.typing import NDArray
from pdllm_store import ChunkKV, ChunkMeta, KVDtype, MemoryStore

from pdllm_rag import InputDocument, LoadedModel, RagEngine
from pdllm_rag.encoder import (
    GPU_BATCH_KV_BYTES,
    GPU_BATCH_TOKENS,
    LEAST_BATCH_TOKENS,
    ChunkEncoder,
    default_batch_tokens,
)
from pdllm_rag.prefill import FLUSH_BATCHES

LENS = (7, 19, 12, 12, 30, 3, 12, 25, 1)
GIB = 1 << 30


def some_chunks(model: LoadedModel, lens: Sequence[int] = LENS) -> list[NDArray[np.int32]]:
    """Chunks int32 [T] of random bytes, BOS first."""
    chance = np.random.default_rng(0)
    return [np.array([model.spec.bos_id, *chance.integers(10, 200, length - 1)], dtype=np.int32) for length in lens]


def same(one: tuple[ChunkMeta, ChunkKV], other: tuple[ChunkMeta, ChunkKV]) -> bool:
    (meta, kv), (expected, expected_kv) = one, other
    return (
        meta.chunk_id == expected.chunk_id
        and np.array_equal(meta.token_ids, expected.token_ids)
        and meta.sketch is not None
        and expected.sketch is not None
        and meta.sketch.dtype == expected.sketch.dtype
        and np.array_equal(meta.sketch, expected.sketch)
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(kv, expected_kv, strict=True))
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("batch_tokens", [1, 30, 1024])
def test_kv_that_leaves_by_a_lane_is_what_it_is_otherwise(
    tiny_model: LoadedModel, kv_dtype: KVDtype, batch_tokens: int
) -> None:
    """All batches are held to the end: none of them is written again when later ones are encoded."""
    fingerprint = tiny_model.fingerprint(kv_dtype)
    chunks = some_chunks(tiny_model)
    plain = list(ChunkEncoder(tiny_model, fingerprint, batch_tokens=batch_tokens).batches(chunks))
    late = list(ChunkEncoder(tiny_model, fingerprint, batch_tokens=batch_tokens, lane=LateLane()).batches(chunks))
    assert [len(batch) for batch in late] == [len(batch) for batch in plain]
    assert all(same(*pair) for batches in zip(late, plain, strict=True) for pair in zip(*batches, strict=True))
    assert {tensor.dtype for batch in late for _, kv in batch for tensor in kv} == {
        torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32
    }


def test_a_batch_is_begun_before_the_one_before_it_is_handed_out_and_no_other(tiny_model: LoadedModel) -> None:
    lane = LateLane()
    encoder = ChunkEncoder(tiny_model, tiny_model.fingerprint("float32"), batch_tokens=30, lane=lane)
    n_each = 2 * tiny_model.backbone.n_layers + 1  # copies of a batch: keys, values, sketches
    chunks = some_chunks(tiny_model)
    n_batches = len(list(encoder.batches(chunks)))
    assert n_batches > 2
    begun, done = lane.n_copies, lane.n_done
    for number, _ in enumerate(encoder.batches(chunks), start=1):
        assert (lane.n_copies - begun) // n_each == min(number + 1, n_batches)
        assert lane.n_done - done == number * n_each  # the next one's are still on their way
    assert list(encoder.batches([])) == []


def test_a_caller_that_stops_early_leaves_nothing_broken(tiny_model: LoadedModel) -> None:
    encoder = ChunkEncoder(tiny_model, tiny_model.fingerprint("float32"), batch_tokens=30, lane=LateLane())
    plain = ChunkEncoder(tiny_model, tiny_model.fingerprint("float32"), batch_tokens=30)
    chunks = some_chunks(tiny_model)
    (first, *_) = (batch for batch in encoder.batches(chunks))
    next(encoder.batches(chunks))
    (expected, *_) = plain.batches(chunks)
    assert all(same(*pair) for pair in zip(first, expected, strict=True))


def test_a_batch_is_as_large_as_memory_allows_on_a_gpu_and_1024_tokens_on_a_cpu(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = tiny_model.fingerprint("bfloat16")
    assert default_batch_tokens(tiny_model.backbone, fingerprint) == LEAST_BATCH_TOKENS == 1024
    assert ChunkEncoder(tiny_model, fingerprint).batch_tokens == 1024
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:0"))
    llada = replace(fingerprint, n_layers=32, n_kv_heads=32, head_dim=128)  # 512 KiB a token
    dream = replace(fingerprint, n_layers=28, n_kv_heads=4, head_dim=128)  # 56 KiB
    for free, wide, narrow in ((120 * GIB, 2048, 16384), (8 * GIB, 2048, 4096), (GIB, 1024, 1024)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 141 * GIB))
        assert default_batch_tokens(on_gpu, llada) == wide
        assert default_batch_tokens(on_gpu, dream) == narrow
    assert 2048 * llada.bytes_per_token == GPU_BATCH_KV_BYTES
    assert GPU_BATCH_TOKENS == 16384
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        ChunkEncoder(tiny_model, fingerprint, batch_tokens=0)


# -- prefill --------------------------------------------------------------------------------------------------------


def documents(count: int) -> list[InputDocument]:
    return [InputDocument(f"d{i}", f"Number {i} is {i * i}. " * (1 + i % 3), f"d{i}") for i in range(count)]


def encoding(engine: RagEngine, **options: Any) -> RagEngine:
    """The engine with another encoder."""
    prefiller = engine._prefiller
    prefiller._encoder = ChunkEncoder(engine.model, engine.fingerprint, **options)
    prefiller._flush_tokens = FLUSH_BATCHES * prefiller._encoder.batch_tokens
    return engine


def test_documents_wait_for_each_other_until_a_few_batches_are_full(tiny_model: LoadedModel) -> None:
    tokens: dict[int, list[int]] = {}
    for batch_tokens in (64, 512):
        store = MemoryStore(kv_dtype="float32")
        engine = encoding(RagEngine.open(store, tiny_model, chunk_len=64), batch_tokens=batch_tokens)
        tokens[batch_tokens] = []
        put = store.put

        def counted(fingerprint: Any, items: Any, put: Any = put, seen: Any = tokens[batch_tokens]) -> int:
            seen.append(sum(len(meta.token_ids) for meta, _ in items))
            return put(fingerprint, items)

        store.put = counted  # type: ignore[method-assign]
        assert engine.prefill(documents(100)).added == 100
    assert sum(tokens[64]) == sum(tokens[512])
    for batch_tokens, seen in tokens.items():
        full = [count for count in seen if count > batch_tokens - 64]
        assert len(full) >= 0.75 * len(seen)
        assert max(seen) <= batch_tokens
    default = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model)._prefiller
    assert (default._flush_tokens, default._flush_documents) == (4096, 256)


def test_a_prefill_by_a_lane_writes_the_same_and_goes_on_where_it_was_stopped(tiny_model: LoadedModel) -> None:
    plain = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    encoding(plain, batch_tokens=128).prefill(documents(60))
    store = MemoryStore(kv_dtype="float32")
    engine = encoding(RagEngine.open(store, tiny_model, chunk_len=64), batch_tokens=128, lane=LateLane())
    n_told = 0

    def stop_late(_: object) -> None:
        nonlocal n_told
        n_told += 1
        if n_told == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(documents(60), on_progress=stop_late)
    n_done = store.stats().chunks
    assert n_done > 0
    for info in engine.documents():
        assert store.missing(info.chunk_ids) == []
    report = engine.prefill(documents(60))
    assert report.chunks_computed == plain.store.stats().chunks - n_done
    assert [info.chunk_ids for info in engine.documents()] == [info.chunk_ids for info in plain.documents()]
    for ref in plain.store.refs(plain.fingerprint):
        for a, b in zip(store.load(ref.chunk_id), plain.store.load(ref.chunk_id), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
