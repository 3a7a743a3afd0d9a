"""Cache policies: what chunks have seen, told by an independent forward, and that no policy stands in for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from pdllm_store import ChunkKV, MemoryStore

from pdllm_rag import AskOptions, InputDocument, RagEngine
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder, VanillaDecoder
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.models import LoadedModel
from pdllm_rag.placement import MODES, Placement, plan_offsets
from pdllm_rag.policies import POLICIES, encode_jointly, rows_seen

PROMPT = [1, 40, 41, 42, 2, 50, 51]
LENS = (12, 30, 7)


def random_chunks(lens: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [[0, *torch.randint(4, 250, (n - 1,), generator=generator).tolist()] for n in lens]


def library_kv(model: LoadedModel, chunks: list[list[int]], placement: Placement, rows: list[int]) -> list[ChunkKV]:
    """KV of chunks by transformers' own forward over chunks and rows, everything seeing everything."""
    places = zip([*chunks, rows], [*placement.offsets, placement.canvas_start], strict=True)
    positions = [start + i for ids, start in places for i in range(len(ids))]
    ids = torch.tensor([[token for part in (*chunks, rows) for token in part]])
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    with torch.inference_mode():
        out = model.backbone.model(ids, attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=True)
    k = torch.stack([layer.keys[0].transpose(0, 1) for layer in out.past_key_values.layers])
    v = torch.stack([layer.values[0].transpose(0, 1) for layer in out.past_key_values.layers])
    lens = [len(part) for part in (*chunks, rows)]
    return [ChunkKV(*parts) for parts in zip(k.split(lens, dim=1), v.split(lens, dim=1), strict=True)][: len(chunks)]


def assert_same_kv(ours: Sequence[ChunkKV], theirs: Sequence[ChunkKV]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.k, other.k, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.v, other.v, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_joint_kv_is_a_full_forwards_over_the_chunks_and_joint_querys_over_the_masked_canvas_too(
    tiny_model: LoadedModel, mode: str
) -> None:
    chunks, placement = random_chunks(LENS), plan_offsets(LENS, mode, chunk_len=40)
    masks = [tiny_model.spec.mask_id] * tiny_model.spec.family.block_len
    found = {}
    for policy, rows in (("joint", []), ("joint_query", [*PROMPT, *masks])):
        seen = rows_seen(policy, tiny_model.spec, PROMPT)
        found[policy], placed = encode_jointly(tiny_model, chunks, placement, seen)
        assert placed == Placement((0, 0, 0), placement.canvas_start)
        assert_same_kv(found[policy], library_kv(tiny_model, chunks, placement, rows))
    assert not torch.allclose(found["joint"][0].k[1:], found["joint_query"][0].k[1:], atol=1e-2)


def test_one_chunk_encoded_jointly_is_the_chunk_encoded_alone(tiny_model: LoadedModel) -> None:
    chunks = random_chunks([23])
    joint, _ = encode_jointly(tiny_model, chunks, plan_offsets([23], "sequential", chunk_len=23))
    encoder = ChunkEncoder(tiny_model, tiny_model.fingerprint("float32"))
    ((_, alone),) = next(iter(encoder.batches([np.array(chunks[0], np.int32)])))
    assert_same_kv(joint, [alone])


def test_without_chunks_there_is_nothing_to_encode(tiny_model: LoadedModel) -> None:
    assert encode_jointly(tiny_model, [], Placement((), 0), PROMPT) == ([], Placement((), 0))


def test_the_first_step_over_joint_query_kv_is_that_of_dense_decoding(tiny_model: LoadedModel) -> None:
    chunks, placement = random_chunks(LENS), plan_offsets(LENS, "sequential", chunk_len=40)
    seen = rows_seen("joint_query", tiny_model.spec, PROMPT)
    kv, placed = encode_jointly(tiny_model, chunks, placement, seen)
    dense = DecodeRequest(PROMPT, placement, 32, chunk_ids=chunks)
    rule = CommitRule(threshold=0)
    first = next(StaticKVDecoder(tiny_model, rule).steps([replace(dense, placement=placed, chunk_kv=kv)]))
    expected = next(VanillaDecoder(tiny_model, rule).steps([dense]))
    assert (first.rows, first.tokens) == (expected.rows, expected.tokens)
    assert first.confidence == pytest.approx(expected.confidence, abs=1e-4)


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        texts = {name: f"The {name} boat sails at {name} in the morning." for name in ("red", "green", "blue")}
        opened.prefill([InputDocument(name, text, name) for name, text in texts.items()])
        yield opened


def test_every_decoder_of_chunk_kv_takes_every_policy_and_says_which(engine: RagEngine) -> None:
    for decoder in (name for name, kind in KINDS.items() if kind.why_not(engine.model) is None):
        for policy in POLICIES:
            if AskOptions(decoder=decoder).make_decoder(engine.model).needs_kv:
                stats = engine.answer("When does it sail?", decoder=decoder, policy=policy).stats
                assert (stats.policy, stats.decoder, stats.nfe > 0) == (policy, decoder, True)
                assert stats.chunks[:2] == ((3, 0) if policy == "independent" else (0, 3))
            elif policy != "independent":
                with pytest.raises(ValueError, match="no cache policy"):
                    AskOptions(decoder=decoder, policy=policy)


def test_policies_give_different_answers_where_chunks_see_each_other(engine: RagEngine) -> None:
    assert len({engine.answer("When does it sail?", policy=policy).text for policy in POLICIES}) == len(POLICIES)


def test_joint_query_is_refused_before_anything_is_read_where_chunks_do_not_see_the_question(
    engine: RagEngine,
) -> None:
    spec = engine.model.spec
    causal = replace(engine.model, spec=replace(spec, family=replace(spec.family, prefill_mask="block-causal-4")))
    with (
        RagEngine.open(MemoryStore(), causal) as empty,
        pytest.raises(ValueError, match=r"joint_query.*expected 'joint'"),
    ):
        empty.answer("When does it sail?", policy="joint_query")
