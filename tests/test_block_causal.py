"""Block-causal families: chunks, canvases, decoders and scores keep to the block mask, as transformers computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pdllm_store import ChunkKV, MemoryStore
from tiny import save_tiny_model

from pdllm_rag import InputDocument, RagEngine, ScoringOptions
from pdllm_rag.attends import DenseAttend, SplitSAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding import Canvas, CommitRule, DecodeRequest, DecodeStep, StaticKVDecoder, VanillaDecoder, static_kv
from pdllm_rag.decoding.denoise import denoise
from pdllm_rag.decoding.predictions import LogitRows
from pdllm_rag.drafts import make_drafts
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.estimators import LeaveOneOut, MaskedGroups
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import MODES, plan_offsets
from pdllm_rag.policies import encode_jointly
from pdllm_rag.scoring import CandidateScorer

NO_TOKEN = -1  # an end-of-answer id that no model produces
LENS = [(), (1,), (12, 30, 7), (8, 16), (21,)]
BACKENDS = ["reference", "flash"]


class Shape(NamedTuple):
    model_type: str
    block: int
    logit_shift: bool


SHAPES = {
    "sdar": Shape("qwen3", 4, False),
    "fast-dllm": Shape("qwen2", 8, True),
    "fast-dllm-32": Shape("qwen2", 32, True),
}


def block_causal(model: LoadedModel, block: int, block_len: int | None = None) -> LoadedModel:
    family = replace(model.spec.family, prefill_mask=f"block-causal-{block}", block_len=block_len or block)
    return replace(model, spec=replace(model.spec, family=family))


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = SHAPES[request.param]
    folder = save_tiny_model(
        tmp_path_factory.mktemp(request.param), model_type=shape.model_type, logit_shift=shape.logit_shift
    )
    return block_causal(load_model(str(folder), dtype=torch.float32), shape.block)


def block_of(model: LoadedModel) -> int:
    block = causal_block(model.spec.family)
    assert block is not None
    return block


def random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(4, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk_ids_of(model: LoadedModel, lens: Sequence[int]) -> list[list[int]]:
    return [[model.spec.bos_id, *random_ids(n - 1, i)] for i, n in enumerate(lens)]


def encoded(model: LoadedModel, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    return [next(iter(encoder.batches([np.array(ids, np.int32)])))[0][1] for ids in chunks]


def request_for(
    model: LoadedModel, lens: Sequence[int], *, prompt_len: int = 9, mode: str = "sequential", max_new_tokens: int = 20
) -> DecodeRequest:
    ids = chunk_ids_of(model, lens)
    plan = plan_offsets(lens, mode, chunk_len=max(lens, default=1), multiple=block_of(model))
    prompt = random_ids(prompt_len, 100 + prompt_len)
    return DecodeRequest(prompt, plan, max_new_tokens, chunk_ids=ids, chunk_kv=encoded(model, ids))


def composed_mask(lens: Sequence[int], positions: Sequence[int], block: int) -> torch.Tensor:
    """Chunks see themselves and canvas rows all chunks; whatever sees itself sees no later block of itself."""
    canvas = len(lens)
    owner = np.repeat([*range(canvas), canvas], [*lens, len(positions) - sum(lens)])
    last_seen = np.array(positions) // block * block + block - 1
    own = (owner[:, None] == owner) & (np.array(positions) <= last_seen[:, None])
    return torch.from_numpy(own | ((owner[:, None] == canvas) & (owner < canvas)))


def library_logits(model: LoadedModel, request: DecodeRequest, canvas_ids: torch.Tensor) -> torch.Tensor:
    """Logits of every canvas row by transformers' own forward over [chunks placed | canvas]."""
    lens = [len(ids) for ids in request.chunk_ids]
    start = request.placement.canvas_start
    positions = [o + i for o, n in zip(request.placement.offsets, lens, strict=True) for i in range(n)]
    positions += range(start, start + len(canvas_ids))
    ids = torch.tensor([*(token for chunk in request.chunk_ids for token in chunk), *canvas_ids.tolist()])
    mask = composed_mask(lens, positions, block_of(model))
    with torch.inference_mode():
        whole = model.backbone.model(
            ids[None], attention_mask=mask[None, None], position_ids=torch.tensor([positions]), use_cache=False
        ).logits[0]
    whole = whole.clone()
    whole[:, model.spec.mask_id] = -torch.inf
    whole[:, model.spec.n_tokens :] = -torch.inf
    return whole[sum(lens) :]


def library_steps(model: LoadedModel, request: DecodeRequest, rule: CommitRule) -> Iterator[DecodeStep]:
    def forward(_: Sequence[int], canvases: Sequence[Canvas]) -> list[LogitRows]:
        (canvas,) = canvases
        rows = canvas.prompt_len + canvas.open_rows() - int(model.spec.logit_shift)
        return [LogitRows(library_logits(model, request, canvas.ids)[rows])]

    return denoise([request], forward, model.spec, rule)


def tokens_of(steps: Sequence[DecodeStep], sequence: int = 0) -> dict[int, int]:
    return {r: t for s in steps if s.sequence == sequence for r, t in zip(s.rows, s.tokens, strict=True)}


def with_eos(model: LoadedModel, eos: int) -> LoadedModel:
    return replace(model, spec=replace(model.spec, eos_ids=(eos,)))


@pytest.mark.parametrize("n", [1, 3, 4, 33, 64])
def test_chunk_kv_is_the_librarys_under_the_block_mask(model: LoadedModel, n: int) -> None:
    (ids,) = chunk_ids_of(model, [n])
    (kv,) = encoded(model, [ids])
    mask = composed_mask([n], range(n), block_of(model))
    with torch.inference_mode():
        out = model.backbone.model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    for layer, own in enumerate(cache.layers):
        torch.testing.assert_close(kv.k[layer], own.keys[0].transpose(0, 1), rtol=0, atol=1e-5)
        torch.testing.assert_close(kv.v[layer], own.values[0].transpose(0, 1), rtol=0, atol=1e-5)


def test_a_chunk_alone_equals_itself_in_a_batch(model: LoadedModel) -> None:
    chunks = chunk_ids_of(model, [33, 5, 33, 18])
    batches = ChunkEncoder(model, model.fingerprint("float32")).batches([np.array(c, np.int32) for c in chunks])
    together = {tuple(meta.token_ids.tolist()): kv for batch in batches for meta, kv in batch}
    for ids, alone in zip(chunks, encoded(model, chunks), strict=True):
        torch.testing.assert_close(together[tuple(ids)].k, alone.k, rtol=0, atol=1e-5)
        torch.testing.assert_close(together[tuple(ids)].v, alone.v, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("prompt_len", [9, 32])
def test_static_kv_logits_are_the_librarys_at_every_state_of_the_canvas(
    model: LoadedModel, backend: str, lens: tuple[int, ...], prompt_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_kv, "denoise", lambda *given, **_: given[1])  # the forward pass itself
    request = request_for(model, lens, prompt_len=prompt_len, max_new_tokens=40)
    forward = StaticKVDecoder(model, backend=backend).steps([request])
    block = block_of(model)
    lead = block if model.spec.logit_shift else 1
    canvas = Canvas(
        request.prompt_ids, mask_id=3, eos_ids=(NO_TOKEN,), block_len=block, max_new_tokens=40, align=block, lead=lead
    )
    for state in range(5):
        rows = canvas.open_rows()
        (ours,) = forward([0], [canvas])  # type: ignore[operator]
        theirs = library_logits(model, request, canvas.ids)[prompt_len + rows - int(model.spec.logit_shift)]
        largest = float(theirs[theirs.isfinite()].abs().max())  # about 10; float32 rounds there
        torch.testing.assert_close(ours.logits, theirs, rtol=0, atol=1e-5 * largest)
        chosen = rows[::2] if state % 2 else rows
        canvas.commit(chosen, torch.tensor(random_ids(len(chosen), state)))
        if canvas.advance() is not None:
            break


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lens", LENS[::2], ids=str)
@pytest.mark.parametrize("block_lens", [1, 2])
def test_static_kv_decodes_what_the_library_decodes(
    model: LoadedModel, backend: str, lens: tuple[int, ...], block_lens: int
) -> None:
    model = block_causal(model, block_of(model), block_of(model) * block_lens)
    request = request_for(model, lens, mode=MODES[len(lens) % 3], max_new_tokens=18)
    rule = CommitRule(threshold=0.3)
    ours = list(StaticKVDecoder(model, rule, backend=backend).steps([request]))
    theirs = list(library_steps(model, request, rule))
    assert [(s.rows, s.tokens, s.nfe, s.finished) for s in ours] == [
        (s.rows, s.tokens, s.nfe, s.finished) for s in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_vanilla_equals_static_kv_over_jointly_encoded_chunks(
    model: LoadedModel, lens: tuple[int, ...], mode: str
) -> None:
    """Chunk rows never see the canvas; with one chunk or none, the stored KV is the joint one."""
    request = request_for(model, lens, mode=mode)
    rule = CommitRule(threshold=0.3)
    dense = tokens_of(list(VanillaDecoder(model, rule).steps([request])))
    kv, placement = encode_jointly(model, request.chunk_ids, request.placement)
    joint = replace(request, chunk_kv=kv, placement=placement)
    assert tokens_of(list(StaticKVDecoder(model, rule).steps([joint]))) == dense
    if len(lens) < 2:
        assert tokens_of(list(StaticKVDecoder(model, rule).steps([request]))) == dense


@pytest.mark.parametrize("decoder_type", [StaticKVDecoder, VanillaDecoder])
def test_a_row_alone_equals_itself_in_a_batch_and_shuffled(
    model: LoadedModel, decoder_type: type[StaticKVDecoder] | type[VanillaDecoder]
) -> None:
    shapes = [((5, 17), 5, 24), ((40,), 16, 7), ((3, 3, 3), 31, 33)]
    requests = [request_for(model, lens, prompt_len=n, max_new_tokens=m) for lens, n, m in shapes]
    decoder = decoder_type(model, CommitRule(threshold=0.3))
    alone = [tokens_of(list(decoder.steps([request]))) for request in requests]
    together, shuffled = list(decoder.steps(requests)), list(decoder.steps(requests[::-1]))
    for index in range(len(requests)):
        assert tokens_of(together, index) == alone[index]
        assert tokens_of(shuffled, len(requests) - 1 - index) == alone[index]


@pytest.mark.parametrize("attend", ["dense", *BACKENDS])
@pytest.mark.parametrize("block", [None, 4, 8])
def test_the_last_token_changes_its_own_block_and_no_earlier_one(
    tiny_model: LoadedModel, attend: str, block: int | None
) -> None:
    """A bidirectional model's first row does change."""
    rope, n, positions = tiny_model.backbone.rope, 22, torch.arange(22)
    ids = torch.tensor([random_ids(n, 4), random_ids(n, 4)])
    ids[1, -1] = 251
    chunk = encoded(tiny_model, chunk_ids_of(tiny_model, [8]))
    context = gather([Placed(tuple(chunk), plan_offsets([8], "sequential", chunk_len=8))], [n], tiny_model.backbone)

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        if attend == "dense":
            return tiny_model.backbone.hidden(
                tokens, DenseAttend(rope, [n], positions, block_masks(positions, [n], block))
            )
        return tiny_model.backbone.hidden(tokens, SplitSAttend(rope, context, block=block, backend=attend))

    moved = (hidden(ids[0]) - hidden(ids[1])).abs().amax(dim=1)
    first_of_block = 0 if block is None else (n - 1) // block * block
    assert moved[:first_of_block].sum() == 0
    assert (moved[first_of_block:] > 1e-4).all()


def library_score(model: LoadedModel, chunk: list[int], ids: Sequence[int], rows: Sequence[int], groups: int) -> float:
    """Mean ln p of the tokens at `rows`, hidden in groups, one forward of the library's each."""
    total = 0.0
    placement = plan_offsets([len(chunk)], "sequential", chunk_len=1, multiple=block_of(model))
    for group in range(groups):
        hidden_rows = torch.tensor(rows[group::groups])
        canvas = torch.tensor(list(ids))
        truth = canvas[hidden_rows].clone()
        canvas[hidden_rows] = model.spec.mask_id
        logits = library_logits(model, DecodeRequest(ids, placement, 1, chunk_ids=[chunk]), canvas)
        log_p = torch.log_softmax(logits[hidden_rows - int(model.spec.logit_shift)], dim=-1)
        total += float(log_p.gather(1, truth[:, None]).sum())
    return total / len(rows)


@pytest.mark.parametrize("groups", [1, 2, 0])
def test_scores_equal_the_librarys_forward_per_candidate(model: LoadedModel, groups: int) -> None:
    chunks = chunk_ids_of(model, [21, 4, 33])
    question = Prompt(tuple(random_ids(27, 1)), range(5, 22))
    scorer = CandidateScorer(model, question, encoded(model, chunks), draft_len=6)
    draft = [70, 71, 72, 73, 74, 75]
    whole = [*question.ids, *draft]
    s_i, s_p = scorer.s_i(MaskedGroups(groups) if groups else LeaveOneOut()).tolist(), scorer.s_p([draft] * 3).tolist()
    for index, chunk in enumerate(chunks):
        content = list(question.content)
        brute = library_score(model, chunk, question.ids, content, groups or len(content))
        assert s_i[index] == pytest.approx(brute, abs=1e-4)
        rows = range(len(question.ids), len(whole))
        assert s_p[index] == pytest.approx(library_score(model, chunk, whole, rows, 1), abs=1e-4)


@pytest.mark.parametrize(
    ("shift", "prompt_len", "rows"),
    [
        (False, 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (False, 10, [(0, 1), (2, 3, 4, 5), (6, 7, 8, 9)]),
        (True, 8, [(0,), (1, 2, 3), (4,), (5, 6, 7)]),
        (True, 10, [(0, 1), (2,), (3, 4, 5), (6,)]),
        (True, 11, [(0,), (1,), (2, 3, 4), (5,), (6, 7, 8)]),
    ],
)
def test_answer_blocks_end_where_the_models_do_and_a_shifted_one_begins_with_its_first_token(
    tiny_model: LoadedModel, shift: bool, prompt_len: int, rows: list[tuple[int, ...]]
) -> None:
    model = with_eos(block_causal(tiny_model, 4), NO_TOKEN)
    model = replace(model, spec=replace(model.spec, logit_shift=shift))
    request = request_for(model, (6,), prompt_len=prompt_len, max_new_tokens=7)
    steps = list(StaticKVDecoder(model, CommitRule(threshold=0.0)).steps([request]))
    assert [step.rows for step in steps] == rows
    assert Canvas.room(prompt_len, 7, model.spec.family) == -(-(prompt_len + 7) // 4) * 4


@pytest.mark.parametrize("budget", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_step_budget_holds_for_blocks_that_begin_with_one_token(
    tiny_model: LoadedModel, budget: int, blocks: int
) -> None:
    model = with_eos(block_causal(tiny_model, 4, 4 * blocks), NO_TOKEN)
    request = request_for(model, (6,), prompt_len=8, max_new_tokens=16)
    steps = list(StaticKVDecoder(model, CommitRule(threshold=1.0, steps=budget)).steps([request]))
    assert len(steps) <= (budget + 1) * 16 // (4 * blocks)
    assert sorted(tokens_of(steps)) == list(range(16))


def test_an_end_of_answer_fills_the_rest_of_its_block(model: LoadedModel) -> None:
    request = request_for(model, (13,), max_new_tokens=40)
    free = tokens_of(list(StaticKVDecoder(with_eos(model, NO_TOKEN)).steps([request])))
    ended = with_eos(model, free[5])
    steps = list(StaticKVDecoder(ended).steps([request]))
    assert steps[-1].finished == "stop"
    assert tokens_of(steps)[min(row for row, token in tokens_of(steps).items() if token == free[5])] == free[5]
    assert max(tokens_of(steps)) < len(free)


def test_an_engine_answers_with_every_policy_and_decoder(model: LoadedModel) -> None:
    engine = RagEngine.open(
        MemoryStore(kv_dtype="float32"), model, chunk_len=29, scoring=ScoringOptions(draft_weight=0.5, clear_lead=1e9)
    )
    engine.prefill([InputDocument("d", "Some words of very different length, cut in pieces. " * 4, "d")])
    joint = engine.answer("Which words?", policy="joint", abstain=False, score_window=float("inf"))
    dense = engine.answer("Which words?", decoder="vanilla", abstain=False, score_window=float("inf"))
    stored = engine.answer("Which words?", abstain=False, score_window=float("inf"))
    assert joint.text == dense.text
    assert len(stored.citations) == len(joint.citations)
    question = Prompt(tuple(random_ids(27, 1)), range(5, 22))
    kv = [engine.store.load(ref.chunk_id) for ref in engine.store.refs(engine.fingerprint)[:2]]
    unending = with_eos(model, NO_TOKEN)
    drafts = make_drafts(unending, question, kv, context="first_stage", slots=8, rounds=1)
    assert [len(draft) for draft in drafts] == [8] * len(kv)  # more than one block of the smallest


def test_places_off_the_blocks_are_refused(tiny_model: LoadedModel) -> None:
    model = block_causal(tiny_model, 4)
    request = replace(request_for(model, (6,)), placement=plan_offsets([6], "sequential", chunk_len=6))
    for decoder in (StaticKVDecoder(model), VanillaDecoder(model)):
        with pytest.raises(ValueError, match="multiples of 4"):
            next(iter(decoder.steps([request])))


def test_masks_that_do_not_fit_are_refused(tiny_model: LoadedModel) -> None:
    family = tiny_model.spec.family
    assert causal_block(family) is None
    for mask in ("causal", "block-causal-", "block-causal-0", "block-causal-x"):
        with pytest.raises(ValueError, match="block-causal-<n>"):
            causal_block(replace(family, prefill_mask=mask))
    with pytest.raises(ValueError, match="a multiple of 12"):
        causal_block(replace(family, prefill_mask="block-causal-12"))


def test_positions_beyond_the_window_draw_one_warning_with_numbers(
    tiny_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = replace(tiny_model, spec=replace(tiny_model.spec, family=replace(tiny_model.spec.family, window=48)))
    requests = [DecodeRequest(random_ids(n, 0), plan_offsets([], "gap", chunk_len=1), 8) for n in (16, 17)]
    list(StaticKVDecoder(model).steps(requests[:1]))
    assert not caplog.records
    list(StaticKVDecoder(model).steps(requests))
    (record,) = caplog.records
    assert "49" in record.getMessage()
    assert "48" in record.getMessage()
