"""Every estimator equals an independent dense computation, and every switch of a score does what it says."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from pdllm_store import ChunkKV, MemoryStore

from pdllm_rag import InputDocument, LoadedModel, RagEngine, ScoringOptions, evidence
from pdllm_rag.attends import DenseAttend
from pdllm_rag.clock import Clock
from pdllm_rag.combinations import UnionMean, WeightedSum
from pdllm_rag.drafts import CONTEXTS, make_drafts
from pdllm_rag.estimators import CausalShift, Estimator, LeaveOneOut, MaskedGroups
from pdllm_rag.evidence import Evidence
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.scoring import DRAFT_CONTEXTS, CandidateScorer

QUESTION = Prompt(tuple(range(20, 31)), range(2, 9))
HAY = [
    "The harbour office keeps the tide tables in a blue folder beside the window.",
    "Painting the hull takes two days in dry weather and three in rain.",
    "The lighthouse keeper's parrot is called Bartholomew and is nine years old.",
    "A trainee spends the first week in the archive before joining a crew.",
    "The canteen serves soup on Mondays and fish on Fridays.",
]
ASKED = "What is the name of the keeper's parrot?"


@dataclass(frozen=True)
class Stored:
    """Chunks of one model: token ids, and KV of each."""

    ids: list[list[int]]
    kv: list[ChunkKV]


def stored(model: LoadedModel, texts: Sequence[str], chunk_len: int = 64) -> Stored:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), model, chunk_len=chunk_len)
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(texts)])
    refs = engine.store.refs(engine.fingerprint)
    ids = [engine.store.meta(ref.chunk_id).token_ids.tolist() for ref in refs]
    return Stored(ids, [engine.store.load(ref.chunk_id) for ref in refs])


@pytest.fixture(scope="module")
def chunks(tiny_model: LoadedModel) -> Stored:
    return stored(tiny_model, ["Some words.", "Some other words of a longer text.", "And a third one"])


def dense_log_p(
    model: LoadedModel, chunk: Sequence[int], canvas: Sequence[int], rows: Sequence[int], hidden: Sequence[int]
) -> list[float]:
    """ln p at canvas rows, `hidden` masked, every row of the canvas seeing all; the chunk sees only itself."""
    return _dense(model, chunk, canvas, rows, hidden, torch.ones(len(canvas), len(canvas), dtype=torch.bool))


def causal_log_p(model: LoadedModel, chunk: Sequence[int], canvas: Sequence[int], rows: Sequence[int]) -> list[float]:
    """ln p at canvas rows, nothing masked, no row of the canvas seeing a later one."""
    return _dense(model, chunk, canvas, rows, [], torch.ones(len(canvas), len(canvas)).tril().bool())


def _dense(
    model: LoadedModel,
    chunk: Sequence[int],
    canvas: Sequence[int],
    rows: Sequence[int],
    hidden: Sequence[int],
    own: torch.Tensor,
) -> list[float]:
    n, length = len(chunk) + len(canvas), len(chunk)
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[:, :length] = True
    mask[length:, length:] = own
    ids = torch.tensor([*chunk, *canvas])
    truth = ids.clone()
    ids[[length + row for row in hidden]] = model.spec.mask_id
    states = model.backbone.hidden(ids, DenseAttend(model.backbone.rope, [n], torch.arange(n), [mask]))
    log_p = torch.log_softmax(model.backbone.logits(states), -1)
    return [float(log_p[length + row - 1, truth[length + row]]) for row in rows]


def brute_force(
    model: LoadedModel, chunk: Sequence[int], canvas: Sequence[int], rows: Sequence[int], estimator: Estimator
) -> float:
    """Each token's likelihood in a forward of its own, what its estimator hides written out."""
    if isinstance(estimator, CausalShift):
        found = causal_log_p(model, chunk, canvas, rows)
    else:
        n = estimator.n if isinstance(estimator, MaskedGroups) else len(rows)
        found = []
        for place, row in enumerate(rows):
            hidden = [other for at, other in enumerate(rows) if at % n == place % n]
            found += dense_log_p(model, chunk, canvas, [row], hidden)
    return sum(found) / len(found)


ESTIMATORS = [MaskedGroups(1), MaskedGroups(3), MaskedGroups(50), LeaveOneOut(), CausalShift()]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("window", [None, 3, 50])
def test_the_questions_likelihood_equals_a_dense_forward_a_token(
    tiny_model: LoadedModel, chunks: Stored, estimator: Estimator, window: int | None
) -> None:
    found = CandidateScorer(tiny_model, QUESTION, chunks.kv, at_once=2).s_i(estimator, window=window)
    rows = list(QUESTION.content)[-(window or 0) :]
    for value, chunk in zip(found.tolist(), chunks.ids, strict=True):
        assert value == pytest.approx(brute_force(tiny_model, chunk, QUESTION.ids, rows, estimator), abs=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_the_unions_mean_equals_a_dense_forward_a_token(
    tiny_model: LoadedModel, chunks: Stored, estimator: Estimator
) -> None:
    """Drafts of different lengths, one of them empty: there the union is the question."""
    drafts = [[70, 71], [], [80]]
    found = CandidateScorer(tiny_model, QUESTION, chunks.kv, draft_len=2).union(drafts, estimator, window=4)
    for value, chunk, draft in zip(found.tolist(), chunks.ids, drafts, strict=True):
        canvas = [*QUESTION.ids, *draft]
        rows = [*list(QUESTION.content)[-4:], *range(len(QUESTION.ids), len(canvas))]
        assert value == pytest.approx(brute_force(tiny_model, chunk, canvas, rows, estimator), abs=1e-4)


def test_each_candidates_own_draft_is_scored_and_one_without_gets_the_lowest(
    tiny_model: LoadedModel, chunks: Stored
) -> None:
    drafts = [[70, 71], [], [80]]
    scorer = CandidateScorer(tiny_model, QUESTION, chunks.kv, draft_len=2)
    found = scorer.s_p(drafts).tolist()
    for index in (0, 2):
        canvas = [*QUESTION.ids, *drafts[index]]
        rows = range(len(QUESTION.ids), len(canvas))
        expected = dense_log_p(tiny_model, chunks.ids[index], canvas, rows, rows)
        assert found[index] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert found[1] == min(found[0], found[2])
    with pytest.raises(ValueError, match="3 of them empty"):
        scorer.s_p([[], [], []])
    with pytest.raises(ValueError, match="got 1 drafts"):
        scorer.union([[70]], LeaveOneOut())


def test_a_token_that_nothing_predicts_is_not_scored(tiny_model: LoadedModel, chunks: Stored) -> None:
    """Under logit shift nothing stands before the first row; its neighbour at the other end must not be read for it."""
    bare = Prompt(QUESTION.ids, range(len(QUESTION.ids)))
    found = CandidateScorer(tiny_model, bare, chunks.kv).s_i(LeaveOneOut()).tolist()
    rows = range(1, len(QUESTION.ids))
    for value, chunk in zip(found, chunks.ids, strict=True):
        assert value == pytest.approx(brute_force(tiny_model, chunk, bare.ids, rows, LeaveOneOut()), abs=1e-4)
    single = CandidateScorer(tiny_model, Prompt((20, 21), range(1)), chunks.kv)
    with pytest.raises(ValueError, match="template with a token before"):
        single.s_i(LeaveOneOut())


# -- what scores are made of ---------------------------------------------------------------------------------------


def rank(model: LoadedModel, chunks: Stored, **options: object) -> dict[str, float | None]:
    """Score of each document under some options, best first."""
    engine = RagEngine.open(
        MemoryStore(kv_dtype="float32"),
        model,
        chunk_len=64,
        scoring=ScoringOptions(**options),  # type: ignore[arg-type]
    )
    texts = ["Some words.", "Some other words of a longer text.", "And a third one"]
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(texts)])
    refs = engine.store.refs(engine.fingerprint)
    selection = engine._retriever.rank("Which words?", refs, chunks.kv, 3, Clock())
    return {ref.doc_id: score for ref, score in zip(selection.refs, selection.scores, strict=True)}


def test_every_part_can_be_left_out_and_turned_round(tiny_model: LoadedModel, chunks: Stored) -> None:
    alone = rank(tiny_model, chunks, draft_weight=0.0)
    turned = rank(tiny_model, chunks, draft_weight=0.0, question_weight=-1.0)
    assert [*turned] == [*reversed(alone)]
    assert turned == pytest.approx({name: -value for name, value in alone.items()})
    draft_only = rank(tiny_model, chunks, draft_weight=1.0, question_weight=0.0)
    both = rank(tiny_model, chunks, draft_weight=2.0, clear_lead=math.inf)
    assert both == pytest.approx({name: alone[name] + 2 * draft_only[name] for name in both}, abs=1e-5)
    assert len({*draft_only.values()}) == 3


def test_the_union_is_a_score_of_its_own(tiny_model: LoadedModel, chunks: Stored) -> None:
    union = rank(tiny_model, chunks, combination=UnionMean(), estimator=LeaveOneOut())
    question = tiny_model.tokenizer.render(
        tiny_model.spec.family.template, [{"role": "user", "content": "Which words?"}]
    )
    drafts = make_drafts(tiny_model, question, chunks.kv, context="first_stage", slots=8, rounds=1)
    expected = CandidateScorer(tiny_model, question, chunks.kv, draft_len=8).union(drafts, LeaveOneOut()).tolist()
    assert [union[f"d{i}"] for i in range(3)] == pytest.approx(expected, abs=1e-5)


def test_only_the_default_s_i_gives_a_margin() -> None:
    """A family's support was fitted to it; another estimator's lead means something else."""
    assert ScoringOptions().has_plain_s_i
    assert not ScoringOptions(estimator=LeaveOneOut()).has_plain_s_i
    assert not ScoringOptions(window=4).has_plain_s_i


def test_candidates_that_nothing_tells_apart_keep_the_first_stages_order(
    tiny_model: LoadedModel, chunks: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evidence, "drafts", lambda self, _: [[]] * len(self._kvs))
    scores = rank(tiny_model, chunks, draft_weight=1.0, question_weight=0.0)
    assert list(scores.items()) == [("d0", None), ("d1", None), ("d2", None)]


def test_evidence_computes_a_part_once_for_all_that_ask(
    tiny_model: LoadedModel, chunks: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    plain = CandidateScorer.s_i
    monkeypatch.setattr(
        CandidateScorer, "s_i", lambda self, *args, **kwargs: calls.append(args) or plain(self, *args, **kwargs)
    )
    evidence = Evidence(tiny_model, QUESTION, chunks.kv, Clock(), draft_len=8, at_once=2)
    for weight in (0.0, 0.1, 1.0):
        parts = evidence.under(ScoringOptions(draft_weight=weight, clear_lead=math.inf))
        assert WeightedSum().scores(parts) is not None
        assert parts.ms() > 0
    assert len(calls) == 1
    WeightedSum().scores(evidence.under(ScoringOptions(estimator=LeaveOneOut(), draft_weight=0.0)))
    assert len(calls) == 2


# -- drafts --------------------------------------------------------------------------------------------------------


def test_contexts_are_what_their_names_say(tiny_model: LoadedModel, chunks: Stored) -> None:
    assert tuple(CONTEXTS) == DRAFT_CONTEXTS

    def made(kv: Sequence[ChunkKV], context: str) -> list[list[int]]:
        return make_drafts(tiny_model, QUESTION, kv, context=context, slots=6, rounds=1)

    own = made(chunks.kv, "per_chunk")
    assert own == [made([kv], "first_stage")[0] for kv in chunks.kv]
    assert made(chunks.kv, "none") == made(chunks.kv[::-1], "none")
    shared = made(chunks.kv, "first_stage")
    assert shared == made(chunks.kv[:2], "first_stage")[:1] * 3
    assert len({tuple(draft) for draft in [*own, *shared]}) > 1


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_a_draft_takes_as_many_forward_passes_as_it_has_rounds(
    tiny_model: LoadedModel, chunks: Stored, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    endless = replace(tiny_model, spec=replace(tiny_model.spec, eos_ids=(tiny_model.spec.vocab_size - 1,)))
    passes = []
    plain = endless.backbone.hidden
    monkeypatch.setattr(endless.backbone, "hidden", lambda *args: passes.append(len(args[0])) or plain(*args))
    n = endless.spec.family.block_len
    drafts = make_drafts(endless, QUESTION, chunks.kv, context="first_stage", slots=n, rounds=rounds)
    assert len(passes) == rounds
    assert [len(draft) for draft in drafts] == [n] * 3


@pytest.mark.parametrize("context", DRAFT_CONTEXTS)
@pytest.mark.parametrize("estimator", [MaskedGroups(2), LeaveOneOut(), CausalShift()], ids=str)
def test_a_planted_needle_wins_under_every_estimator(
    demo_model: LoadedModel, estimator: Estimator, context: str
) -> None:
    """Higher log-likelihood is better; with the sign turned, as the paper's formula reads, the needle comes last."""
    held = stored(demo_model, HAY, chunk_len=160)
    question = demo_model.tokenizer.render(demo_model.spec.family.template, [{"role": "user", "content": ASKED}])
    evidence = Evidence(demo_model, question, held.kv, Clock(), draft_len=8, at_once=4)
    options = ScoringOptions(estimator=estimator, draft_context=context, clear_lead=math.inf)
    scores = options.combination.scores(evidence.under(options))
    assert scores is not None
    assert max(range(5), key=scores.__getitem__) == 2
    turned = replace(options, question_weight=-1.0, draft_weight=0.0)
    scores = turned.combination.scores(evidence.under(turned))
    assert scores is not None
    assert min(range(5), key=scores.__getitem__) == 2


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_len": 0}, "draft_len is 0"),
        ({"draft_len": True}, "draft_len is True"),
        ({"draft_rounds": 0}, "draft_rounds is 0"),
        ({"draft_rounds": 9}, "draft_rounds is 9 for 8 draft slots"),
        ({"draft_context": "all"}, "draft_context is 'all'; expected one of first_stage, none, per_chunk"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5"),
        ({"draft_weight": math.nan}, "draft_weight is nan"),
        ({"question_weight": math.inf}, "question_weight is inf"),
        ({"clear_lead": math.nan}, "clear_lead is nan"),
        ({"draft_weight": 0.0, "question_weight": 0.0}, "both 0"),
        ({"combination": UnionMean(), "draft_weight": 0.5}, "every token weighs the same"),
        ({"combination": UnionMean(), "question_weight": -1.0}, "every token weighs the same"),
    ],
)
def test_malformed_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ScoringOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_malformed_groups_are_refused(n: object) -> None:
    with pytest.raises(ValueError, match="n="):
        MaskedGroups(n)  # type: ignore[arg-type]


def test_causal_shift_is_refused_without_shift_and_warned_of_where_untried(
    tiny_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    scoring = ScoringOptions(estimator=CausalShift())
    unshifted = replace(tiny_model, spec=replace(tiny_model.spec, logit_shift=False))
    with pytest.raises(ValueError, match="MaskedGroups"):
        RagEngine.open(MemoryStore(kv_dtype="float32"), unshifted, scoring=scoring)
    with caplog.at_level(logging.WARNING):
        RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, scoring=scoring)
    assert "experiment for family llama-mdlm" in caplog.text
    dream = replace(tiny_model.spec, family=replace(tiny_model.spec.family, name="dream"))
    caplog.clear()
    CausalShift().check(dream)
    assert not caplog.text


def test_candidates_that_are_large_are_scored_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = ChunkKV(*torch.zeros(2, 1, 8, 1, 16))
    assert evidence.scored_at_once([kv] * 3) == evidence.SCORED_AT_ONCE
    monkeypatch.setattr(evidence, "SCORED_BYTES", 2 * (kv.k.nbytes + kv.v.nbytes))
    assert evidence.scored_at_once([kv] * 3) == 2
    monkeypatch.setattr(evidence, "SCORED_BYTES", 1)
    assert evidence.scored_at_once([kv] * 3) == 1
