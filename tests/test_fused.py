"""The fused layer loop and the captured step are the plain ones of a CPU, in fewer launches.

Without a GPU the kernels run in Triton's interpreter and nothing is captured; with one they run there, in a CUDA graph.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import KERNEL_DEVICE, MARKS_OF_KERNELS
from pdllm_store import ChunkKV
from tiny import save_tiny_model

from pdllm_rag import LoadedModel, load_model
from pdllm_rag.attends import CaptureAttend, DenseAttend, PackedSplitSAttend, SplitSAttend
from pdllm_rag.attention.triton import Room
from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding import CommitRule, DecodeRequest, DecodeStep, Sampling, StaticKVDecoder, graphed
from pdllm_rag.decoding.graphed import GraphedStep, Shape, checked_out
from pdllm_rag.decoding.predictions import DeviceRows, LogitRows
from pdllm_rag.decoding.sampling import propose
from pdllm_rag.errors import NumericsError
from pdllm_rag.models.fused import FusedBackbone, why_not_fused
from pdllm_rag.models.rope import Rope
from pdllm_rag.placement import plan_offsets

BLOCK = 4
pytestmark = MARKS_OF_KERNELS


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """A model on the CPU, and the same weights fused, on `KERNEL_DEVICE`."""
    folder = save_tiny_model(tmp_path_factory.mktemp("m"), model_type=request.param, num_hidden_layers=2)
    plain = load_model(str(folder), device="cpu", dtype=torch.float32)
    plain = replace(plain, spec=replace(plain.spec, family=replace(plain.spec.family, block_len=BLOCK)))
    return plain, fused(plain)


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "ROWS_APART", 4)
    monkeypatch.setattr(graphed, "CONTEXT_APART", 32)


def fused(plain: LoadedModel) -> LoadedModel:
    one = plain.backbone
    model = copy.deepcopy(one.model).to(KERNEL_DEVICE)
    rope = Rope.from_config(model.config, KERNEL_DEVICE)
    return replace(plain, backbone=FusedBackbone(model, rope, mask_id=one.mask_id, forbidden_from=one.forbidden_from))


def random_kv(model: LoadedModel, n_tokens: int, generator: torch.Generator) -> ChunkKV:
    one = model.backbone
    return ChunkKV(*torch.randn(2, one.n_layers, n_tokens, one.n_kv_heads, one.head_dim, generator=generator))


def request_for(
    model: LoadedModel,
    lens: tuple[int, ...],
    prompt_len: int,
    max_new_tokens: int,
    seed: int = 0,
    temperature: float = 0,
) -> DecodeRequest:
    generator = torch.Generator().manual_seed(seed)
    return DecodeRequest(
        torch.randint(5, 200, (prompt_len,), generator=generator).tolist(),
        plan_offsets(lens, "sequential", chunk_len=64),
        max_new_tokens,
        chunk_kv=[random_kv(model, n, generator) for n in lens],
        sampling=Sampling(temperature, seed),
        probe_ids=(9, 10),
    )


def told(steps: Iterator[DecodeStep]) -> list[tuple[object, ...]]:
    return [(s.sequence, s.rows, s.tokens, s.nfe, s.finished) for s in steps]


def test_hidden_states_and_captured_keys_are_the_plain_ones(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain, quick = (model.backbone for model in pair)
    ids, lens = torch.randint(5, 200, (11,)), [4, 7]
    positions = torch.cat([torch.arange(n) for n in lens])
    theirs = plain.hidden(ids, DenseAttend(plain.rope, lens, positions))
    ours = quick.hidden(ids.to(KERNEL_DEVICE), DenseAttend(quick.rope, lens, positions.to(KERNEL_DEVICE)))
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    captures = []
    for one in (plain, quick):
        captures.append(CaptureAttend(one.rope, lens, positions.to(one.device), sketch_layer=1))
        one.encode(ids.to(one.device), captures[-1])
    for a, b in zip(captures[0].keys + captures[0].values, captures[1].keys + captures[1].values, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-5 * float(a.abs().max()))


@torch.inference_mode()
def test_packed_split_s_is_the_one_by_one(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Two sequences of other lengths in one launch; offsets are left to the queries in one of them."""
    plain, quick = (model.backbone for model in pair)
    generator = torch.Generator().manual_seed(3)
    placed = [
        Placed(tuple(random_kv(pair[0], n, generator) for n in lens), plan_offsets(lens, "sequential", chunk_len=64))
        for lens in ((40, 9), (17,))
    ]
    contexts = [gather(placed, [6, 11], one) for one in (plain, quick)]
    q, k, v = (
        torch.randn(17, heads, plain.head_dim, generator=generator)
        for heads in (plain.n_heads, *[plain.n_kv_heads] * 2)
    )
    theirs = SplitSAttend(plain.rope, contexts[0], backend="reference")(1, q, k, v)
    ours = PackedSplitSAttend(quick, contexts[1])(1, *(x.to(KERNEL_DEVICE) for x in (q, k, v)))
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    for a, b in ((contexts[0].k[1], contexts[1].k[1]), (contexts[0].v[1], contexts[1].v[1])):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-5)


def test_proposals_are_those_of_the_pure_function(pair: tuple[LoadedModel, LoadedModel]) -> None:
    one = pair[1].backbone
    assert isinstance(one, FusedBackbone)
    raw = torch.randn(5, 9000, generator=torch.Generator().manual_seed(1)) * 5  # more than two parts of a row
    raw[1, 4100] = raw[1, 40] = 60.0  # the first of equals wins
    raw[2, one.mask_id] = 90.0  # a mask is never an answer
    one.forbidden_from, kept = 8000, one.forbidden_from
    raw[3, 8500] = 90.0
    raw[4, 7] = torch.nan
    found = one.proposals(raw.to(KERNEL_DEVICE)).cpu()
    expected = propose(one.allowed(raw[:4].clone()))
    one.forbidden_from = kept
    assert found[:4, 0].tolist() == expected.tokens.tolist()
    assert found[1, 0] == 40
    bits = found[:, 1:].contiguous().view(torch.float32)
    torch.testing.assert_close(bits[:4, 0], expected.confidence.float(), rtol=1e-5, atol=1e-7)
    assert torch.isfinite(bits[:4, 1]).all()
    assert not torch.isfinite(bits[4, 1])


def test_what_a_pass_found_on_the_device_is_what_its_logits_say(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Of a model without kernels, in a pass that is not captured."""
    plain = pair[0].backbone
    raw = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)) * 5
    rows = DeviceRows(plain, raw.clone(), plain.proposals(raw.clone()), torch.tensor([3, 1]))
    logits = LogitRows(plain.allowed(raw.clone())[[3, 1]])
    for sampling, order in ((Sampling(), "low_confidence"), (Sampling(), "margin"), (Sampling(1.0), "random")):
        ours, theirs = (
            one.propose(sampling, torch.Generator().manual_seed(2), order)  # type: ignore[arg-type]
            for one in (rows, logits)
        )
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        for a, b in ((ours.confidence, theirs.confidence), (ours.rank, theirs.rank)):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-7)
    assert rows.mean_log_p((5, 6)) == logits.mean_log_p((5, 6))
    raw[1, 7] = torch.nan
    spoiled = DeviceRows(plain, raw, plain.proposals(raw.clone()), torch.arange(4))
    with pytest.raises(NumericsError, match="finite"):
        spoiled.propose(Sampling(), torch.Generator(), "low_confidence")


@pytest.mark.usefixtures("small_shapes")
def test_a_captured_decode_commits_what_the_plain_one_does(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Ragged canvases and contexts, one of them empty; a second block opens; one sequence ends before the other."""
    plain, quick = pair
    requests = [request_for(plain, (30, 9), 3, 2 * BLOCK), request_for(plain, (), 6, BLOCK, seed=1)]
    rule = CommitRule(threshold=1.0, steps=2)
    decoder = StaticKVDecoder(quick, rule, backend="triton")
    assert decoder.is_graphed
    ours, theirs = list(decoder.steps(requests)), list(StaticKVDecoder(plain, rule).steps(requests))
    assert told(iter(ours)) == told(iter(theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.confidence == pytest.approx(b.confidence, abs=1e-5)
        assert a.probe == pytest.approx(b.probe, abs=1e-4)


@pytest.mark.usefixtures("small_shapes")
def test_a_captured_step_serves_the_next_question_of_its_shape_and_forgets_the_last(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    plain, quick = pair
    backbone = quick.backbone
    assert isinstance(backbone, FusedBackbone)
    backbone.captures.clear()
    for seed, lens, prompt_len in ((0, (30,), 4), (1, (8, 3), 2)):  # the second leaves rows of the first behind
        request = request_for(plain, lens, prompt_len, 3, seed=seed)
        rule = CommitRule(threshold=0.0)
        ours = told(StaticKVDecoder(quick, rule, backend="triton").steps([request]))
        assert ours == told(StaticKVDecoder(plain, rule).steps([request]))
    assert len(backbone.captures) == 1


@pytest.mark.usefixtures("small_shapes")
def test_a_decode_that_is_left_halfway_gives_its_step_back(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain, quick = pair
    backbone = quick.backbone
    assert isinstance(backbone, FusedBackbone)
    backbone.captures.clear()
    rule = CommitRule(threshold=1.0)
    left = StaticKVDecoder(quick, rule, backend="triton").steps([request_for(plain, (30,), 4, 3)])
    next(left)
    assert not backbone.captures
    del left
    assert len(backbone.captures) == 1
    request = request_for(plain, (8, 3), 2, 3, seed=1)
    ours = told(StaticKVDecoder(quick, rule, backend="triton").steps([request]))
    assert ours == told(StaticKVDecoder(plain, rule).steps([request]))
    assert len(backbone.captures) == 1


@pytest.mark.usefixtures("small_shapes")
def test_few_steps_wait_and_those_used_last_stay(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the oldest is in use, and two of one shape are."""
    backbone = pair[1].backbone
    assert isinstance(backbone, FusedBackbone)
    backbone.captures.clear()
    monkeypatch.setattr(graphed, "MAX_IDLE", 2)
    a, b, c = (Shape(1, 8 * n, 32, BLOCK) for n in (1, 2, 3))  # none serves another
    for shape in (a, b):
        with checked_out(backbone, False, shape, GraphedStep):
            pass
    with checked_out(backbone, False, a, GraphedStep) as first, checked_out(backbone, False, a, GraphedStep) as second:
        assert first is not second
        with checked_out(backbone, False, c, GraphedStep):
            pass
    assert [(step.shape, step.logit_shift) for step in backbone.captures] == [(a, False), (a, False)]
    with checked_out(backbone, False, a, GraphedStep) as again:
        assert again in (first, second)
    monkeypatch.setattr(graphed, "MAX_IDLE_BYTES", 1)
    with checked_out(backbone, False, c, GraphedStep):
        pass
    assert [(step.shape, step.logit_shift) for step in backbone.captures] == [(c, False)]


@pytest.mark.usefixtures("small_shapes")
def test_a_model_that_nobody_holds_is_gone_with_its_captured_steps(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """At once: a GPU's memory cannot wait for the collector."""
    model = fused(pair[0])
    list(StaticKVDecoder(model, backend="triton").steps([request_for(pair[0], (9,), 3, BLOCK)]))
    backbone = weakref.ref(model.backbone)
    gc.disable()
    try:
        del model
        assert backbone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("small_shapes")
def test_sampling_draws_the_same_tokens(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain, quick = pair
    request = request_for(plain, (9,), 3, BLOCK, seed=5, temperature=1.0)
    rule = CommitRule(threshold=1.0, steps=2)
    ours = told(StaticKVDecoder(quick, rule, backend="triton").steps([request]))
    assert ours == told(StaticKVDecoder(plain, rule).steps([request]))


@pytest.mark.usefixtures("small_shapes")
def test_logits_that_are_not_finite_raise(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain = pair[0]
    broken = fused(plain)
    broken.backbone.model.model.norm.weight.data[0] = torch.nan
    request = request_for(plain, (9,), 3, BLOCK)
    with pytest.raises(NumericsError, match="finite"):
        list(StaticKVDecoder(broken, backend="triton").steps([request]))


@pytest.mark.usefixtures("small_shapes")
def test_what_does_not_fit_a_captured_shape_is_refused(pair: tuple[LoadedModel, LoadedModel]) -> None:
    backbone = pair[1].backbone
    assert isinstance(backbone, FusedBackbone)
    with checked_out(backbone, True, Shape.fitting(1, 8, 32, BLOCK), GraphedStep) as step:
        context = gather([Placed((), plan_offsets((), "sequential", chunk_len=1))], [12], backbone)
        with pytest.raises(ValueError, match="captured for 8"):
            step.arrange([0], context.sequences)
        with pytest.raises(ValueError, match="do not fit"):
            step._attend.attention.reserve(Room(1, 1, 1, 1))


def test_models_that_cannot_be_fused_say_why(pair: tuple[LoadedModel, LoadedModel]) -> None:
    model = copy.deepcopy(pair[0].backbone.model)
    assert why_not_fused(model) is None
    model.config.hidden_act = "gelu"
    assert "activation" in str(why_not_fused(model))
    model.config.hidden_act = "silu"
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    assert "plain" in str(why_not_fused(model))
    with pytest.raises(ValueError, match="cannot run fused"):
        FusedBackbone(model, pair[0].backbone.rope, mask_id=3, forbidden_from=99)


def test_weights_are_held_once(pair: tuple[LoadedModel, LoadedModel]) -> None:
    backbone = pair[1].backbone
    for layer in backbone.model.model.layers:
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


def test_without_a_gpu_nothing_is_fused(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    del tmp_path
    assert type(pair[0].backbone).__name__ == "Backbone"
    assert not StaticKVDecoder(pair[0]).is_graphed


def test_a_step_with_room_to_spare_serves_smaller_questions() -> None:
    step = Shape(2, 96, 4096, 32)
    assert step.serves(Shape.fitting(2, 70, 100, 32))
    for other in (Shape(1, 96, 4096, 32), Shape(2, 96, 5120, 32), Shape(2, 32, 64, 32), Shape(2, 128, 64, 32)):
        assert not step.serves(other)
    assert not step.serves(Shape(2, 96, 4096, 16))
