"""What every decoder owes: an end without masks, rows that do not depend on the batch, honest counts, typed errors.

To put a decoder under it, add a line to `CASES`.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Pdllm, one_object
from decoding_cases import NO_TOKEN, ending, request_for, tokens_of, told, with_blocks
from pdllm_store import MemoryStore
from tiny import save_tiny_model

from pdllm_rag import AskOptions, Final, InputDocument, LoadedModel, RagEngine, TextDelta, load_model
from pdllm_rag.decoding import CommitRule, Decoder, DecodeRequest, Sampling
from pdllm_rag.decoding.kinds import KINDS, make_decoder
from pdllm_rag.errors import GenerationCancelled, NumericsError
from pdllm_rag.events import CanvasUpdate
from pdllm_rag.placement import plan_offsets

Case = tuple[str, Mapping[str, Any]]

CASES: list[Case] = [
    ("static_kv", {}),
    ("static_kv", {"order": "entropy"}),
    ("vanilla", {}),
    ("vanilla", {"order": "random"}),
    ("vanilla", {"order": "margin", "canvas": "whole"}),
    ("fast_dllm", {"cache": "prefix"}),
    ("fast_dllm", {"cache": "dual"}),
    ("fast_dllm", {"factor": 1.0, "context": "dense"}),
    ("dyllm", {}),
    ("dyllm", {"tau": 0.5, "similarity": "refresh", "refresh_every": 3}),
    ("d2f", {}),
    ("d2f", {"block_len": 4, "window": 2}),
    ("block_causal", {}),
    ("block_causal", {"sub_block": 4}),
]
UNSURE = CommitRule(threshold=0.999)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0], *map(str, case[1].values())]))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model that ends no answer by itself."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    path = save_tiny_model(tmp_path_factory.mktemp("m"), intermediate_size=32, **shape)
    return ending(load_model(str(path), dtype=torch.float32), NO_TOKEN)


def with_head(model: LoadedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> LoadedModel:
    """The same model, its head's logits changed."""
    backbone = copy.copy(model.backbone)
    backbone.model = copy.deepcopy(backbone.model)
    backbone.model.lm_head.register_forward_hook(lambda _module, _given, logits: change(logits))
    return replace(model, backbone=backbone)


def fitting(model: LoadedModel, case: Case) -> LoadedModel:
    """The same model, block-causal where that is what the decoder is for."""
    mask = "block-causal-8" if case[0] == "block_causal" else model.spec.family.prefill_mask
    return replace(model, spec=replace(model.spec, family=replace(model.spec.family, prefill_mask=mask)))


def made(case: Case, model: LoadedModel, rule: CommitRule = UNSURE) -> Decoder:
    name, options = case
    return make_decoder(name, model, rule, options)


def test_every_kind_of_decoder_is_under_the_contract() -> None:
    assert {name for name, _ in CASES} == set(KINDS)


@every_case
@pytest.mark.parametrize(("block_len", "threshold"), [(8, 0.999), (32, 0.05)])
def test_every_length_ends_without_masks_and_a_batch_changes_no_row(
    endless: LoadedModel, case: Case, block_len: int, threshold: float
) -> None:
    model = fitting(with_blocks(endless, block_len), case)
    decoder = made(case, model, CommitRule(threshold))
    sizes = [(1, 1), (5, 7), (17, 33), (40, 100)]
    requests = [request_for(model, prompt=n, max_new_tokens=m, seed=i) for i, (n, m) in enumerate(sizes)]
    alone = [told(list(decoder.steps([request]))) for request in requests]
    for request, events in zip(requests, alone, strict=True):
        rows = [row for step in events for row in step[0]]  # type: ignore[attr-defined]
        assert len(rows) == len(set(rows))
        assert set(range(request.max_new_tokens)) <= set(rows)
        assert events[-1][-1] == "length"
        assert [nfe for _, _, nfe, _ in events] == list(range(1, len(events) + 1))
    together, shuffled = list(decoder.steps(requests[1:])), list(decoder.steps(requests[:0:-1]))
    for index in range(3):
        assert told(together, index) == told(shuffled, 2 - index) == alone[index + 1]


@every_case
@pytest.mark.parametrize("max_new_tokens", [1, 7, 33])
def test_equal_logits_end(endless: LoadedModel, case: Case, max_new_tokens: int) -> None:
    model = fitting(with_blocks(with_head(endless, torch.zeros_like), 8), case)
    tokens = tokens_of(list(made(case, model).steps([request_for(model, max_new_tokens=max_new_tokens)])))
    assert set(range(max_new_tokens)) <= set(tokens)


@every_case
def test_a_mask_is_never_an_answer_and_one_in_the_prompt_stays(endless: LoadedModel, case: Case) -> None:
    mask = endless.spec.mask_id

    def want_masks(logits: torch.Tensor) -> torch.Tensor:
        logits[..., mask] = 1e4
        return logits

    model = fitting(with_blocks(with_head(endless, want_masks), 8), case)
    request = replace(request_for(model, max_new_tokens=9), prompt_ids=[mask, 5, mask])
    tokens = tokens_of(list(made(case, model).steps([request])))
    assert set(range(9)) <= set(tokens)
    assert mask not in tokens.values()


@every_case
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_of_their_own(endless: LoadedModel, case: Case, bad: float) -> None:
    """Also where they come up later than in the first step."""
    calls = []

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        return torch.full_like(logits, bad) if len(calls) > 2 else logits

    model = fitting(with_blocks(with_head(endless, spoil), 8), case)
    with pytest.raises(NumericsError, match="finite"):
        list(made(case, model, CommitRule(threshold=1.0)).steps([request_for(model)]))


@every_case
def test_the_first_end_in_reading_order_ends_an_answer_and_fills_what_is_masked_after_it(
    endless: LoadedModel, case: Case
) -> None:
    model = fitting(with_blocks(endless, 8), case)
    request = request_for(model, max_new_tokens=40)
    free = tokens_of(list(made(case, model).steps([request])))
    eos = free[11]
    steps = list(made(case, ending(model, eos)).steps([request]))
    tokens = tokens_of(steps)
    end = min(row for row, token in tokens.items() if token == eos)
    assert steps[-1].finished == "stop"
    assert set(range(end)) <= set(tokens)
    assert all(tokens[row] == eos for row in steps[-1].rows if row >= end)
    assert steps[-1].nfe == len(steps) <= 40


@every_case
def test_a_cancelled_sequence_leaves_before_its_next_step_and_the_others_go_on(
    endless: LoadedModel, case: Case
) -> None:
    model = fitting(with_blocks(endless, 8), case)
    requests = [request_for(model, seed=i) for i in range(2)]
    expected = told(list(made(case, model).steps([requests[1]])))
    seen = []
    for step in made(case, model).steps(requests):
        seen.append(step)
        requests[0].cancel.set()
    assert [step.finished for step in seen if step.sequence == 0] == [None, "cancelled"]
    assert [step.nfe for step in seen if step.sequence == 0] == [1, 1]
    assert told(seen, 1) == expected


@every_case
def test_a_seed_repeats_a_run_and_another_one_does_not(endless: LoadedModel, case: Case) -> None:
    model = fitting(with_blocks(endless, 8), case)
    warm = [Sampling(temperature=1.5, seed=seed, top_p=0.95) for seed in (1, 2, 1)]
    requests = [request_for(model, max_new_tokens=24, sampling=sampling) for sampling in warm]
    steps = list(made(case, model).steps(requests))
    assert told(steps, 0) == told(steps, 2) != told(steps, 1)


@every_case
def test_a_step_tells_confidences_and_the_first_one_the_probe(endless: LoadedModel, case: Case) -> None:
    model = fitting(with_blocks(endless, 8), case)
    steps = list(made(case, model).steps([request_for(model, probe_ids=(9, 8))]))
    assert all(len(s.rows) == len(s.tokens) == len(s.confidence) and list(s.rows) == sorted(s.rows) for s in steps)
    assert all(0 < value <= 1 for step in steps for value in step.confidence)
    assert [step.probe is not None for step in steps] == [True] + [False] * (len(steps) - 1)


@every_case
def test_no_requests_and_requests_without_chunks(endless: LoadedModel, case: Case) -> None:
    model = fitting(with_blocks(endless, 8), case)
    assert list(made(case, model).steps([])) == []
    request = DecodeRequest([5, 6, 7], plan_offsets([], "sequential", chunk_len=1), 12)
    assert set(range(12)) <= set(tokens_of(list(made(case, model).steps([request]))))


@every_case
def test_a_stream_is_the_answer_and_stops_when_it_is_told_to(tiny_model: LoadedModel, case: Case) -> None:
    name, given = case
    options = AskOptions(decoder=name, decoder_options=given, abstain=False, max_new_tokens=40, threshold=0.5)
    with RagEngine.open(MemoryStore(), fitting(tiny_model, case), options=options) as engine:
        engine.prefill([InputDocument("a", "a.md", "Annual leave is 28 days. It is agreed with the team lead.")])
        events = list(engine.stream("How many days?"))
        assert isinstance(events[-1], Final)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == events[-1].answer.text
        assert events[-1].answer.stats.decoder == name
        cancel = threading.Event()
        stream = engine.stream("How many days?", options=options, cancel=cancel)
        assert isinstance(next(stream), CanvasUpdate)
        cancel.set()
        with pytest.raises(GenerationCancelled, match="after 1 denoising steps"):
            list(stream)


@pytest.mark.parametrize("name", sorted({*KINDS} - {"block_causal"}))  # which refuses this checkpoint
def test_a_trace_holds_the_trajectory(
    pdllm: Pdllm, filled: Path, tiny_model_path: Path, tmp_path: Path, name: str
) -> None:
    trace = tmp_path / "steps.jsonl"
    argv = ["ask", "How heavy?", "--store", filled, "--model", tiny_model_path, "--decoder", name, "--trace", trace]
    answer = one_object(pdllm(*argv, "--no-abstain", "--json"))
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [step["nfe"] for step in steps] == list(range(1, answer["stats"]["nfe"] + 1))
    assert all(len(step["rows"]) == len(step["tokens"]) == len(step["confidence"]) for step in steps)
    assert steps[-1]["finished"] in ("stop", "length")
