"""Fast-dLLM's steps equal a slow reference that keeps the stale keys and values itself, in every batch and block."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from attention_cases import KERNEL_DEVICE, MARKS_OF_KERNELS
from decoding_cases import NO_TOKEN, ending, request_for, tokens_of, told, with_blocks
from tiny import save_tiny_model

from pdllm_rag import LoadedModel, load_model
from pdllm_rag.attends import DenseAttend
from pdllm_rag.context import gather
from pdllm_rag.decoding import Canvas, CommitRule, DecodeRequest, DecodeStep, FastDLLMDecoder, VanillaDecoder, graphed
from pdllm_rag.decoding.denoise import canvas_of, denoise
from pdllm_rag.decoding.fast_dllm import FastDLLMOptions, _Passes
from pdllm_rag.decoding.predictions import LogitRows
from pdllm_rag.decoding.static_kv import StaticKVDecoder
from pdllm_rag.decoding.vanilla import VanillaOptions
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.models.rope import Rope

BLOCK = 8
ONE_BY_ONE, SOME = CommitRule(threshold=1.0), CommitRule(threshold=1.0, steps=3)
both_caches = pytest.mark.parametrize("cache", ["prefix", "dual"])
both_shifts = pytest.mark.parametrize("shift", [True, False], ids=["shifted", "unshifted"])
Cache = Literal["prefix", "dual"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LoadedModel]:
    """Of one layer and of three, in blocks of `BLOCK`; they end no answer by themselves."""
    made = {}
    for n_layers in (1, 3):
        shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 32}
        path = save_tiny_model(tmp_path_factory.mktemp(f"m{n_layers}"), num_hidden_layers=n_layers, **shape)
        made[n_layers] = with_blocks(ending(load_model(str(path), dtype=torch.float32), NO_TOKEN), BLOCK)
    return made


def shifted(model: LoadedModel, shift: bool) -> LoadedModel:
    return replace(model, spec=replace(model.spec, logit_shift=shift))


class Keeping(DenseAttend):
    """Rows of one sequence, of which some have the keys and values of an earlier pass."""

    def __init__(self, model: LoadedModel, positions: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(model.backbone.rope, [len(positions)], positions, [mask])
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stale = torch.zeros(len(positions), dtype=torch.bool)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = self.rotated(q, k)
        old_k, old_v = self.kept.get(layer, (k, v))
        k = torch.where(self.stale[:, None, None], old_k, k)
        v = torch.where(self.stale[:, None, None], old_v, v)
        self.kept[layer] = k, v
        return self.attend(q, k, v)


def reference(model: LoadedModel, cache: Cache, rule: CommitRule, request: DecodeRequest) -> Iterator[DecodeStep]:
    """Computes every row at every step, chunks too, and then puts the stale keys and values in their place."""
    context = [token for ids in request.chunk_ids for token in ids]
    canvas, shift = canvas_of(request, model.spec, whole=True), int(model.spec.logit_shift)
    n_context, n = len(context), len(context) + len(canvas.ids)
    mask = torch.ones(n, n, dtype=torch.bool)
    start = 0
    for ids in request.chunk_ids:  # a chunk sees itself
        mask[start : start + len(ids)] = False
        mask[start : start + len(ids), start : start + len(ids)] = True
        start += len(ids)
    attend, begun = Keeping(model, torch.arange(n), mask), None

    def forward(_: Sequence[int], canvases: Sequence[Canvas]) -> list[LogitRows]:
        nonlocal begun
        (own,) = canvases
        first = n_context + own.prompt_len
        attend.stale[:] = False
        if own.block == begun:
            attend.stale[: first + own.block.start - shift] = True  # with the row that predicts the block's first
            attend.stale[first + own.block.stop :] = cache == "dual"
        begun = own.block
        hidden = model.backbone.hidden(torch.cat((torch.tensor(context, dtype=torch.int64), own.ids)), attend)
        return [LogitRows(model.backbone.logits(hidden[first + own.open_rows() - shift]))]

    return denoise([request], forward, model.spec, rule, [canvas])


@both_caches
@both_shifts
@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_every_step_is_the_references(models: dict[int, LoadedModel], cache: Cache, shift: bool, backend: str) -> None:
    model = shifted(models[3], shift)
    request = request_for(model, max_new_tokens=20)
    ours = list(FastDLLMDecoder(model, SOME, FastDLLMOptions(cache), backend=backend).steps([request]))
    slow = list(reference(model, cache, SOME, request))
    assert told(ours) == told(slow)
    for one, other in zip(ours, slow, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


@pytest.mark.parametrize("context", [pytest.param(word, marks=MARKS_OF_KERNELS) for word in ("stored", "dense")])
def test_replayed_steps_are_the_eager_ones_at_different_places_of_a_batch(
    models: dict[int, LoadedModel], context: Literal["stored", "dense"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed, "ROWS_APART", 4)
    monkeypatch.setattr(graphed, "CONTEXT_APART", 32)
    model = models[1]
    one = model.backbone
    rope = Rope.from_config(one.model.config, KERNEL_DEVICE)
    weights = copy.deepcopy(one.model).to(KERNEL_DEVICE)
    fused = FusedBackbone(weights, rope, mask_id=one.mask_id, forbidden_from=one.forbidden_from)
    rule, options = CommitRule(threshold=0.055), FastDLLMOptions("dual", context)
    quick = FastDLLMDecoder(replace(model, backbone=fused), rule, options, backend="triton")
    eager = FastDLLMDecoder(model, rule, options)
    assert quick.is_graphed
    assert not eager.is_graphed
    requests = [request_for(model, prompt=n, max_new_tokens=m, seed=n) for n, m in ((3, 9), (7, 9))]
    found, expected = list(quick.steps(requests)), list(eager.steps(requests))
    for index in range(2):
        assert told(found, index) == told(expected, index)


@both_caches
@both_shifts
def test_with_nothing_committed_a_step_within_a_block_says_what_the_first_one_said(
    models: dict[int, LoadedModel], cache: Cache, shift: bool
) -> None:
    """And that is what a dense forward pass over the whole canvas says."""
    model = shifted(models[3], shift)
    request = replace(request_for(model, max_new_tokens=20), chunk_ids=(), chunk_kv=())
    request = replace(request, placement=request.placement._replace(offsets=(), canvas_start=0))
    canvas = canvas_of(request, model.spec, whole=True)
    context = gather([request.placed()], [len(canvas.ids)], model.backbone)
    passes = _Passes(model, context, cache, "reference", None)
    dense = DenseAttend(model.backbone.rope, [len(canvas.ids)], torch.arange(len(canvas.ids)))
    hidden = model.backbone.hidden(canvas.ids, dense)
    expected = model.backbone.logits(hidden[canvas.prompt_len + canvas.open_rows() - int(shift)])
    for _ in range(2):
        (found,) = passes.forward([0], [canvas])
        assert isinstance(found, LogitRows)
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)


@both_caches
def test_with_one_layer_nothing_goes_stale(models: dict[int, LoadedModel], cache: Cache) -> None:
    """A layer's keys and values depend on the tokens alone, so both caches are exact."""
    model = shifted(models[1], False)
    request = request_for(model, max_new_tokens=20)
    dense = VanillaDecoder(model, SOME, VanillaOptions(canvas="whole"))
    ours = FastDLLMDecoder(model, SOME, FastDLLMOptions(cache, "dense"))
    assert told(list(ours.steps([request]))) == told(list(dense.steps([request])))
    apart = replace(request, placement=request.placement._replace(canvas_start=99))
    with pytest.raises(ValueError, match="the canvas at 99; expected one after another"):
        ours.steps([apart])


@both_caches
@both_shifts
@pytest.mark.parametrize("max_new_tokens", [1, BLOCK, 20])
def test_a_threshold_of_1_commits_one_token_a_step_and_of_0_a_block(
    models: dict[int, LoadedModel], cache: Cache, shift: bool, max_new_tokens: int
) -> None:
    """No step is taken for a block that is complete."""
    model = shifted(models[3], shift)
    request = request_for(model, max_new_tokens=max_new_tokens)
    n_rows = -(-max_new_tokens // BLOCK) * BLOCK
    slow = list(FastDLLMDecoder(model, ONE_BY_ONE, FastDLLMOptions(cache)).steps([request]))
    assert all(len(step.rows) == 1 for step in slow)
    assert max_new_tokens <= len(slow) <= n_rows
    at_once = list(FastDLLMDecoder(model, CommitRule(threshold=0.0), FastDLLMOptions(cache)).steps([request]))
    assert [len(step.rows) for step in at_once] == [BLOCK] * (n_rows // BLOCK)


@both_caches
def test_an_answer_of_one_block_begins_as_static_kv_does(models: dict[int, LoadedModel], cache: Cache) -> None:
    model = models[3]
    request = request_for(model, max_new_tokens=BLOCK)
    rule = CommitRule(threshold=0.0)
    ours = list(FastDLLMDecoder(model, rule, FastDLLMOptions(cache)).steps([request]))
    assert told(ours) == told(list(StaticKVDecoder(model, rule).steps([request])))


def test_batches_and_lengths_that_others_crash_on(models: dict[int, LoadedModel]) -> None:
    """Prompts of 5, 17 and 40 tokens in one batch, each at its own block."""
    for cache in ("prefix", "dual"):
        decoder = FastDLLMDecoder(models[3], SOME, FastDLLMOptions(cache))  # type: ignore[arg-type]
        requests = [request_for(models[3], prompt=n, max_new_tokens=24, seed=n) for n in (5, 17, 40)]
        together = list(decoder.steps(requests))
        for index, request in enumerate(requests):
            assert told(together, index) == told(list(decoder.steps([request])))
            assert set(tokens_of(together, index)) == set(range(24))


def test_a_block_causal_model_and_bad_options_are_refused(models: dict[int, LoadedModel]) -> None:
    family = replace(models[1].spec.family, prefill_mask="block-causal-8")
    causal = replace(models[1], spec=replace(models[1].spec, family=family))
    with pytest.raises(ValueError, match=r"block-causal.*static_kv"):
        FastDLLMDecoder(causal)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor"):
            FastDLLMOptions(factor=bad)
