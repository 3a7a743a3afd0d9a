"""First stages beside BM25: mean keys, fused ranks, and whatever function or retriever a user brings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np
import pytest
from pdllm_store import ChunkMeta, MemoryStore

from pdllm_rag import InputDocument, LoadedModel, RagEngine
from pdllm_rag.attends import DenseAttend
from pdllm_rag.errors import FirstStageError
from pdllm_rag.first_stage import BM25Index, Candidate, FirstStage
from pdllm_rag.foreign import ForeignStage, from_langchain, from_llama_index
from pdllm_rag.fusion import Fusion
from pdllm_rag.sketches import SketchIndex

TEXTS = {"a": "walrus tusks are long", "b": "penguins can not fly", "c": "herons stand on one leg"}


def engine_over(model: LoadedModel, texts: dict[str, str], chunk_len: int = 64) -> RagEngine:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), model, chunk_len=chunk_len)
    engine.prefill([InputDocument(name, text, name) for name, text in texts.items()])
    return engine


def sketches_of(engine: RagEngine) -> SketchIndex:
    return SketchIndex(engine.model, engine.store, engine.fingerprint)


def names(found: Iterable[Candidate]) -> list[str]:
    return [candidate.ref.doc_id for candidate in found]


# -- sketches ------------------------------------------------------------------------------------------------------


def test_sketches_rank_by_the_cosine_of_mean_unrotated_keys(tiny_model: LoadedModel) -> None:
    """Against keys taken from a dense forward of each text alone, before they are rotated."""
    engine = engine_over(tiny_model, TEXTS)
    layer = tiny_model.backbone.n_layers // 2

    def mean_key(text: str) -> np.ndarray:
        import torch

        ids = torch.tensor([tiny_model.spec.bos_id, *tiny_model.tokenizer.encode(text)])
        attend = DenseAttend(tiny_model.backbone.rope, [len(ids)], torch.arange(len(ids)))
        seen = {}

        def spy(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen[index] = k[1:].mean(dim=0).flatten().numpy()
            return attend(index, q, k, v)

        tiny_model.backbone.hidden(ids, spy)
        return seen[layer] / np.linalg.norm(seen[layer])

    expected = {name: float(mean_key(text) @ mean_key("a walrus?")) for name, text in TEXTS.items()}
    found = sketches_of(engine).search("a walrus?", 3)
    assert {c.ref.doc_id: c.score for c in found} == pytest.approx(expected, abs=2e-3)
    assert names(found) == sorted(expected, key=lambda name: -expected[name])


def test_a_text_is_its_own_nearest_sketch_and_filters_hold(tiny_model: LoadedModel) -> None:
    sketches = sketches_of(engine_over(tiny_model, TEXTS))
    for name, text in TEXTS.items():
        best = sketches.search(text, 1)[0]
        assert (best.ref.doc_id, round(best.score, 2)) == (name, 1.0)
    assert names(sketches.search(TEXTS["a"], 5, doc_ids={"c"})) == ["c"]


def test_sketches_follow_every_change_of_the_store(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(tiny_model, TEXTS)
    sketches = sketches_of(engine)
    assert len(sketches.search("x", 9)) == 3
    read = []
    plain = engine.store.meta
    monkeypatch.setattr(engine.store, "meta", lambda chunk_id: read.append(chunk_id) or plain(chunk_id))
    engine.delete("b")
    engine.prefill([InputDocument("d", "otters hold hands", "d"), InputDocument("e", TEXTS["a"], "e")])
    read.clear()
    assert sorted(names(sketches.search("x", 9))) == ["a", "c", "d"]
    assert len(read) == 1  # the new chunk; "e" is the chunk of "a", which stands in both
    assert names(sketches.search(TEXTS["a"], 1, doc_ids={"e"})) == ["e"]


def test_chunks_without_a_sketch_come_last_and_none_at_all_is_an_error(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_over(tiny_model, TEXTS)
    plain = engine.store.meta
    first = engine.store.refs(engine.fingerprint)[0].chunk_id

    def some(chunk_id: bytes) -> ChunkMeta:
        return replace(plain(chunk_id), sketch=None) if chunk_id == first else plain(chunk_id)

    monkeypatch.setattr(engine.store, "meta", some)
    found = sketches_of(engine).search(TEXTS["b"], 3)
    assert next(c.score for c in found if c.ref.doc_id == "a") == 0.0
    assert "1 of 3 chunks have no sketch" in caplog.text
    monkeypatch.setattr(engine.store, "meta", lambda chunk_id: replace(plain(chunk_id), sketch=None))
    with pytest.raises(ValueError, match="none of the 3 chunks"):
        sketches_of(engine).search("x", 3)


def test_an_empty_store_has_no_sketches(tiny_model: LoadedModel) -> None:
    assert sketches_of(engine_over(tiny_model, {})).search("x", 3) == []


# -- fusion --------------------------------------------------------------------------------------------------------


class Listed:
    """A stage that gives chunks in a fixed order."""

    def __init__(self, engine: RagEngine, order: str, scores: Iterable[float]) -> None:
        refs = {ref.doc_id: ref for ref in engine.store.refs(engine.fingerprint)}
        self._found = [Candidate(refs[name], score) for name, score in zip(order, scores, strict=True)]

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        del text, doc_ids
        return self._found[:n]


def test_fusion_adds_reciprocal_ranks_and_what_only_fills_up_earns_nothing(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, TEXTS)
    stages = [Listed(engine, "bca", (3.0, 2.0, 0.0)), Listed(engine, "cab", (0.9, 0.8, -0.5))]
    found = Fusion(stages).search("x", 3)
    assert names(found) == ["c", "b", "a"]
    assert [c.score for c in found] == pytest.approx([1 / 62 + 1 / 61, 1 / 61 + 1 / 63, 1 / 62])
    assert names(Fusion(stages).search("x", 1)) == ["c"]
    with pytest.raises(ValueError, match="no stages"):
        Fusion([])


# -- one's own -----------------------------------------------------------------------------------------------------


LONG = "".join(f"Sentence {i} is about number {i}. " for i in range(12))


def own(engine: RagEngine, *hits: object) -> Callable[..., list[Candidate]]:
    return ForeignStage(lambda _, __: hits, engine.store, engine.fingerprint).search  # type: ignore[arg-type,return-value]


def test_passages_spans_and_chunk_ids_all_lead_to_stored_chunks(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, {"long": LONG, **TEXTS})
    refs = [ref for ref in engine.store.refs(engine.fingerprint) if ref.doc_id == "long"]
    third = refs[2]
    text = LONG[third.char_start : third.char_end]
    hits: list[object] = [
        ("long", text),
        ("long", text.strip().replace(" ", "\n  ")),
        ("long", text[5:12]),
        ("long", (third.char_start, third.char_end)),
        ("long", [third.char_start + 1, third.char_start + 2]),
        ("long", third.chunk_id),
    ]
    for hit in hits:
        found = own(engine, tuple(hit) if isinstance(hit, tuple) else hit)("x", 5)
        assert found == [Candidate(third, 1.0)]


def test_a_long_passage_stands_for_the_chunks_that_it_mostly_covers(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, {"long": LONG})
    refs = engine.store.refs(engine.fingerprint)
    passage = (refs[1].char_start - 3, refs[3].char_end)
    found = own(engine, ("long", passage))("x", 9)
    assert {candidate.ref.ordinal for candidate in found} == {1, 2, 3}
    assert len(own(engine, ("long", passage))("x", 2)) == 2
    assert [c.score for c in found] == pytest.approx([1, 1 / 2, 1 / 3])


def test_hits_outside_the_filter_are_left_out_and_repeated_ones_count_once(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, TEXTS)
    search = own(engine, ("a", TEXTS["a"]), ("b", TEXTS["b"]), ("b", TEXTS["b"]))
    assert names(search("x", 5)) == ["a", "b"]
    assert names(search("x", 5, doc_ids={"b"})) == ["b"]


@pytest.mark.parametrize(
    ("hit", "said"),
    [
        (("nowhere", "text"), "hit 1 of the first stage is in document 'nowhere', which the store .* does not hold"),
        (("a", "no such words"), "passage of 13 code points that document 'a' does not hold"),
        (("a", " "), "at str of 'a'"),
        (("a", (5, 500)), "5:500 of document 'a', which has 21 code points"),
        (("a", (3, 3)), "3:3"),
        (("a", b"\x01\x02"), "chunk 0102 of document 'a', which has no such chunk"),
        (("a", 3), "at int of 'a'; expected a pair"),
        (("a", (True, 2)), "at tuple of 'a'"),
        (("a", ""), "at str of 'a'"),
        ("a", "is a str; expected a pair"),
        (("a", "x", "y"), "is a tuple; expected a pair"),
    ],
)
def test_what_the_store_does_not_hold_is_an_error_that_says_so(tiny_model: LoadedModel, hit: object, said: str) -> None:
    engine = engine_over(tiny_model, TEXTS)
    with pytest.raises(FirstStageError, match=said):
        own(engine, hit)("x", 3)


def test_retrievers_of_both_frameworks_can_be_the_first_stage(tiny_model: LoadedModel) -> None:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from llama_index.core.base.base_retriever import BaseRetriever as NodeRetriever
    from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

    class Chain(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            del query, run_manager
            return [
                Document(page_content=TEXTS["c"], metadata={"source": "c", "file": "b"}),
                Document(page_content=TEXTS["a"], metadata={"source": "elsewhere", "file": "a"}, id="a"),
            ]

    class Nodes(NodeRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            del query_bundle
            source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="b")}
            node = TextNode(text=TEXTS["b"], relationships=source, metadata={"file": "b"})
            return [NodeWithScore(node=node, score=0.5)]

    engine = engine_over(tiny_model, TEXTS)
    found = engine.retrieve("x?", k=2, first_stage=from_langchain(Chain()))
    assert {chunk.ref.doc_id for chunk in found} == {"a", "c"}
    assert engine.retrieve("x?", k=2, first_stage=from_llama_index(Nodes()))[0].ref.doc_id == "b"
    assert engine.retrieve("x?", k=2, first_stage=from_llama_index(Nodes(), doc_id_key="file"))[0].ref.doc_id == "b"
    with pytest.raises(FirstStageError, match="code points that document 'b' does not hold"):
        engine.retrieve("x?", k=2, first_stage=from_langchain(Chain(), doc_id_key="file"))
    with pytest.raises(FirstStageError, match="give doc_id_key"):
        engine.retrieve("x?", first_stage=from_langchain(Chain(), doc_id_key="nothing"))


# -- chosen by an option -------------------------------------------------------------------------------------------


def test_a_question_may_name_its_first_stage_or_bring_it(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, TEXTS)
    assert isinstance(BM25Index(engine.store, engine.fingerprint), FirstStage)
    for choice in ("bm25", "sketch", "fusion", Listed(engine, "cab", (3, 2, 1))):
        assert len(engine.retrieve("walrus?", k=3, first_stage=choice)) == 3
    only = engine.answer("walrus?", first_stage=lambda _, __: [("c", TEXTS["c"])], abstain=False)
    assert only.stats.chunks.candidates == 1
    assert engine.answer("walrus?", first_stage=lambda _, __: []).citations == ()


def test_several_first_stages_in_a_list_are_fused(tiny_model: LoadedModel) -> None:
    """By name, as an object and as a function; nothing is scored here, so that the stage's order is seen."""
    engine = engine_over(tiny_model, TEXTS)
    listed = Listed(engine, "ba", (2, 1))
    choices = ["bm25", listed, lambda _, __: [("b", TEXTS["b"])]]
    own = ForeignStage(choices[2], engine.store, engine.fingerprint)  # type: ignore[arg-type]
    expected = Fusion([BM25Index(engine.store, engine.fingerprint), listed, own]).search("walrus?", 3)
    found = engine.retrieve("walrus?", k=3, candidates=3, score_window=float("inf"), first_stage=choices)
    assert [one.ref for one in found] == [one.ref for one in expected]
    assert [one.ref.doc_id for one in engine.retrieve("walrus?", k=1, candidates=1, first_stage=(listed,))] == ["b"]


def test_a_stage_that_repeats_itself_or_gives_too_many_is_refused(tiny_model: LoadedModel) -> None:
    engine = engine_over(tiny_model, TEXTS)
    with pytest.raises(FirstStageError, match="gave 3 chunks, 2 of them distinct"):
        engine.retrieve("walrus?", first_stage=Listed(engine, "aab", (3, 2, 1)))

    class Generous(Listed):
        def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
            return super().search(text, n + 2, doc_ids=doc_ids)

    with pytest.raises(FirstStageError, match="at most 1 distinct"):
        engine.retrieve("walrus?", k=1, candidates=1, first_stage=Generous(engine, "cab", (3, 2, 1)))


@pytest.mark.parametrize("choice", ["BM25", "", 3, None, [], ["bm25", "BM25"]])
def test_an_unknown_first_stage_is_refused(tiny_model: LoadedModel, choice: object) -> None:
    engine = engine_over(tiny_model, TEXTS)
    with pytest.raises(ValueError, match="expected one of bm25, sketch, fusion"):
        engine.retrieve("walrus?", first_stage=choice)
