"""D2F: pipelined blocks over kept KV equal one forward over everything under the same mask, at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pdllm_store import ChunkKV
from tiny import save_tiny_model

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding import CommitRule, DecodeRequest, DecodeStep, Sampling, StaticKVDecoder, pipelined
from pdllm_rag.decoding.d2f import D2FDecoder, caution
from pdllm_rag.decoding.denoise import denoise
from pdllm_rag.decoding.growing import GrowingKV, Tail
from pdllm_rag.decoding.pipeline import D2FOptions
from pdllm_rag.decoding.pipelined import PipelinedCanvas
from pdllm_rag.decoding.predictions import LogitRows, Predictions
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.errors import NumericsError
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.placement import MODES, plan_offsets

NO_TOKEN = -1  # an end-of-answer id that no model produces
SHAPES = [((12, 30, 7), 5, 24), ((), 17, 7), ((9,), 11, 33)]  # chunk lengths, question tokens, answer tokens


def with_spec(model: LoadedModel, **changes: Any) -> LoadedModel:
    return replace(model, spec=replace(model.spec, **changes))


@pytest.fixture(params=[True, False], ids=["shifted", "unshifted"])
def model(tiny_model: LoadedModel, request: pytest.FixtureRequest) -> LoadedModel:
    return with_spec(tiny_model, logit_shift=request.param, eos_ids=(NO_TOKEN,))


def block_causal(model: LoadedModel, block: int, block_len: int) -> LoadedModel:
    family = replace(model.spec.family, prefill_mask=f"block-causal-{block}", block_len=block_len)
    return with_spec(model, family=family)


def random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(4, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def request_for(
    model: LoadedModel, lens: Sequence[int], prompt_len: int = 9, max_new_tokens: int = 20, **rest: Any
) -> DecodeRequest:
    ids = [[model.spec.bos_id, *random_ids(n - 1, i)] for i, n in enumerate(lens)]
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    kv: list[ChunkKV] = [next(iter(encoder.batches([np.array(one, np.int32)])))[0][1] for one in ids]
    block = causal_block(model.spec.family) or 1
    plan = plan_offsets(lens, MODES[len(lens) % 3], chunk_len=max(lens, default=1), multiple=block)
    prompt = random_ids(prompt_len, 100 + prompt_len)
    return DecodeRequest(prompt, plan, max_new_tokens, chunk_ids=ids, chunk_kv=kv, **rest)


def requests_for(model: LoadedModel) -> list[DecodeRequest]:
    return [request_for(model, *shape) for shape in SHAPES]


def library_logits(model: LoadedModel, request: DecodeRequest, ids: Sequence[int], block_len: int) -> torch.Tensor:
    """Logits of every canvas row by transformers' own forward over [chunks | question | answer so far].

    A chunk sees itself, the question chunks and question, an answer row also the blocks up to its own.
    """
    lens = [len(chunk) for chunk in request.chunk_ids]
    start, n_question = request.placement.canvas_start, len(request.prompt_ids)
    positions = [o + i for o, n in zip(request.placement.offsets, lens, strict=True) for i in range(n)]
    positions += range(start, start + len(ids))
    owner = np.repeat([*range(-len(lens), 1)], [*lens, len(ids)])
    owner[sum(lens) + n_question :] = 1 + np.arange(len(ids) - n_question) // block_len
    mask = np.where(owner[:, None] < 0, owner[:, None] == owner, owner[:, None] >= owner)
    tokens = torch.tensor([[*(t for chunk in request.chunk_ids for t in chunk), *ids]])
    with torch.inference_mode():
        whole = model.backbone.model(
            tokens,
            attention_mask=torch.from_numpy(mask)[None, None],
            position_ids=torch.tensor([positions]),
            use_cache=False,
        ).logits[0]
    whole = whole.clone()
    whole[:, model.spec.mask_id] = -torch.inf
    whole[:, model.spec.n_tokens :] = -torch.inf
    return whole[sum(lens) :]


def plain_d2f(
    model: LoadedModel, request: DecodeRequest, options: D2FOptions, threshold: float
) -> list[list[tuple[int, int, float]]]:
    """The published loop, one forward over everything in each pass: (row, token, confidence) of each step."""
    block_len, n_question = options.block_len or 0, len(request.prompt_ids)
    n_blocks = -(-request.max_new_tokens // block_len)
    ids = list(request.prompt_ids)
    holes: list[set[int]] = []  # of each answer block
    full: list[bool] = []
    done: list[bool] = []
    steps: list[list[tuple[int, int, float]]] = []
    while True:
        shares = [1.0, *((block_len - len(one)) / block_len for one in holes)]
        n_open = len(holes) - sum(done)
        if len(holes) < n_blocks and shares[-1] >= options.add_threshold and n_open < (options.window or 99):
            first = len(ids) - n_question
            ids += [model.spec.mask_id] * block_len
            holes.append(set(range(first, first + block_len)))
            full.append(False)
            done.append(False)
            shares.append(0.0)
        full = [was or shares[i] >= options.activate_threshold for i, was in enumerate(full)]
        logits = library_logits(model, request, ids, block_len)
        committed = []
        for one, active in zip(holes, full, strict=True):
            rows = sorted(one)
            if not rows:
                continue
            p = torch.softmax(logits[[n_question + row - int(model.spec.logit_shift) for row in rows]], dim=-1)
            best, tokens = (x.tolist() for x in p.max(dim=-1))
            chosen = [i for i, value in enumerate(best) if value > threshold]
            if not chosen and active:
                chosen = [best.index(max(best))]
            committed += [(rows[i], tokens[i], best[i]) for i in chosen]
        for row, token, _ in committed:
            ids[n_question + row] = token
            holes[row // block_len].discard(row)
        done = [not any(holes[: i + 1]) for i in range(len(holes))]
        steps.append(committed)
        if len(holes) == n_blocks and min((min(one) for one in holes if one), default=10**6) >= request.max_new_tokens:
            return steps


def tokens_of(steps: Sequence[DecodeStep], sequence: int = 0) -> dict[int, int]:
    return {r: t for s in steps if s.sequence == sequence for r, t in zip(s.rows, s.tokens, strict=True)}


def events(steps: Sequence[DecodeStep], sequence: int = 0) -> list[tuple[object, ...]]:
    return [(s.rows, s.tokens, s.nfe, s.finished) for s in steps if s.sequence == sequence]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", D2FOptions(8)),
        ("flash", D2FOptions(8)),
        ("flash", D2FOptions(4, 0.0, 0.5, window=3)),
        ("triton", D2FOptions(4, 0.0, 0.0)),
    ],
    ids=str,
)
def test_logits_are_the_librarys_at_every_state_of_a_batch(
    model: LoadedModel, backend: str, options: D2FOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted = backend == "triton"  # and slow
    if interpreted:
        pytest.importorskip("triton")
    monkeypatch.setattr(pipelined, "denoise", lambda *given: (given[1], given[4]))
    requests = requests_for(model)[interpreted:]
    forward, canvases = D2FDecoder(model, options=options, backend=backend).steps(requests)  # type: ignore[misc]
    active, state, n_open = [*range(len(requests))], 0, 0
    while active and state < (2 if interpreted else 100):
        found = forward(active, [canvases[i] for i in active])
        n_open = max(n_open, *(sum(phase.is_open for phase in canvases[i].phases) for i in active))
        for index, ours in zip([*active], found, strict=True):
            canvas, request = canvases[index], requests[index]
            rows = canvas.open_rows()
            theirs = library_logits(model, request, canvas.ids.tolist(), options.block_len or 0)
            theirs = theirs[canvas.prompt_len + rows - int(model.spec.logit_shift)]
            largest = float(theirs[theirs.isfinite()].abs().max())  # about 10; float32 rounds there
            torch.testing.assert_close(ours.logits, theirs, rtol=0, atol=2e-5 * largest)
            generator = torch.Generator().manual_seed(100 * state + index)
            chosen = rows[torch.rand(len(rows), generator=generator) < 0.5]
            canvas.commit(chosen, torch.tensor(random_ids(len(chosen), state)))
            if canvas.advance() is not None:
                active.remove(index)
        state += 1
    assert n_open > 1


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.999])
@pytest.mark.parametrize(
    "options",
    [D2FOptions(8), D2FOptions(8, 0.7, 0.95), D2FOptions(4, 0.0, 0.5), D2FOptions(4, 0.5, 0.0, window=2)],
    ids=str,
)
def test_decodes_what_the_published_loop_decodes_alone_and_in_a_batch(
    model: LoadedModel, options: D2FOptions, threshold: float
) -> None:
    requests = requests_for(model)
    decoder = D2FDecoder(model, CommitRule(threshold), options)
    together = list(decoder.steps(requests))
    for index, request in enumerate(requests):
        assert events(list(decoder.steps([request]))) == events(together, index)
        plain = plain_d2f(model, request, options, threshold)
        ours = [step for step in together if step.sequence == index]
        assert [(s.rows, s.tokens) for s in ours] == [
            (tuple(row for row, _, _ in step), tuple(token for _, token, _ in step)) for step in plain[: len(ours)]
        ]
        for step, other in zip(ours, plain, strict=False):
            assert step.confidence == pytest.approx([p for _, _, p in other], abs=1e-4)
        assert ours[-1].finished == "length"
        assert set(range(request.max_new_tokens)) <= set(tokens_of(together, index))


def tails_of(monkeypatch: pytest.MonkeyPatch) -> list[list[Tail]]:
    """The tails of every pass from now on."""
    seen: list[list[Tail]] = []
    plain = GrowingKV.run

    def spy(self: GrowingKV, active: Sequence[int], tails: Sequence[Tail]) -> list[Predictions]:
        seen.append([*tails])
        return plain(self, active, tails)

    monkeypatch.setattr(GrowingKV, "run", spy)
    return seen


def test_rows_of_the_question_and_of_finished_blocks_run_once(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tails_of(monkeypatch)
    list(D2FDecoder(model, CommitRule(0.3), D2FOptions(8)).steps([request_for(model, (9,), 20, 64)]))
    tails = [tail for (tail,) in seen]
    assert tails[0].start == 0
    assert tails[1].start == 20
    for before, tail in pairwise(tails):
        assert tail.start == before.start + before.n_final
        assert len(tail.ids) <= tail.n_final + 8 * len(set(tail.blocks))
        final = tail.ids[: tail.n_final]
        assert model.spec.mask_id not in final.tolist()
    assert sum(len(tail.ids) for tail in tails) < len(tails) * (20 + 32)  # of what whole passes would have run


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("prompt_len", [3, 8, 13])
@pytest.mark.parametrize("steps", [None, 3])
def test_one_block_at_a_time_equals_static_kv_under_the_models_own_block_mask(
    tiny_model: LoadedModel, shift: bool, prompt_len: int, steps: int | None
) -> None:
    """Then both run the same mask: question rows see no answer row behind their own block."""
    model = with_spec(block_causal(tiny_model, 4, 8), logit_shift=shift, eos_ids=(NO_TOKEN,))
    request, rule = request_for(model, (12, 30, 7), prompt_len, 29), CommitRule(0.3, steps)
    ours = list(D2FDecoder(model, rule, D2FOptions(window=1)).steps([request]))
    assert events(ours) == events(list(StaticKVDecoder(model, rule).steps([request])))
    single = replace(request, max_new_tokens=8 - prompt_len % 4)  # an answer of one block, whatever the window
    assert events(list(D2FDecoder(model, rule).steps([single]))) == events(
        list(StaticKVDecoder(model, rule).steps([single]))
    )


def test_one_block_of_a_bidirectional_model_equals_static_kv_where_question_rows_do_not_matter(
    tiny_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In one layer, without logit shift, no answer row depends on what a question row has seen; else they differ."""
    path = save_tiny_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1, logit_shift=False)
    shallow, deep = load_model(str(path), dtype=torch.float32), with_spec(tiny_model, logit_shift=False)
    for model in (shallow, deep):
        model = with_spec(model, eos_ids=(NO_TOKEN,))
        request, rule = request_for(model, (12, 30, 7), 9, 32), CommitRule(0.3)
        ours = events(list(D2FDecoder(model, rule).steps([request])))
        assert (ours == events(list(StaticKVDecoder(model, rule).steps([request])))) == (model.spec.n_layers == 1)


@pytest.mark.parametrize("block_len", [8, 32])
@pytest.mark.parametrize("lens", [(7,), (1, 33, 100)])
def test_equal_logits_end_with_no_mask(
    model: LoadedModel, block_len: int, lens: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.backbone, "raw_logits", lambda hidden: torch.zeros(len(hidden), 264))
    requests = [request_for(model, (5,) * (n % 2), 6, n) for n in lens]
    steps = list(D2FDecoder(model, CommitRule(0.999), D2FOptions(block_len)).steps(requests))
    for index, n in enumerate(lens):
        filled = tokens_of(steps, index)
        assert set(range(n)) <= set(filled)
        assert model.spec.mask_id not in filled.values()
        own = [step for step in steps if step.sequence == index]
        assert all(1 <= len(step.rows) <= 2 for step in own)  # two while the last row of an almost full block is open
        assert [step.nfe for step in own] == list(range(1, len(own) + 1))


@pytest.mark.parametrize(("max_new_tokens", "threshold"), [(1, 0.999), (7, 0.3), (33, 0.999), (100, 0.3)])
def test_every_length_ends_with_no_mask_in_the_answer(
    tiny_model: LoadedModel, max_new_tokens: int, threshold: float
) -> None:
    request = request_for(tiny_model, (11, 6), 9, max_new_tokens)
    steps = list(D2FDecoder(tiny_model, CommitRule(threshold), D2FOptions(8)).steps([request]))
    filled = tokens_of(steps)
    end = min((row for row, token in filled.items() if token in tiny_model.spec.eos_ids), default=max_new_tokens)
    assert steps[-1].finished == ("length" if end >= max_new_tokens else "stop")
    assert set(range(min(end + 1, max_new_tokens))) <= set(filled)
    assert tiny_model.spec.mask_id not in filled.values()
    longer = replace(request, max_new_tokens=max_new_tokens + 8)  # later blocks change nothing in earlier ones
    again = tokens_of(list(D2FDecoder(tiny_model, CommitRule(threshold), D2FOptions(8)).steps([longer])))
    assert [again[row] for row in range(min(end, max_new_tokens))] == [
        filled[row] for row in range(min(end, max_new_tokens))
    ]


def scripted(
    model: LoadedModel, table: torch.Tensor, max_new_tokens: int, options: D2FOptions, threshold: float = 0.9
) -> tuple[list[DecodeStep], list[tuple[Any, ...]]]:
    """Decode from a fixed logits row [V] per answer row; also the phases in each pass."""
    request = DecodeRequest([5, 6], plan_offsets([], "sequential", chunk_len=1), max_new_tokens)
    canvas = PipelinedCanvas(request.prompt_ids, max_new_tokens, model.spec, options)
    rule, phases = CommitRule(threshold), []

    def forward(*_: object) -> list[LogitRows]:
        phases.append(canvas.phases)
        canvas.tail()
        return [LogitRows(table[canvas.open_rows()])]

    def choose(_: int, rows: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        return canvas.choose(rows, confidence, rule)

    return list(denoise([request], forward, model.spec, rule, [canvas], choose)), phases


def unsure(n_rows: int, sure: dict[int, int]) -> torch.Tensor:
    """Logits that are even but for some rows, which are sure of a token; earlier rows a little surer than later."""
    table = torch.zeros(n_rows, 264)
    table[:, 70] = 2 - torch.arange(n_rows) / n_rows
    for row, token in sure.items():
        table[row, token] = 30.0
    return table


def test_an_end_of_answer_in_a_later_block_stops_growth_and_drops_what_follows(tiny_model: LoadedModel) -> None:
    model = with_spec(tiny_model, eos_ids=(2,))
    sure = {0: 80, 4: 81, 5: 2, 8: 82}  # of blocks of 4: one row each, and the end at row 5
    steps, phases = scripted(model, unsure(64, sure), 64, D2FOptions(4, add_threshold=0.25))
    assert [step.rows for step in steps] == [(0,), (1, 4, 5, 6, 7), (2,), (3,)]
    assert steps[1].tokens == (70, 81, 2, 2, 2)
    assert [len(one) for one in phases] == [2, 3, 3, 3]
    assert steps[-1].finished == "stop"


def test_an_end_of_answer_drops_blocks_that_are_open_already(tiny_model: LoadedModel) -> None:
    model = with_spec(tiny_model, eos_ids=(2,))
    table = unsure(64, {0: 80, 4: 81})
    table[5, 2] = 2.5  # its block's most confident one, once row 4 is final
    steps, phases = scripted(model, table, 64, D2FOptions(4, add_threshold=0.25, activate_threshold=0.0))
    assert [step.rows for step in steps] == [(0,), (1, 4), (2, *range(5, 12)), (3,)]
    assert steps[2].tokens == (70, *[2] * 7)
    assert [len(one) for one in phases] == [2, 3, 4, 3]
    assert steps[-1].finished == "stop"


def test_semi_activated_blocks_commit_nothing_below_the_threshold(tiny_model: LoadedModel) -> None:
    model = with_spec(tiny_model, eos_ids=(NO_TOKEN,))
    options = D2FOptions(8, add_threshold=0.0, activate_threshold=1.0)
    steps, phases = scripted(model, unsure(24, {13: 90}), 24, options)
    assert [step.rows for step in steps[:4]] == [(0,), (1, 13), (2,), (3,)]
    assert len(phases[2]) == 4  # a third one was open meanwhile
    assert all(row < 8 for step in steps[:8] for row in step.rows if row != 13)
    assert [row for step in steps[8:] for row in step.rows] == [row for row in range(8, 24) if row != 13]
    eager, _ = scripted(model, unsure(24, {}), 24, replace(options, activate_threshold=0.0))
    assert max(len(step.rows) for step in eager) == 3  # fully activated: one row of each open block


@pytest.mark.parametrize("window", [1, 2, 3])
def test_no_more_blocks_are_open_than_the_window_allows(tiny_model: LoadedModel, window: int) -> None:
    model = with_spec(tiny_model, eos_ids=(NO_TOKEN,))
    _, phases = scripted(model, unsure(64, {}), 64, D2FOptions(8, add_threshold=0.0, window=window))
    assert max(sum(phase.is_open for phase in one) for one in phases) == window
    assert len(phases[-1]) == 9


def test_a_step_budget_counts_from_a_blocks_activation(tiny_model: LoadedModel) -> None:
    model = with_spec(tiny_model, eos_ids=(NO_TOKEN,))
    for budget in (1, 3, 8):
        request = request_for(model, (9,), 9, 32)
        steps = list(D2FDecoder(model, CommitRule(1.0, budget), D2FOptions(8)).steps([request]))
        assert len(steps) <= 4 * budget
    with pytest.raises(ValueError, match="steps"):
        CommitRule(steps=0)


def test_a_cancelled_sequence_leaves_and_the_others_go_on(model: LoadedModel) -> None:
    requests = requests_for(model)
    alone = events(list(D2FDecoder(model, CommitRule(0.9), D2FOptions(8)).steps([requests[2]])))
    seen = []
    for step in D2FDecoder(model, CommitRule(0.9), D2FOptions(8)).steps(requests):
        seen.append(step)
        requests[0].cancel.set()
    assert [s.finished for s in seen if s.sequence == 0] == [None, "cancelled"]
    assert events(seen, 2) == alone


def test_sampling_repeats_by_seed_whatever_the_batch(model: LoadedModel) -> None:
    requests = [request_for(model, (9,), 9, 16, sampling=Sampling(1.0, seed)) for seed in (1, 2, 1)]
    steps = list(D2FDecoder(model, options=D2FOptions(8)).steps(requests))
    first, other, again = (tokens_of(steps, i) for i in range(3))
    assert first == again
    assert first != other


def test_logits_that_are_not_finite_raise(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.backbone, "raw_logits", lambda hidden: torch.full((len(hidden), 264), torch.nan))
    with pytest.raises(NumericsError, match="finite"):
        next(iter(D2FDecoder(model).steps([request_for(model, (5,))])))


def test_an_adapter_acts_on_canvas_rows_and_not_on_chunks(
    tiny_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = load_model(str(save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)), dtype=torch.float32)
    adapted = replace(tiny_model, canvas_backbone=other.backbone)
    request = request_for(adapted, (12, 7))
    torch.testing.assert_close(request.chunk_kv[0].k, request_for(tiny_model, (12, 7)).chunk_kv[0].k)
    ours = tokens_of(list(D2FDecoder(adapted).steps([request])))
    assert ours == tokens_of(list(D2FDecoder(other).steps([request])))
    assert ours != tokens_of(list(D2FDecoder(tiny_model).steps([request])))
    assert adapted.fingerprint("float32").digest == tiny_model.fingerprint("float32").digest


def test_models_that_were_not_trained_for_it_are_told_of(tiny_model: LoadedModel) -> None:
    causal = block_causal(tiny_model, 4, 8)
    assert "no D2F adapter is loaded" in (caution(tiny_model, D2FOptions()) or "")
    assert caution(replace(tiny_model, canvas_backbone=tiny_model.backbone), D2FOptions()) is None
    assert "set window to 1" in (caution(causal, D2FOptions()) or "")
    assert caution(causal, D2FOptions(window=1)) is None
    with pytest.raises(ValueError, match="block_len is 6; expected a multiple of 4"):
        D2FDecoder(causal, options=D2FOptions(6))
    request = request_for(tiny_model, (5, 6))
    with pytest.raises(ValueError, match="KV of 1 chunks for 2 places"):
        D2FDecoder(tiny_model).steps([replace(request, chunk_kv=request.chunk_kv[:1])])
