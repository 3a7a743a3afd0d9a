"""KV is loaded or computed, whichever is cheaper, and the answer does not depend on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from pdllm_store import ChunkKV, ChunkMeta, Fetched, MemoryStore
from pdllm_store.testing import add_chunks, random_chunk, tiny_fingerprint

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.cheaper import CheaperFetch

FINGERPRINT = tiny_fingerprint()
TEXT = " ".join(f"Paragraph {i} says that codeword p{i} opens door number {i * 7}." for i in range(12))


class Slow(MemoryStore):
    """A store that takes its time."""

    delay_s = 0.0

    def fetch(self, chunk_ids: Sequence[bytes]) -> Fetched:
        time.sleep(self.delay_s * len(chunk_ids))
        return super().fetch(chunk_ids)


@pytest.mark.parametrize(("load_s", "compute_s", "computes"), [(0.0, 0.05, False), (0.05, 0.0, True)])
def test_the_way_that_was_faster_is_taken(load_s: float, compute_s: float, computes: bool) -> None:
    store = Slow()
    store.delay_s = load_s
    metas = add_chunks(store, FINGERPRINT, "d", range(8))
    items = {meta.chunk_id: (meta, kv) for meta, kv in (random_chunk(FINGERPRINT, seed=seed) for seed in range(8))}

    def recompute(wanted: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        time.sleep(compute_s * len(wanted))
        yield [items[meta.chunk_id] for meta in wanted]

    fetch = CheaperFetch(store, recompute)
    ids = [meta.chunk_id for meta in metas]
    assert fetch(ids[:2]).recomputed == frozenset()  # tells the rate of loading
    assert fetch(ids[2:4]).recomputed == {ids[2]}  # and of computing
    fetched = fetch(ids[4:])
    assert fetched.recomputed == (frozenset(ids[4:]) if computes else frozenset())
    assert list(fetched.kv) == ids[4:]
    for chunk_id in ids[4:]:
        assert torch.equal(fetched.kv[chunk_id].k, items[chunk_id][1].k)
    assert fetch([]) == Fetched({}, frozenset())
    assert None not in fetch.rates


def test_an_engine_answers_alike_either_way_and_reports_it(tiny_model: LoadedModel) -> None:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False, k=2)
    answers = {}
    for load in ("store", "auto"):
        store = Slow(kv_dtype="float32")
        engine = RagEngine.open(store, tiny_model, chunk_len=72, options=options, load=load, pool_bytes=0)
        engine.prefill([InputDocument("d", TEXT, "d")])
        store.delay_s = 0.05  # computing is cheaper
        answers[load] = [engine.answer("Which codeword opens door 14?") for _ in range(4)]
    assert len({answer.text for load in answers.values() for answer in load}) == 1
    assert answers["store"][-1].stats.chunks.recomputed == 0
    last = answers["auto"][-1].stats.chunks
    assert last.hit == 0
    assert last.recomputed > 0


def test_int8_is_always_loaded(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="int8 store only"):
        RagEngine.open(MemoryStore(kv_dtype="int8"), tiny_model, load="auto")
    with pytest.raises(ValueError, match="load is 'fast'; expected one of store, auto"):
        RagEngine.open(MemoryStore(), tiny_model, load="fast")
