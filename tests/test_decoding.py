"""Static-KV decoding equals a full forward under the block mask; every decoder ends, and rows are independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import ChunkKV

from pdllm_rag.attends import DenseAttend, SplitSAttend
from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding import (
    Canvas,
    CommitRule,
    DecodeRequest,
    DecodeStep,
    Sampling,
    StaticKVDecoder,
    VanillaDecoder,
)
from pdllm_rag.decoding.denoise import denoise
from pdllm_rag.decoding.predictions import LogitRows
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.errors import NumericsError
from pdllm_rag.models import LoadedModel
from pdllm_rag.placement import MODES, plan_offsets


def chunks_of(model: LoadedModel, lens: Sequence[int], seed: int = 0) -> list[tuple[list[int], ChunkKV]]:
    generator = torch.Generator().manual_seed(seed)
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    chunks = []
    for n in lens:
        ids = torch.randint(4, 250, (n,), generator=generator).numpy().astype(np.int32)
        ids[0] = model.spec.bos_id
        ((_, kv),) = next(iter(encoder.batches([ids])))
        chunks.append((ids.tolist(), kv))
    return chunks


def request_for(
    model: LoadedModel,
    lens: Sequence[int],
    *,
    prompt_len: int = 9,
    max_new_tokens: int = 32,
    mode: str = "sequential",
    seed: int = 0,
    **rest: object,
) -> DecodeRequest:
    chunks = chunks_of(model, lens, seed)
    prompt = torch.randint(4, 250, (prompt_len,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    return DecodeRequest(
        prompt,
        plan_offsets(lens, mode, chunk_len=max(lens, default=1)),
        max_new_tokens,
        chunk_ids=[ids for ids, _ in chunks],
        chunk_kv=[kv for _, kv in chunks],
        **rest,  # type: ignore[arg-type]
    )


def block_mask(lens: Sequence[int], n_canvas: int) -> torch.Tensor:
    """Chunk rows see their own chunk, canvas rows see everything."""
    n = sum(lens) + n_canvas
    mask = torch.zeros(n, n, dtype=torch.bool)
    start = 0
    for length in lens:
        mask[start : start + length, start : start + length] = True
        start += length
    mask[start:] = True
    return mask


class OracleDecoder:
    """Encodes everything anew at each step, in one sequence, under the explicit block mask."""

    def __init__(self, model: LoadedModel, rule: CommitRule) -> None:
        self.model, self.rule = model, rule

    def steps(self, request: DecodeRequest) -> Iterator[DecodeStep]:
        lens = [len(ids) for ids in request.chunk_ids]
        context = torch.tensor([token for ids in request.chunk_ids for token in ids], dtype=torch.int64)
        places = [torch.arange(offset, offset + n) for offset, n in zip(request.placement.offsets, lens, strict=True)]

        def forward(_: Sequence[int], canvases: Sequence[Canvas]) -> list[LogitRows]:
            (canvas,) = canvases
            start = request.placement.canvas_start
            positions = torch.cat([*places, torch.arange(start, start + len(canvas.ids))])
            masks = [block_mask(lens, len(canvas.ids))]
            attend = DenseAttend(self.model.backbone.rope, [len(positions)], positions, masks)
            hidden = self.model.backbone.hidden(torch.cat((context, canvas.ids)), attend)
            logits = self.model.backbone.logits(hidden)
            if self.model.spec.logit_shift:  # row i-1 predicts token i
                logits = torch.cat((logits[:1], logits[:-1]))
            answer_rows = logits[len(context) + canvas.prompt_len :]
            return [LogitRows(answer_rows[canvas.masked])]

        return denoise([request], forward, self.model.spec, self.rule)


def tokens_of(steps: Sequence[DecodeStep], sequence: int = 0) -> dict[int, int]:
    found: dict[int, int] = {}
    for step in steps:
        if step.sequence == sequence:
            found.update(zip(step.rows, step.tokens, strict=True))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["reference", "flash"])
@pytest.mark.parametrize("shift", [True, False], ids=["shifted", "unshifted"])
@pytest.mark.parametrize("lens", [(12, 30, 7), (1,), (20,), ()], ids=str)
def test_static_kv_equals_a_full_forward_under_the_block_mask(
    tiny_model: LoadedModel, mode: str, backend: str, shift: bool, lens: tuple[int, ...]
) -> None:
    """The one test that proves the system: token for token, step for step, confidence for confidence."""
    tiny_model = replace(tiny_model, spec=replace(tiny_model.spec, logit_shift=shift))
    request = request_for(tiny_model, lens, mode=mode, max_new_tokens=40)
    rule = CommitRule(threshold=0.3)
    ours = list(StaticKVDecoder(tiny_model, rule, backend=backend).steps([request]))
    oracle = list(OracleDecoder(tiny_model, rule).steps(request))
    assert [(s.rows, s.tokens, s.nfe, s.finished) for s in ours] == [
        (s.rows, s.tokens, s.nfe, s.finished) for s in oracle
    ]
    for one, other in zip(ours, oracle, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


def test_static_kv_hidden_states_equal_the_oracles_to_rounding(tiny_model: LoadedModel) -> None:
    lens, canvas = (12, 30, 7), torch.randint(4, 250, (25,), generator=torch.Generator().manual_seed(9))
    chunks = chunks_of(tiny_model, lens)
    placement = plan_offsets(lens, "gap", chunk_len=32)
    backbone = tiny_model.backbone
    context = gather(
        [Placed(tuple(kv for _, kv in chunks), placement)],
        [25],
        backbone,
    )
    ours = backbone.hidden(canvas, SplitSAttend(backbone.rope, context))
    places = [torch.arange(o, o + n) for o, n in zip(placement.offsets, lens, strict=True)]
    positions = torch.cat([*places, torch.arange(placement.canvas_start, placement.canvas_start + 25)])
    ids = torch.cat([torch.tensor([t for ids, _ in chunks for t in ids]), canvas])
    dense = DenseAttend(backbone.rope, [len(ids)], positions, [block_mask(lens, 25)])
    torch.testing.assert_close(ours, backbone.hidden(ids, dense)[-25:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("decoder_type", [StaticKVDecoder, VanillaDecoder])
def test_a_row_alone_equals_itself_in_a_batch_and_shuffled(
    tiny_model: LoadedModel, decoder_type: type[StaticKVDecoder] | type[VanillaDecoder]
) -> None:
    shapes = [((5, 17), 5, 24), ((40,), 17, 7), ((3, 3, 3), 40, 33)]
    requests = [
        request_for(tiny_model, lens, prompt_len=n, max_new_tokens=m, seed=i) for i, (lens, n, m) in enumerate(shapes)
    ]
    decoder = decoder_type(tiny_model, CommitRule(threshold=0.3))
    alone = [tokens_of(list(decoder.steps([request]))) for request in requests]
    together = list(decoder.steps(requests))
    shuffled = list(decoder.steps(requests[::-1]))
    for index in range(len(requests)):
        assert tokens_of(together, index) == alone[index]
        assert tokens_of(shuffled, len(requests) - 1 - index) == alone[index]


def test_sampling_repeats_by_seed_whatever_the_batch(tiny_model: LoadedModel) -> None:
    requests = [
        request_for(tiny_model, (9,), max_new_tokens=16, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (1, 2, 1)
    ]
    steps = list(StaticKVDecoder(tiny_model).steps(requests))
    first, other, again = (tokens_of(steps, i) for i in range(3))
    assert first == again
    assert first != other


@pytest.mark.parametrize("decoder_type", [StaticKVDecoder, VanillaDecoder])
@pytest.mark.parametrize("max_new_tokens", [1, 7, 32, 33, 100])
def test_every_length_ends_with_no_mask_in_the_answer(
    tiny_model: LoadedModel,
    decoder_type: type[StaticKVDecoder] | type[VanillaDecoder],
    max_new_tokens: int,
) -> None:
    request = request_for(tiny_model, (11, 6), max_new_tokens=max_new_tokens)
    steps = list(decoder_type(tiny_model, CommitRule(threshold=0.999)).steps([request]))
    filled = tokens_of(steps)
    end = min((row for row, token in filled.items() if token in tiny_model.spec.eos_ids), default=max_new_tokens)
    assert steps[-1].finished in ("stop", "length")
    assert all(row in filled for row in range(min(end, max_new_tokens)))
    assert tiny_model.spec.mask_id not in filled.values()
    assert [step.nfe for step in steps] == list(range(1, len(steps) + 1))


def test_a_shorter_answer_is_a_prefix_of_the_longer_one(tiny_model: LoadedModel) -> None:
    longer = tokens_of(list(StaticKVDecoder(tiny_model).steps([request_for(tiny_model, (9,), max_new_tokens=64)])))
    for n in (1, 5, 31, 33):
        request = request_for(tiny_model, (9,), max_new_tokens=n)
        shorter = tokens_of(list(StaticKVDecoder(tiny_model).steps([request])))
        assert all(longer[row] == shorter[row] for row in range(min(n, len(longer))))


def logits_decoder(model: LoadedModel, make_logits: object, max_new_tokens: int, rule: CommitRule) -> list[DecodeStep]:
    def forward(_: Sequence[int], canvases: Sequence[Canvas]) -> list[LogitRows]:
        return [LogitRows(make_logits(canvas)) for canvas in canvases]  # type: ignore[operator]

    request = DecodeRequest([5, 6], plan_offsets([], "sequential", chunk_len=1), max_new_tokens)
    return list(denoise([request], forward, model.spec, rule))


def test_equal_logits_end_and_commit_one_token_a_step(tiny_model: LoadedModel) -> None:
    steps = logits_decoder(
        tiny_model, lambda canvas: torch.zeros(len(canvas.open_rows()), 300), 7, CommitRule(threshold=1.0)
    )
    assert [len(step.rows) for step in steps] == [1] * 7
    assert [step.rows[0] for step in steps] == list(range(7))


def test_a_threshold_of_zero_commits_everything_in_one_step(tiny_model: LoadedModel) -> None:
    steps = logits_decoder(
        tiny_model, lambda canvas: torch.randn(len(canvas.open_rows()), 300), 7, CommitRule(threshold=0.0)
    )
    assert len(steps) == 1


def test_a_step_budget_is_a_bound_per_block(tiny_model: LoadedModel) -> None:
    def no_eos(canvas: Canvas) -> torch.Tensor:
        logits = torch.zeros(len(canvas.open_rows()), 300)
        logits[:, 2] = -50.0
        return logits

    for budget in (1, 3, 8):
        steps = logits_decoder(tiny_model, no_eos, 64, CommitRule(threshold=1.0, steps=budget))
        assert len(steps) == 2 * budget
    for bad in (0, -1):
        with pytest.raises(ValueError, match="steps"):
            CommitRule(steps=bad)


def test_an_answer_is_cut_at_the_first_end_in_reading_order_and_later_blocks_are_not_computed(
    tiny_model: LoadedModel,
) -> None:
    eos = tiny_model.spec.eos_ids[0]

    def logits(canvas: Canvas) -> torch.Tensor:
        table = torch.full((len(canvas.masked), 300), -10.0)
        table[:, 70] = 5.0
        table[3, eos] = table[20, eos] = 30.0
        return table[canvas.open_rows()]

    steps = logits_decoder(tiny_model, logits, 256, CommitRule(threshold=0.9))
    filled = tokens_of(steps)
    assert steps[-1].finished == "stop"
    assert max(filled) < tiny_model.spec.family.block_len
    assert [filled[row] for row in range(4)] == [70, 70, 70, eos]
    assert all(filled[row] == eos for row in range(4, 32))


def test_logits_that_are_not_finite_raise(tiny_model: LoadedModel) -> None:
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NumericsError, match="finite"):
            logits_decoder(
                tiny_model, lambda canvas, b=bad: torch.full((len(canvas.open_rows()), 300), b), 4, CommitRule()
            )


def test_a_cancelled_sequence_leaves_and_the_others_go_on(tiny_model: LoadedModel) -> None:
    requests = [request_for(tiny_model, (9,), max_new_tokens=32, seed=i) for i in range(2)]
    seen = []
    for step in StaticKVDecoder(tiny_model, CommitRule(threshold=1.0)).steps(requests):
        seen.append(step)
        requests[0].cancel.set()
    assert [s.finished for s in seen if s.sequence == 0][-1] == "cancelled"
    assert [s.finished for s in seen if s.sequence == 1][-1] in ("stop", "length")
    assert len([s for s in seen if s.sequence == 0]) == 2


def test_prompt_tokens_never_change_even_if_they_are_masks() -> None:
    canvas = Canvas([3, 3, 9], mask_id=3, eos_ids=(2,), block_len=4, max_new_tokens=4)
    assert canvas.open_rows().tolist() == [0, 1, 2, 3]
    canvas.commit(torch.tensor([0]), torch.tensor([8]))
    assert canvas.ids.tolist() == [3, 3, 9, 8, 3, 3, 3]
    with pytest.raises(ValueError, match="never replaced"):
        canvas.commit(torch.tensor([0]), torch.tensor([9]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=6), st.sampled_from(MODES), st.sampled_from([1, 4, 32]))
def test_placements_never_overlap_and_the_canvas_comes_last(lens: list[int], mode: str, multiple: int) -> None:
    plan = plan_offsets(lens, mode, chunk_len=50, multiple=multiple)
    ends = [offset + n for offset, n in zip(plan.offsets, lens, strict=True)]
    assert all(value % multiple == 0 for value in (*plan.offsets, plan.canvas_start))
    assert plan.canvas_start >= max(ends, default=0)
    if mode == "reuse":
        assert set(plan.offsets) <= {0}
    else:
        assert all(end <= start for end, start in zip(ends, plan.offsets[1:], strict=False))
    if mode == "gap":
        assert list(plan.offsets) == [i * -(-50 // multiple) * multiple for i in range(len(lens))]


def test_unknown_placements_and_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="sequential, gap, reuse"):
        plan_offsets([3], "random", chunk_len=3)
    with pytest.raises(ValueError, match="slots of 2"):
        plan_offsets([3], "gap", chunk_len=2)
