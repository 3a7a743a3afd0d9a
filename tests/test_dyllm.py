"""DyLLM decodes as its slow reference does, state for state; with every row salient it is static-KV decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from checkpoints import write_checkpoint
from slow_dyllm import SlowDyLLM
from test_block_causal import block_causal
from test_decoding import request_for, tokens_of

from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding import (
    Canvas,
    CommitRule,
    DecodeRequest,
    DecodeStep,
    StaticKVDecoder,
    VanillaDecoder,
    dyllm_rows,
)
from pdllm_rag.decoding.dyllm import DyLLMDecoder, DyLLMOptions, PassKind
from pdllm_rag.decoding.dyllm_plan import Part, Plan
from pdllm_rag.decoding.dyllm_rows import EagerRows, EagerState, cosine
from pdllm_rag.errors import NumericsError
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.placement import Placement

ONE_BY_ONE = CommitRule(threshold=0.999)
TAU = 0.97  # of which some rows of the tiny model fall short, in every layer and step, and some do not
SPARSE = {
    "published": DyLLMOptions(TAU, union_committed=False, full_steps=2),
    "united": DyLLMOptions(TAU, full_steps=1, whole_every=3),
    "refresh": DyLLMOptions(TAU, similarity="refresh", union_committed=False, full_steps=1, refresh_every=6),
    "capacity": DyLLMOptions(0.999, full_steps=1, whole_every=2, capacity=0.2),
}


class Snapshot(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    contexts: torch.Tensor
    outputs: torch.Tensor


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """What is kept of the only sequence's canvas after each pass."""
    taken: list[Snapshot] = []
    run = EagerState.run

    def watched(state: EagerState, active: Sequence[int], canvases: Sequence[Canvas]) -> object:
        done = run(state, active, canvases)
        first, n_rows = state.context.sequences[0].canvas_row, len(canvases[0].ids)
        buffers = (x[:, first : first + n_rows].clone() for x in (state.context.k, state.context.v))
        caches = (x[:, :n_rows].clone() for x in (state.caches.contexts, state.caches.outputs))
        taken.append(Snapshot(*buffers, *caches))
        return done

    monkeypatch.setattr(EagerState, "run", watched)
    return taken


def adapted(model: LoadedModel, *, shift: bool = True, block_len: int = 32) -> LoadedModel:
    family = replace(model.spec.family, block_len=block_len)
    return replace(model, spec=replace(model.spec, logit_shift=shift, family=family))


def told(steps: Iterator[DecodeStep]) -> list[tuple[object, ...]]:
    return [(s.sequence, s.rows, s.tokens, s.nfe, s.finished) for s in steps]


def check_against_slow(
    model: LoadedModel,
    options: DyLLMOptions,
    request: DecodeRequest,
    snapshots: list[Snapshot],
    rule: CommitRule = ONE_BY_ONE,
) -> DyLLMDecoder:
    assert options.tau is not None
    slow = SlowDyLLM(model, rule, options, options.tau)
    decoder = DyLLMDecoder(model, rule, options)
    assert told(decoder.steps([request])) == told(slow.steps(request))
    assert len(decoder.passes) == len(snapshots) == len(slow.snapshots)
    for ours, theirs, record in zip(snapshots, slow.snapshots, decoder.passes, strict=True):
        for name in Snapshot._fields:
            expected = getattr(theirs, name)
            got = getattr(ours, name).reshape(expected.shape)
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        assert record.recomputed == sum(map(len, theirs.salient)) / len(theirs.salient)
    return decoder


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("shift", [True, False], ids=["shifted", "unshifted"])
def test_it_is_the_slow_reference_token_for_token_and_state_for_state(
    tiny_model: LoadedModel, shift: bool, name: str, snapshots: list[Snapshot]
) -> None:
    """Two blocks over chunks; three of four passes leave the question out."""
    model = adapted(tiny_model, shift=shift, block_len=8)
    decoder = check_against_slow(model, SPARSE[name], request_for(model, (12, 7), max_new_tokens=9), snapshots)
    sparse = [one.share for one in decoder.passes if one.rows < one.canvas_rows]
    assert sparse
    assert all(0 < share < 0.9 for share in sparse)


def test_there_is_always_room_for_rows_that_were_just_committed(
    tiny_model: LoadedModel, snapshots: list[Snapshot]
) -> None:
    options, rule = replace(SPARSE["capacity"], capacity=0.05), CommitRule(threshold=1.0, steps=3)
    model = adapted(tiny_model, block_len=8)
    decoder = check_against_slow(model, options, request_for(model, (9,), max_new_tokens=8), snapshots, rule)
    assert any(one.recomputed >= 2 and one.left_out for one in decoder.passes)


@pytest.mark.parametrize("block_len", [8, 32])
def test_a_dense_prompt_is_the_slow_reference_too(
    tiny_model: LoadedModel, block_len: int, snapshots: list[Snapshot]
) -> None:
    model = adapted(tiny_model, block_len=block_len)
    check_against_slow(model, SPARSE["united"], request_for(model, (), prompt_len=21, max_new_tokens=8), snapshots)


@pytest.mark.parametrize(("block", "shift"), [(4, False), (8, True)])
def test_block_causal_models_keep_to_their_mask(
    tiny_model: LoadedModel, block: int, shift: bool, snapshots: list[Snapshot]
) -> None:
    model = block_causal(adapted(tiny_model, shift=shift), block, 8)
    request = request_for(model, (8, 16), max_new_tokens=12)
    check_against_slow(model, SPARSE["united"], request, snapshots)
    everything = DyLLMOptions(refresh_every=1)
    ours = told(DyLLMDecoder(model, ONE_BY_ONE, everything).steps([request]))
    assert ours == told(StaticKVDecoder(model, ONE_BY_ONE).steps([request]))


@pytest.mark.parametrize("shift", [True, False], ids=["shifted", "unshifted"])
@pytest.mark.parametrize("block_len", [8, 32])
@pytest.mark.parametrize("lens", [(12, 30, 7), ()], ids=str)
@pytest.mark.parametrize("way", ["refreshed in every pass", "all rows salient from the first layer on"])
def test_with_every_row_salient_it_is_static_kv_and_without_chunks_vanilla(
    tiny_model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    lens: tuple[int, ...],
    block_len: int,
    shift: bool,
) -> None:
    model = adapted(tiny_model, shift=shift, block_len=block_len)
    options = DyLLMOptions(refresh_every=1)
    if way != "refreshed in every pass":
        options = DyLLMOptions(tau=1.1, full_steps=1, whole_every=1)
        planned = Plan.next

        def from_all_rows(plan: Plan, *args: Sequence[object]) -> tuple[PassKind, list[Part]]:
            kind, parts = planned(plan, *args)  # type: ignore[arg-type]
            return kind, [part._replace(start=torch.ones_like(part.start)) for part in parts]

        monkeypatch.setattr(Plan, "next", from_all_rows)
    request = request_for(model, lens, max_new_tokens=20)
    decoder = DyLLMDecoder(model, ONE_BY_ONE, options)
    ours = list(decoder.steps([request]))
    for other in (StaticKVDecoder, VanillaDecoder)[: 1 if lens else 2]:
        theirs = list(other(model, ONE_BY_ONE).steps([request]))
        assert told(iter(ours)) == told(iter(theirs))
        for a, b in zip(ours, theirs, strict=True):
            assert a.confidence == pytest.approx(b.confidence, abs=1e-5)
    assert decoder.share == 1


@pytest.mark.parametrize("options", SPARSE.values(), ids=SPARSE.keys())
def test_a_row_alone_equals_itself_in_a_batch(tiny_model: LoadedModel, options: DyLLMOptions) -> None:
    """Ragged questions, contexts (one has none) and answers, which open their blocks at different times."""
    model = adapted(tiny_model, block_len=8)
    shapes = [((5, 17), 5, 24), ((), 17, 7), ((3, 3, 3), 40, 17)]
    requests = [
        request_for(model, lens, prompt_len=n, max_new_tokens=m, seed=i) for i, (lens, n, m) in enumerate(shapes)
    ]
    decoder = DyLLMDecoder(model, CommitRule(threshold=0.5), options)
    alone = [tokens_of(list(decoder.steps([request]))) for request in requests]
    together, shuffled = list(decoder.steps(requests)), list(decoder.steps(requests[::-1]))
    for index in range(len(requests)):
        assert tokens_of(together, index) == alone[index]
        assert tokens_of(shuffled, len(requests) - 1 - index) == alone[index]


@pytest.mark.parametrize("max_new_tokens", [1, 7, 33, 100])
@pytest.mark.parametrize("name", ["published", "capacity"])
def test_every_length_ends_with_no_mask_in_the_answer(tiny_model: LoadedModel, name: str, max_new_tokens: int) -> None:
    request = request_for(tiny_model, (11, 6), max_new_tokens=max_new_tokens)
    decoder = DyLLMDecoder(tiny_model, ONE_BY_ONE, SPARSE[name])
    steps = list(decoder.steps([request]))
    filled = tokens_of(steps)
    end = min((row for row, token in filled.items() if token in tiny_model.spec.eos_ids), default=max_new_tokens)
    assert steps[-1].finished in ("stop", "length")
    assert all(row in filled for row in range(min(end, max_new_tokens)))
    assert tiny_model.spec.mask_id not in filled.values()
    assert [step.nfe for step in steps] == list(range(1, len(steps) + 1))
    assert len(decoder.passes) == len(steps)


@pytest.fixture
def nothing_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dyllm_rows, "cosine", lambda a, _: torch.ones(len(a)))


@pytest.mark.usefixtures("nothing_turns")
def test_committed_rows_are_salient_in_every_layer_if_they_are_united(tiny_model: LoadedModel) -> None:
    """Where nothing else is; otherwise in the first layer's keys and values alone."""
    request = request_for(tiny_model, (9,), max_new_tokens=8)
    for united in (True, False):
        decoder = DyLLMDecoder(tiny_model, ONE_BY_ONE, DyLLMOptions(full_steps=1, union_committed=united))
        steps = list(decoder.steps([request]))
        assert [one.recomputed for one in decoder.passes[1:]] == [len(s.rows) * united for s in steps[:-1]]


@pytest.mark.usefixtures("nothing_turns")
def test_a_mixture_of_experts_may_have_no_salient_row(tmp_path: Path) -> None:
    model = load_model(str(write_checkpoint(tmp_path / "m", "llada2")), dtype=torch.float32)
    decoder = DyLLMDecoder(model, ONE_BY_ONE, DyLLMOptions(full_steps=1, union_committed=False))
    steps = list(decoder.steps([request_for(model, (), max_new_tokens=4)]))
    assert steps[-1].finished is not None
    assert {one.recomputed for one in decoder.passes[1:]} == {0}


def test_a_pass_is_full_whole_or_over_the_response_by_its_number(tiny_model: LoadedModel) -> None:
    options = DyLLMOptions(full_steps=3, whole_every=4, refresh_every=10)
    kinds = [options.kind(number).value for number in range(13)]
    assert kinds == ["full"] * 3 + ["response", "whole"] + ["response"] * 3 + ["whole", "response", "full"] + [
        "response",
        "whole",
    ]
    for shift in (True, False):
        model = adapted(tiny_model, shift=shift)
        decoder = DyLLMDecoder(model, ONE_BY_ONE, options)
        list(decoder.steps([request_for(model, (9,), prompt_len=6, max_new_tokens=32)]))
        rows = {one.kind: one.rows for one in decoder.passes}
        assert rows == {PassKind.FULL: 38, PassKind.WHOLE: 38, PassKind.RESPONSE: 32 + shift}  # the predicting row


def test_only_a_reference_of_the_last_refresh_notices_slow_drift(tiny_model: LoadedModel) -> None:
    """A value turns by 5 degrees a pass, and with it the context of a row that attends to it (tau allows 8.1)."""
    backbone = tiny_model.backbone
    degrees = torch.deg2rad(torch.tensor(5.0))
    shape = (2, backbone.n_kv_heads, backbone.head_dim)
    salient = {}
    for similarity in ("previous", "refresh"):
        options = DyLLMOptions(tau=0.99, similarity=similarity)
        context = gather([Placed((), Placement((), 0))], [2], backbone)
        state = EagerState(backbone, context, Plan(options, 1, 0), 0.99, block=None, backend="reference")
        canvas = Canvas([5], mask_id=3, eos_ids=(2,), block_len=1, max_new_tokens=1)
        everything, first = torch.tensor([True, True]), torch.tensor([True, False])
        seen = []
        for number in range(6):
            part = Part(0, everything, everything, 2) if number == 0 else Part(0, first, first, 2)
            rows = EagerRows(state, [0], [canvas], [part])
            n = part.start.sum()
            value = torch.zeros(shape)
            value[0, :, 0], value[0, :, 1] = torch.cos(number * degrees), torch.sin(number * degrees)
            q = torch.zeros(2, backbone.n_heads, backbone.head_dim)  # every key has the same weight
            with torch.inference_mode():
                rows.attend(0, q, torch.zeros(shape)[:n], value[:n])
            seen.append(len(rows.taken(q)) == 2)
        salient[similarity] = seen
    assert salient["previous"] == [True, False, False, False, False, False]
    assert salient["refresh"] == [True, False, True, False, True, False]


def test_a_capacity_takes_the_least_similar_rows_and_tells_how_many_it_left(tiny_model: LoadedModel) -> None:
    """With tau 2, as for measurements of speed, it is the share that is computed anew."""
    options = DyLLMOptions(tau=2.0, full_steps=1, capacity=0.25)
    decoder = DyLLMDecoder(tiny_model, ONE_BY_ONE, options)
    list(decoder.steps([request_for(tiny_model, (9,), prompt_len=8, max_new_tokens=32)]))
    for one in decoder.passes[1:]:
        assert one.recomputed == -(-one.rows // 4)
        assert one.left_out == one.rows - one.recomputed
    assert 0.25 <= cosine(torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])).item() == pytest.approx(0.96)


def test_a_cancelled_sequence_leaves_and_the_others_are_not_touched(tiny_model: LoadedModel) -> None:
    requests = [request_for(tiny_model, (9,), max_new_tokens=32, seed=i) for i in range(2)]
    decoder = DyLLMDecoder(tiny_model, ONE_BY_ONE, SPARSE["united"])
    alone = tokens_of(list(decoder.steps([requests[1]])))
    seen = []
    for step in decoder.steps(requests):
        seen.append(step)
        requests[0].cancel.set()
    assert [s.finished for s in seen if s.sequence == 0] == [None, "cancelled"]
    assert tokens_of(seen, 1) == alone


def test_logits_that_are_not_finite_raise_in_a_sparse_pass(tiny_model_path: Path) -> None:
    model = load_model(str(tiny_model_path), dtype=torch.float32)
    steps = DyLLMDecoder(model, ONE_BY_ONE, SPARSE["united"]).steps([request_for(model, (9,), max_new_tokens=8)])
    next(steps)
    model.backbone.model.model.layers[1].self_attn.o_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(NumericsError, match="finite"):
        next(steps)


def test_bytes_per_token_are_those_of_the_four_caches(tiny_model: LoadedModel) -> None:
    def decoder(name: str, options: DyLLMOptions, **shape: int) -> DyLLMDecoder:
        hidden = {"model": SimpleNamespace(config=SimpleNamespace(hidden_size=shape.pop("hidden")))}
        backbone = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"), **hidden, **shape)
        spec = replace(tiny_model.spec, family=replace(tiny_model.spec.family, name=name))
        return DyLLMDecoder(replace(tiny_model, backbone=backbone, spec=spec), options=options)  # type: ignore[arg-type]

    llada = {"n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "head_dim": 128, "hidden": 4096}
    dream = {"n_layers": 28, "n_heads": 28, "n_kv_heads": 4, "head_dim": 128, "hidden": 3584}
    assert decoder("llada", DyLLMOptions(), **llada).bytes_per_token == 1 << 20
    assert decoder("dream", DyLLMOptions(), **dream).bytes_per_token == 448 << 10
    refreshed = decoder("dream", DyLLMOptions(similarity="refresh"), **dream)
    assert refreshed.bytes_per_token == (448 + 196) << 10
    assert [decoder(name, DyLLMOptions(), **dict(dream)).tau for name in ("llada", "dream")] == [0.99, 0.995]
    assert decoder("dream", DyLLMOptions(tau=0.9), **dream).tau == 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": 0.0},
        {"tau": 2.1},
        {"tau": float("nan")},
        {"similarity": "last"},
        {"capacity": 0.0},
        {"capacity": 1.5},
        {"full_steps": 0},
        {"whole_every": 0},
        {"refresh_every": -1},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*; expected"):
        DyLLMOptions(**wrong)  # type: ignore[arg-type]


def test_a_request_without_kv_for_its_chunks_is_refused(tiny_model: LoadedModel) -> None:
    request = replace(request_for(tiny_model, (9,)), chunk_kv=())
    with pytest.raises(ValueError, match="KV of 0 chunks for 1 places"):
        DyLLMDecoder(tiny_model).steps([request])
