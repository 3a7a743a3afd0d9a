"""What retrieval means: a planted needle decides the signs, and every shortcut equals its reference."""

from __future__ import annotations

import math
import unicodedata

import pytest
import torch
from pdllm_store import ChunkKV, MemoryStore

from pdllm_rag import InputDocument, LoadedModel, RagEngine, ScoringOptions
from pdllm_rag.attends import DenseAttend
from pdllm_rag.clock import Clock
from pdllm_rag.drafts import make_drafts
from pdllm_rag.estimators import Estimator, LeaveOneOut, MaskedGroups
from pdllm_rag.first_stage import BM25Index, folded
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.scoring import CandidateScorer
from pdllm_rag.support import support_probability


def estimator_of(groups: int) -> Estimator:
    return MaskedGroups(groups) if groups else LeaveOneOut()


def candidates_of(engine: RagEngine) -> tuple[list[list[int]], list]:
    refs = engine.store.refs(engine.fingerprint)
    ids = [engine.store.meta(ref.chunk_id).token_ids.tolist() for ref in refs]
    return ids, [engine.store.load(ref.chunk_id) for ref in refs]


def brute_force_s_i(model: LoadedModel, chunk: list[int], prompt_ids: list[int], content: range, groups: int) -> float:
    """One dense forward per group over [chunk | prompt], chunk rows seeing only the chunk."""
    n, length = len(chunk) + len(prompt_ids), len(chunk)
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[:length, length:] = False
    total = 0.0
    for group in range(groups):
        ids = torch.tensor(chunk + prompt_ids)
        rows = torch.tensor(content[group::groups]) + length
        truth = ids[rows].clone()
        ids[rows] = model.spec.mask_id
        attend = DenseAttend(model.backbone.rope, [n], torch.arange(n), [mask])
        logits = model.backbone.logits(model.backbone.hidden(ids, attend)[rows - 1])
        total += float(torch.log_softmax(logits, -1).gather(1, truth[:, None]).sum())
    return total / len(content)


@pytest.mark.parametrize("groups", [1, 2, 3, 0])
def test_scores_over_stored_kv_equal_a_dense_forward_per_candidate(tiny_model: LoadedModel, groups: int) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=48)
    engine.prefill([InputDocument("d", "Some words of very different length, cut in pieces. " * 4, "d")])
    ids, kv = candidates_of(engine)
    question = tiny_model.tokenizer.render(tiny_model.spec.family.template, [{"role": "user", "content": "Which?"}])
    ours = CandidateScorer(tiny_model, question, kv).s_i(estimator_of(groups))
    for score, chunk in zip(ours.tolist(), ids, strict=True):
        expected = brute_force_s_i(
            tiny_model, chunk, list(question.ids), question.content, groups or len(question.content)
        )
        assert score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("draft", [[70], [70, 71, 72]])
def test_the_draft_likelihood_equals_a_dense_forward_per_candidate(tiny_model: LoadedModel, draft: list[int]) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=48)
    engine.prefill([InputDocument("d", "Some words of very different length, cut in pieces. " * 4, "d")])
    ids, kv = candidates_of(engine)
    question = tiny_model.tokenizer.render(tiny_model.spec.family.template, [{"role": "user", "content": "Which?"}])
    ours = CandidateScorer(tiny_model, question, kv, draft_len=3).s_p([draft] * len(kv))
    whole = [*question.ids, *draft]
    rows = range(len(question.ids), len(whole))
    for score, chunk in zip(ours.tolist(), ids, strict=True):
        assert score == pytest.approx(brute_force_s_i(tiny_model, chunk, whole, rows, 1), abs=1e-4)


def test_the_score_is_s_i_plus_lambda_s_p_and_the_margin_is_best_minus_median(tiny_model: LoadedModel) -> None:
    scoring = ScoringOptions(draft_weight=0.5, clear_lead=1e9)
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, scoring=scoring, chunk_len=64)
    engine.prefill([InputDocument(f"d{i}", f"Words {i} of a text about {i * 7}.", f"d{i}") for i in range(7)])
    refs = engine.store.refs(engine.fingerprint)
    kv = [engine.store.load(ref.chunk_id) for ref in refs]
    retriever = engine._retriever
    selection = retriever.rank("About what?", refs, kv, 7, Clock())
    question = retriever.question("About what?")
    scorer = CandidateScorer(tiny_model, question, kv, draft_len=8)
    drafts = make_drafts(tiny_model, question, kv, context="first_stage", slots=8, rounds=1)
    s_i, s_p = scorer.s_i(MaskedGroups(2)), scorer.s_p(drafts)
    expected = dict(zip(refs, (s_i + 0.5 * s_p).tolist(), strict=True))
    assert dict(zip(selection.refs, selection.scores, strict=True)) == pytest.approx(expected, abs=1e-5)
    assert list(selection.scores) == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-5)
    assert selection.margin == pytest.approx(float(s_i.max() - s_i.median()), abs=1e-5)
    assert retriever.rank("About what?", refs[:3], kv[:3], 3, Clock()).margin is None


def test_a_candidates_score_does_not_depend_on_the_others(tiny_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=48)
    engine.prefill([InputDocument("d", "Some words of very different length, cut in pieces. " * 4, "d")])
    _, kv = candidates_of(engine)
    question = tiny_model.tokenizer.render(tiny_model.spec.family.template, [{"role": "user", "content": "Which?"}])
    draft, two = [70, 71, 72], MaskedGroups(2)
    together = CandidateScorer(tiny_model, question, kv, draft_len=3)
    for index, one in enumerate(kv):
        alone = CandidateScorer(tiny_model, question, [one], draft_len=3)
        torch.testing.assert_close(together.s_i(two)[index : index + 1], alone.s_i(two), rtol=0, atol=1e-5)
        torch.testing.assert_close(
            together.s_p([draft] * len(kv))[index : index + 1], alone.s_p([draft]), rtol=0, atol=1e-5
        )


def test_a_planted_needle_decides_the_signs(demo_model: LoadedModel) -> None:
    """The chunk that holds the answer gets the highest s_I and s_P: higher log-likelihood is better, for both."""
    engine = RagEngine.open(MemoryStore(), demo_model)
    hay = [
        "The harbour office keeps the tide tables in a blue folder beside the window.",
        "Painting the hull takes two days in dry weather and three in rain.",
        "A trainee spends the first week in the archive before joining a crew.",
        "The canteen serves soup on Mondays and fish on Fridays.",
    ]
    needle = "The lighthouse keeper's parrot is called Bartholomew and is nine years old."
    for i, text in enumerate([*hay[:2], needle, *hay[2:]]):
        engine.prefill([InputDocument(f"d{i}", text, f"d{i}")])
    _, kv = candidates_of(engine)
    question = demo_model.tokenizer.render(
        demo_model.spec.family.template, [{"role": "user", "content": "What is the name of the keeper's parrot?"}]
    )
    scorer = CandidateScorer(demo_model, question, kv, draft_len=8)
    draft = demo_model.tokenizer.encode("Bartholomew")
    assert int(scorer.s_i(MaskedGroups(2)).argmax()) == 2
    assert int(scorer.s_p([draft] * len(kv)).argmax()) == 2
    assert engine.retrieve("What is the name of the keeper's parrot?", k=1, candidates=5)[0].ref.doc_id == "d2"


def test_ties_keep_document_order_and_scores_descend(tiny_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    engine.prefill([InputDocument(f"d{i}", f"Same words {'x' * i} here.", f"d{i}") for i in range(6)])
    found = engine.retrieve("Same words here?", k=4, candidates=6)
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 1


def test_equal_scores_keep_document_order(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CandidateScorer, "s_i", lambda self, _, **__: torch.zeros(self._n))
    engine = RagEngine.open(
        MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, scoring=ScoringOptions(draft_weight=0.0)
    )
    engine.prefill([InputDocument(f"d{i}", f"Same words {'x' * i} here.", f"d{i}") for i in range(6)])
    assert [one.ref.doc_id for one in engine.retrieve("words xxx?", k=4, candidates=6)] == ["d0", "d1", "d2", "d3"]


def test_a_rank_weight_takes_its_logarithm_off_each_score(tiny_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(), tiny_model, chunk_len=16)
    engine.prefill([InputDocument(f"d{i}", f"Walrus number {i}", f"d{i}") for i in range(6)])
    ranks = {
        hit.ref: rank for rank, hit in enumerate(BM25Index(engine.store, engine.fingerprint).search("walrus 3", 6), 1)
    }
    options = {"k": 6, "candidates": 6, "score_window": 9e9}
    plain = {chunk.ref: chunk.score for chunk in engine.retrieve("walrus 3", **options)}
    found = engine.retrieve("walrus 3", rank_weight=0.7, **options)
    assert {chunk.ref: chunk.score for chunk in found} == {
        ref: pytest.approx(plain[ref] - 0.7 * math.log(rank)) for ref, rank in ranks.items()
    }
    assert [chunk.score for chunk in found] == sorted((chunk.score for chunk in found), reverse=True)
    for bad in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="rank_weight is"):
            engine.retrieve("walrus 3", rank_weight=bad)


def test_chunks_far_below_the_best_are_not_read(tiny_model: LoadedModel) -> None:
    """The window counts from the best score; 0 leaves the best alone, infinity reads all k."""
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    engine.prefill([InputDocument(f"d{i}", f"Words {i} of a text about {i * 7}.", f"d{i}") for i in range(6)])
    scores = [found.score for found in engine.retrieve("About what?", k=4)]
    for window in (0.0, (scores[0] - scores[1]) * 1.01, scores[0] - scores[2] + 1e-6, float("inf")):
        answer = engine.answer("About what?", k=4, score_window=window, abstain=False)
        assert answer.stats.chunks.hit == sum(score >= scores[0] - window for score in scores)
    with pytest.raises(ValueError, match="score_window"):
        engine.answer("About what?", score_window=-1.0)


def test_a_clear_lead_leaves_the_draft_out_and_a_close_one_does_not(tiny_model: LoadedModel) -> None:
    documents = [InputDocument(f"d{i}", f"Words {i} of a text about {i * 7}.", f"d{i}") for i in range(6)]
    for clear_lead, drafted in ((0.0, False), (1e9, True)):
        scoring = ScoringOptions(draft_weight=0.5, clear_lead=clear_lead)
        engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, scoring=scoring, chunk_len=64)
        engine.prefill(documents)
        clock = Clock()
        engine._retriever.select("What is it about?", 2, 6, clock, score_window=None)
        assert (clock.ms()["draft"] > 0) == drafted


def test_support_falls_with_the_no_answer_text_and_rises_with_the_margin(demo_model: LoadedModel) -> None:
    calibration = demo_model.spec.family.support
    assert calibration is not None
    sure = support_probability(calibration, -9.0, 2.0)
    unsure = support_probability(calibration, -0.1, 0.2)
    assert sure is not None
    assert unsure is not None
    assert unsure < 0.5 < sure
    assert support_probability(calibration, -9.0, 3.0) > sure
    assert support_probability(None, -9.0, 2.0) is None
    assert support_probability(calibration, None, 2.0) is None


def test_an_unrelated_question_is_refused_without_a_source_and_a_related_one_is_not(demo_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(), demo_model)
    topics = ("The canteen opens at 11:45 and closes at 14:00.", "Parking costs 12 euros a month.")
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(topics)])
    refused = engine.answer("Who painted the ceiling of the Sistine Chapel?")
    assert (refused.stats.supported, refused.citations) == (False, ())
    assert refused.text == demo_model.spec.family.no_answer
    answered = engine.answer("How much does parking cost?")
    assert answered.stats.supported
    assert answered.citations[0].doc_id == "d1"


# -- first stage ---------------------------------------------------------------------------------------------------


def index_over(tiny_model: LoadedModel, texts: dict[str, str]) -> tuple[RagEngine, BM25Index]:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=256)
    engine.prefill([InputDocument(name, text, name) for name, text in texts.items()])
    return engine, BM25Index(engine.store, engine.fingerprint)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (unicodedata.normalize("NFD", "Her résumé is here"), unicodedata.normalize("NFC", "résumé")),
        (unicodedata.normalize("NFC", "Her résumé is here"), "resume"),
        ("Room ４０２ is locked", "room 402"),
        ("東京は日本の首都です", "首都"),
        (unicodedata.normalize("NFD", "한국어 문서"), unicodedata.normalize("NFC", "한국어")),
        ("Ответ лежит в синей папке", "синей"),
        ("The employees were paid", "employee"),
        ("part-number GX_77/b", "gx 77"),
    ],
    ids=["composed", "no accents", "full-width", "cjk", "hangul", "cyrillic", "stem", "punctuation"],
)
def test_spellings_find_each_other(tiny_model: LoadedModel, stored: str, asked: str) -> None:
    _, index = index_over(tiny_model, {"a noise": "Nothing of note.", "target": stored, "z noise": "More of nothing."})
    best = index.search(asked, 1)[0]
    assert best.ref.doc_id == "target"
    assert best.score > 0


def test_the_index_follows_every_change_of_the_store(tiny_model: LoadedModel) -> None:
    engine, index = index_over(tiny_model, {"a": "walrus facts", "b": "penguin facts"})
    assert index.search("walrus", 1)[0].ref.doc_id == "a"
    engine.prefill([InputDocument("a", "heron facts", "a"), InputDocument("c", "walrus tusks", "c")])
    assert index.search("walrus", 1)[0].ref.doc_id == "c"
    engine.delete("c")
    assert all(candidate.score == 0 for candidate in index.search("walrus", 5))
    assert index.size() == 2


def test_chunks_without_a_shared_word_fill_up_in_document_order(tiny_model: LoadedModel) -> None:
    _, index = index_over(tiny_model, {name: f"text of {name}" for name in "cab"})
    found = index.search("zzz", 2)
    assert [(candidate.ref.doc_id, candidate.score) for candidate in found] == [("a", 0.0), ("b", 0.0)]
    assert index.search("?!", 1)[0].ref.doc_id == "a"
    assert [c.ref.doc_id for c in index.search("text", 3, doc_ids={"c"})] == ["c"]


def test_query_syntax_is_only_text(tiny_model: LoadedModel) -> None:
    _, index = index_over(tiny_model, {"a": "apples NOT pears", "b": "pears"})
    for question in ('pears" OR "', "NOT apples", "a* NEAR(b c)", "body:pears", "(", "'; DROP TABLE chunks"):
        assert len(index.search(question, 2)) == 2
    assert [c.ref.doc_id for c in index.search("NOT pears", 2) if c.score > 0] == ["a", "b"]


def test_folding_keeps_words_apart() -> None:
    assert folded("Größe—und: 12,5 kg").split() == ["grösse", "und", "12", "5", "kg"]


def test_groups_that_are_scored_side_by_side_score_the_same(tiny_model: LoadedModel) -> None:
    question = Prompt(tuple(range(20, 31)), range(2, 9))
    generator = torch.Generator().manual_seed(2)
    one = tiny_model.backbone
    candidates = [
        ChunkKV(*torch.randn(2, one.n_layers, n, one.n_kv_heads, one.head_dim, generator=generator)) for n in (9, 30, 4)
    ]
    apart = CandidateScorer(tiny_model, question, candidates, draft_len=3)
    for groups in (1, 2, 3, 0):
        together = CandidateScorer(tiny_model, question, candidates, draft_len=3, at_once=2)
        estimator = estimator_of(groups)
        torch.testing.assert_close(together.s_i(estimator), apart.s_i(estimator), rtol=0, atol=1e-5)
        torch.testing.assert_close(together.s_p([[9, 10]] * 3), apart.s_p([[9, 10]] * 3), rtol=0, atol=1e-5)
