"""What users of diffusion language models have reported elsewhere, tried here on every way to decode.

Each test names the public report that it stands for. The ways are the decoders' layer loops: `eager` and `captured`
(the fused one, here in Triton's interpreter) over stored KV, and `vanilla` over a dense prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Pdllm
from pdllm_store import MemoryStore
from tiny import SPECIALS, save_tiny_model

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine, load_model
from pdllm_rag.decoding import Canvas, CommitRule, DecodeRequest, DecodeStep, StaticKVDecoder, VanillaDecoder, graphed
from pdllm_rag.decoding.graphed import GraphedStep, Shape, checked_out
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.placement import plan_offsets

HAS_CUDA = torch.cuda.is_available()
CAPTURED = pytest.param(
    "captured", marks=pytest.mark.skipif(HAS_CUDA, reason="kernels are interpreted where there is no GPU")
)
WAYS = pytest.mark.parametrize("way", ["eager", CAPTURED, "vanilla"])
AT_ONCE, ONE_BY_ONE = CommitRule(threshold=0.0), CommitRule(threshold=1.0)
BLOCKS = {"eager": 4, "captured": 2, "vanilla": 4}  # a row costs much in the interpreter
NO_TOKEN = -1  # an end-of-answer id that no model produces
EOS, MASK = 2, 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model that ends no answer by itself."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
    }
    path = save_tiny_model(tmp_path_factory.mktemp("m"), intermediate_size=32, **sizes)
    return ending(load_model(str(path), dtype=torch.float32), NO_TOKEN)


@pytest.fixture(scope="module")
def quick(plain: LoadedModel) -> LoadedModel:
    """The same weights fused."""
    one = plain.backbone
    model = copy.deepcopy(one.model)
    backbone = FusedBackbone(model, one.rope, mask_id=one.mask_id, forbidden_from=one.forbidden_from)
    return replace(plain, backbone=backbone)


@pytest.fixture(autouse=True)
def _small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "ROWS_APART", 4)
    monkeypatch.setattr(graphed, "CONTEXT_APART", 32)


@pytest.fixture
def models(plain: LoadedModel, quick: LoadedModel) -> dict[str, LoadedModel]:
    """By way, in blocks of a few tokens."""
    own = {"eager": plain, "captured": quick, "vanilla": plain}
    return {way: with_blocks(model, BLOCKS[way]) for way, model in own.items()}


def with_blocks(model: LoadedModel, block_len: int) -> LoadedModel:
    return replace(model, spec=replace(model.spec, family=replace(model.spec.family, block_len=block_len)))


def ending(model: LoadedModel, *eos_ids: int) -> LoadedModel:
    return replace(model, spec=replace(model.spec, eos_ids=eos_ids))


def request_for(
    model: LoadedModel, lens: Sequence[int], prompt: int | Sequence[int], max_new_tokens: int, seed: int = 0
) -> DecodeRequest:
    generator = torch.Generator().manual_seed(seed)

    def random_ids(count: int) -> list[int]:
        return torch.randint(4, 250, (count,), generator=generator).tolist()

    chunks = [np.array([model.spec.bos_id, *random_ids(n - 1)], np.int32) for n in lens]
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    return DecodeRequest(
        random_ids(prompt) if isinstance(prompt, int) else prompt,
        plan_offsets(lens, "sequential", chunk_len=max([1, *lens])),
        max_new_tokens,
        chunk_ids=[chunk.tolist() for chunk in chunks],
        chunk_kv=[next(iter(encoder.batches([chunk])))[0][1] for chunk in chunks],
    )


def decoded(way: str, model: LoadedModel, requests: Sequence[DecodeRequest], rule: CommitRule) -> list[DecodeStep]:
    if way == "vanilla":
        return list(VanillaDecoder(model, rule).steps(requests))
    decoder = StaticKVDecoder(model, rule, backend="triton" if way == "captured" else "reference")
    assert decoder.is_graphed == (way == "captured")
    return list(decoder.steps(requests))


def told(steps: Sequence[DecodeStep], sequence: int = 0) -> list[tuple[object, ...]]:
    return [(step.rows, step.tokens, step.nfe, step.finished) for step in steps if step.sequence == sequence]


def answer_of(steps: Sequence[DecodeStep], sequence: int = 0) -> list[int]:
    """Tokens of the rows that were filled, up to the first one that was not."""
    filled: dict[int, int] = {}
    for step in steps:
        if step.sequence == sequence:
            assert not filled.keys() & set(step.rows)
            filled.update(zip(step.rows, step.tokens, strict=True))
    n_rows = next(row for row in range(len(filled) + 1) if row not in filled)
    return [filled[row] for row in range(n_rows)]


# -- 1 and 2: padding, batches -------------------------------------------------------------------------------------


@WAYS
def test_a_row_is_the_same_alone_in_a_batch_and_beside_others_that_leave(
    models: dict[str, LoadedModel], way: str
) -> None:
    """Reports 1 (ML-GSAI/LLaDA#89) and 2 (NVlabs/Fast-dLLM#7): ragged prompts, several blocks, one cancelled."""
    model, rule = models[way], AT_ONCE if way == "captured" else CommitRule(threshold=0.3, steps=2)
    sizes = [((5,), 1, 3), ((), 2, 1), ((3, 1), 4, 4)]
    if way != "captured":  # the report's own
        sizes += [((5,), 5, 24), ((17,), 17, 24), ((40,), 40, 24)]
    requests = [request_for(model, *size, seed=seed) for seed, size in enumerate(sizes)]
    alone = [told(decoded(way, model, [request], rule)) for request in requests]
    together = decoded(way, model, requests, rule)
    assert [told(together, index) for index in range(len(requests))] == alone
    requests[0].cancel.set()
    left = decoded(way, model, requests[::-1], rule)
    assert [told(left, index) for index in range(len(requests) - 1)] == alone[:0:-1]


@pytest.mark.skipif(HAS_CUDA, reason="kernels are interpreted where there is no GPU")
def test_nothing_that_lies_in_the_unused_rows_of_a_captured_step_is_read(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 1: a shape with room to spare is full of other tokens and of keys that are not numbers."""
    monkeypatch.setattr(graphed, "ROWS_APART", 8)
    model, block = models["captured"], BLOCKS["captured"]
    requests = [request_for(model, (30, 4), 5, 3), request_for(model, (), 1, 1, seed=1)]
    backbone = model.backbone
    assert isinstance(backbone, FusedBackbone)
    backbone.captures.clear()
    shape = Shape.fitting(2, 5 + 2 * block, 34, block)
    assert shape.canvas_rows > 5 + 2 * block
    assert shape.context_rows > 34
    with torch.inference_mode(), checked_out(backbone, model.spec.logit_shift, shape, GraphedStep) as step:
        for buffer in step.buffers:
            buffer.fill_(torch.nan)
        step._ids_host.random_(4, 250)
    ours = decoded("captured", model, requests, AT_ONCE)
    theirs = decoded("eager", with_blocks(models["eager"], block), requests, AT_ONCE)
    with checked_out(backbone, model.spec.logit_shift, shape, GraphedStep) as again:
        assert again is step
        assert torch.isnan(step.buffers[0]).any()
    for index in range(2):
        assert told(ours, index) == told(theirs, index)


# -- 3: step budgets -----------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_a_step_budget_is_one_blocks_and_leaves_no_row_unfilled(
    models: dict[str, LoadedModel], way: str, steps: int
) -> None:
    """Report 3 (NVlabs/Fast-dLLM#66): fewer steps than blocks, more than rows, and sequences of other ages."""
    model, block = models[way], BLOCKS[way]
    n_new = 2 * block if way == "captured" else 64
    requests = [request_for(model, (3,), 4, n_new), request_for(model, (), 3, n_new - 1, seed=1)]
    found = decoded(way, model, requests, CommitRule(threshold=1.0, steps=steps))
    for index, request in enumerate(requests):
        own = told(found, index)
        assert len(answer_of(found, index)) >= request.max_new_tokens
        assert [nfe for *_, nfe, _ in own] == list(range(1, len(own) + 1))
        assert len(own) <= min(steps, block) * -(-request.max_new_tokens // block)
        assert own[-1][3] == "length"
    assert len(told(found)) == min(steps, block) * n_new // block


@pytest.mark.parametrize("steps", [0, -1])
def test_a_step_budget_below_one_is_refused_with_its_number(pdllm: Pdllm, steps: int) -> None:
    """Report 3."""
    with pytest.raises(ValueError, match=f"steps is {steps} per block; expected 1 or more"):
        AskOptions(steps=steps)
    with pytest.raises(SystemExit) as stopped:
        pdllm("ask", "What?", "--store", "nowhere", f"--steps={steps}")
    assert stopped.value.code == 2


# -- 4: masks and ends that users type -----------------------------------------------------------------------------


@WAYS
def test_masks_and_ends_in_a_prompt_are_no_holes_and_no_ends(
    models: dict[str, LoadedModel], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 4 (sgl-project/sglang#39592): by id, at every place of the prompt, and alone in it."""
    model, rule = ending(models[way], EOS), CommitRule(threshold=1.0, steps=1)
    canvases: list[Canvas] = []
    made = Canvas.__init__

    def watched(canvas: Canvas, *given: object, **named: object) -> None:
        canvases.append(canvas)
        made(canvas, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Canvas, "__init__", watched)
    prompts = [[MASK], [MASK, EOS], [9, EOS, MASK, 9]]
    requests = [request_for(model, (5,), ids, 2, seed=i) for i, ids in enumerate(prompts)]
    found = decoded(way, model, requests, rule)
    assert [canvas.ids[: canvas.prompt_len].tolist() for canvas in canvases] == prompts
    plain = with_blocks(ending(models["eager"], EOS), BLOCKS[way])
    theirs = decoded("eager", plain, requests, rule) if way == "captured" else found
    for index in range(len(prompts)):
        answer = answer_of(found, index)
        assert MASK not in answer
        assert EOS in answer or len(answer) >= 2
        assert told(found, index) == told(theirs, index)


def test_documents_and_questions_of_special_tokens_are_text_cold_and_cached(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """Report 4: the same answer cold, from the cache, and after a restart; the text is stored as it was typed."""
    text = "The form says " + " and ".join(SPECIALS) + " here." + SPECIALS[3] * 3
    questions = ["What does the form say?", SPECIALS[3], f"{SPECIALS[2]}{SPECIALS[3]}"]
    texts = []
    for _ in range(2):
        options = AskOptions(steps=2, abstain=False, max_new_tokens=8)
        with RagEngine.open(tmp_path / "kb", str(tiny_model_path), dtype=torch.float32, options=options) as engine:
            engine.prefill([InputDocument("form", text, "form")])
            (ref,) = engine.store.refs(engine.fingerprint)
            ids = engine.store.meta(ref.chunk_id).token_ids.tolist()
            assert not set(ids[1:]) & set(range(len(SPECIALS)))
            assert engine.model.tokenizer.decode(ids[1:]) == text
            for _ in range(2):
                texts.append([engine.answer(question).text for question in questions])
    assert all(said == texts[0] for said in texts)


# -- 6: lengths that are no whole blocks ---------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("tail", [-1, 0, 1])
def test_every_length_is_a_prefix_of_the_longest_and_as_long_as_asked(
    models: dict[str, LoadedModel], way: str, tail: int
) -> None:
    """Report 6 (SJTU-DENG-Lab/Diffulex#44): answers and prompts of a block and one token more or less."""
    block = BLOCKS[way] if way == "captured" else 8
    lengths = (1, block + 1) if way == "captured" else (1, 7, 8, 33, 100)
    model, rule = with_blocks(models[way], block), CommitRule(threshold=0.5, steps=2)
    answers = []
    for n_new in lengths:
        steps = decoded(way, model, [request_for(model, (3, 5), block + tail, n_new)], rule)
        assert steps[-1].finished == "length"
        answers.append(answer_of(steps))
        assert n_new <= len(answers[-1]) <= -(-n_new // block) * block
        assert MASK not in answers[-1]
    assert all(answer[:n] == answers[-1][:n] for n, answer in zip(lengths, answers, strict=True))


# -- 7: the end of an answer ---------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("rule", [AT_ONCE, ONE_BY_ONE], ids=["at once", "one by one"])
def test_an_answer_ends_at_its_first_end_whatever_length_was_asked_for(
    models: dict[str, LoadedModel], way: str, rule: CommitRule
) -> None:
    """Report 7 (NVlabs/Fast-dLLM#36): an end first, last in its block and first in the next, with text after it."""
    model, block = models[way], BLOCKS[way]

    def run(n_new: int, eos: int = NO_TOKEN) -> list[DecodeStep]:
        return decoded(way, ending(model, eos), [request_for(model, (5,), 3, n_new)], rule)

    free = answer_of(run(2 * block))
    for row in (0, block) if way == "captured" else (0, 1, block - 1, block, block + 1):
        eos = free[row]
        steps = run(3 * block - 1, eos)
        answer = answer_of(steps)
        end = answer.index(eos)
        assert steps[-1].finished == "stop"
        assert end <= row
        (at,) = (number for number, step in enumerate(steps) if end in step.rows)
        assert {t for step in steps[at:] for r, t in zip(step.rows, step.tokens, strict=True) if r > end} <= {eos}
        assert len(answer) == (end // block + 1) * block  # no later block was opened
        if rule is AT_ONCE:
            assert answer[:end] == free[: free.index(eos)]
        if way != "captured":
            assert told(run(64, eos)) == told(steps)
        if end:  # an end that lies beyond what was asked for is none
            assert run(end, eos)[-1].finished == "length"


def test_of_two_ends_the_first_in_reading_order_stands() -> None:
    """Report 7: an end after the first is text that nobody wrote."""
    canvas = Canvas([9], mask_id=MASK, eos_ids=(EOS, 7), block_len=4, max_new_tokens=4)
    canvas.commit(torch.tensor([3]), torch.tensor([EOS]))
    assert canvas.advance() is None  # what stands before it is not known yet
    rows, tokens = canvas.commit(torch.tensor([1, 2]), torch.tensor([7, 8]))
    assert (rows.tolist(), tokens.tolist()) == ([1, 2], [7, 7])
    assert canvas.advance() is None
    canvas.commit(torch.tensor([0]), torch.tensor([8]))
    assert canvas.advance() == "stop"
    assert canvas.answer.tolist() == [8, 7, 7, EOS]


@pytest.mark.parametrize("decoder", ["static_kv", "vanilla"])
def test_an_answer_of_no_tokens_is_no_error_and_costs_one_block(tiny_model: LoadedModel, decoder: str) -> None:
    """Report 7: the first token is the end, whatever length was asked for."""
    options = AskOptions(threshold=0.0, abstain=False, decoder=decoder)

    def answers(model: LoadedModel, *lengths: int) -> list[object]:
        with RagEngine.open(MemoryStore(kv_dtype="float32"), model, options=options) as engine:
            engine.prefill([InputDocument("d", "The lamp in the hall is blue.", "d")])
            return [engine.answer("Which lamp?", max_new_tokens=n) for n in lengths]

    (free,) = answers(ending(tiny_model, NO_TOKEN), 32)
    first = free.steps[0].tokens[0]  # type: ignore[attr-defined]
    for answer in answers(ending(tiny_model, first), 1, 32, 33, 256):
        stats = answer.stats  # type: ignore[attr-defined]
        assert (stats.tokens, stats.nfe, stats.finish_reason) == (0, 1, "stop")
        assert not stats.supported
