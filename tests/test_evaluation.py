from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdllm_store import MemoryStore

from pdllm_rag.answer import Answer, AnswerStats, ChunkCounts
from pdllm_rag.cli import eval as cli
from pdllm_rag.clock import PHASES
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation import ask_all, grade, read_questions, summary
from pdllm_rag.evaluation.metrics import (
    contained,
    exact_match,
    first_rank,
    mean,
    normalised,
    percentile,
    proportion,
    token_f1,
)
from pdllm_rag.evaluation.qa import by_min_support
from pdllm_rag.models import LoadedModel
from pdllm_rag.prefill import InputDocument

TEXTS = {
    "buoys.md": "The Gannet buoy weighs 84 kilograms and reports the wind every ten minutes.",
    "leave.md": "A full-time employee gets 28 days of paid annual leave under the policy of 2025.",
    "offices.md": "The office in Porto opens at nine; the harbour master has the only key.",
}
ROWS = [
    {
        "id": "q1",
        "question": "How heavy is the Gannet buoy?",
        "answers": ["84 kilograms", "84"],
        "doc_ids": ["buoys.md"],
        "kind": "answerable",
    },
    {
        "id": "q2",
        "question": "How many days of annual leave are there?",
        "answers": ["28 days"],
        "doc_ids": ["leave.md"],
        "kind": "answerable",
    },
    {"id": "u1", "question": "Who wrote Hamlet?", "answers": [], "doc_ids": [], "kind": "unrelated"},
    {
        "id": "n1",
        "question": "How heavy is the office in Porto?",
        "answers": [],
        "doc_ids": [],
        "kind": "near_miss",
    },
]


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(), tiny_model) as opened:
        opened.prefill([InputDocument(doc_id, text, doc_id) for doc_id, text in TEXTS.items()])
        yield opened


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", *ROWS)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def an_answer(text: str, *, supported: bool = True, support: float | None = None, ms: float = 5.0) -> Answer:
    phases = {**dict.fromkeys(PHASES, 1.0), "total": ms}
    counts = ChunkCounts(0, 0, 0)
    stats = AnswerStats(3, 1, 1, 1, 1, phases, counts, "independent", "static_kv", "tiny", "stop", supported, support)
    return Answer(text, (), stats)


# -- metrics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Gannet, a buoy.", ["gannet", "buoy"]),
        ("€145", ["145"]),
        ("12,500 euros", ["12500", "euros"]),
        ("  31\tMarch\n2025 ", ["31", "march", "2025"]),
        ("Skerrywick’s “key”", ["skerrywicks", "key"]),
        ("theatre", ["theatre"]),
        ("the", []),
    ],
)
def test_normalisation_folds_case_punctuation_articles_and_white_space(text: str, words: list[str]) -> None:
    assert normalised(text) == words


def test_exact_match_sees_through_spelling_only() -> None:
    assert exact_match("The 145 euros.", "145 Euros")
    assert not exact_match("145 euros a night", "145 euros")


def test_token_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    assert token_f1("28 days", "28 days") == 1
    assert token_f1("28 days of leave", "28 days") == pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1))
    assert token_f1("28 28 28", "28 days") == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert token_f1("none", "28 days") == 0
    assert token_f1("", "28 days") == 0
    assert token_f1("the", "a") == 1


def test_containment_is_of_whole_words_in_one_run() -> None:
    assert contained("It is 28 days in all", "28 days")
    assert contained("by 31 March, 2025", "31 March 2025")
    assert not contained("128 days", "28 days")
    assert not contained("28 working days", "28 days")
    assert not contained("days 28", "28 days")
    assert not contained("28", "28 days")
    assert not contained("anything", "€")


def test_the_best_accepted_answer_counts() -> None:
    graded = grade("it weighs 84", ["84 kilograms", "84"])
    assert (graded.exact, graded.contained, graded.correct) == (False, True, True)
    assert graded.f1 == pytest.approx(0.5)
    assert grade("anything", []) == (False, False, 0.0)


def test_rank_is_of_the_first_relevant_document() -> None:
    assert first_rank(["a", "b", "c"], {"c", "b"}) == 2
    assert first_rank(["a"], {"b"}) is None


def test_wilson_interval_equals_the_published_one() -> None:
    estimate = proportion([True] * 8 + [False] * 2)
    assert estimate is not None
    assert estimate == pytest.approx((0.8, 0.490, 0.943), abs=1e-3)
    every, none = proportion([True] * 14), proportion([False] * 14)
    assert every is not None
    assert none is not None
    assert every == pytest.approx((1.0, 0.785, 1.0), abs=1e-3)
    assert none == pytest.approx((0.0, 0.0, 0.215), abs=1e-3)
    assert proportion([]) is None


def test_bootstrap_interval_is_repeatable_and_holds_the_mean() -> None:
    values = [0.0, 0.2, 0.4, 1.0, 1.0, 0.9, 0.1] * 10
    estimate = mean(values)
    assert estimate is not None
    assert estimate == mean(values)
    assert estimate.low < estimate.value < estimate.high
    # About 1.96 standard errors to each side.
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.406 / 70**0.5, rel=0.1)
    assert mean([0.5] * 3) == (0.5, 0.5, 0.5)
    assert mean([]) is None


def test_percentile_interpolates_between_neighbours() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([1, 2], 90) == pytest.approx(1.9)
    assert percentile([7], 90) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


# -- the file ------------------------------------------------------------------------------------------------


def test_questions_are_read_with_their_kinds(data: Path) -> None:
    questions = read_questions(data)
    assert [q.id for q in questions] == ["q1", "q2", "u1", "n1"]
    assert [q.kind for q in questions] == ["answerable", "answerable", "unrelated", "near_miss"]
    assert questions[0].answers == ("84 kilograms", "84")
    assert len(read_questions(data, limit=2)) == 2


def test_a_row_with_an_answer_and_no_kind_is_answerable(tmp_path: Path) -> None:
    row = {"context": "Porto opens at nine.", "question": "When does Porto open?", "answer": "nine"}
    (question,) = read_questions(write(tmp_path / "q.jsonl", row))
    assert (question.id, question.kind, question.answers) == ("1", "answerable", ("nine",))
    assert question.context == row["context"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "Expecting"),
        (b"[1]", "list"),
        (b"\xff\xfe{}", "line 2"),
        (b'{"question": " ", "answers": ["x"]}', "question"),
        (b'{"question": "x"}', "kind is None"),
        (b'{"question": "x", "kind": "other", "answers": ["x"]}', "kind is 'other'"),
        (b'{"question": "x", "kind": "answerable", "answers": []}', "0 answers"),
        (b'{"question": "x", "kind": "unrelated", "answers": ["x"]}', "1 answers"),
        (b'{"question": "x", "answers": [28]}', "answers is"),
        (b'{"question": "x", "answer": ""}', "answer is"),
        (b'{"question": "x", "answer": "y", "doc_ids": {"a": 1}}', "doc_ids is"),
        (b'{"question": "x", "answer": "y", "context": 3}', "context is int"),
    ],
)
def test_a_malformed_line_is_named_with_file_and_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "x", "answer": "y"}\n' + line + b"\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        read_questions(path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


def test_a_file_without_questions_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(path)


# -- asking --------------------------------------------------------------------------------------------------


def test_every_question_is_asked_over_the_store(engine: RagEngine, data: Path) -> None:
    outcomes = list(ask_all(engine, read_questions(data), AskOptions(k=1, candidates=3, max_new_tokens=4)))
    assert [o.question.id for o in outcomes] == ["q1", "q2", "u1", "n1"]
    for outcome in outcomes[:2]:
        assert outcome.retrieved is not None
        assert set(outcome.retrieved) == set(TEXTS)
        assert outcome.bm25 is not None
        assert outcome.bm25[0] == outcome.question.doc_ids[0]
    assert outcomes[2].retrieved is None
    assert outcomes[0].stats.ms["total"] > 0
    json.dumps([o.as_dict() for o in outcomes])


def test_refusals_are_wrong_and_asked_again_without_abstaining(
    engine: RagEngine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(text: str, *, options: AskOptions, context: str | None, **changes: Any) -> Answer:
        assert context is None
        asked.append((text, options.with_changes(changes).abstain))
        if "buoy" in text and options.with_changes(changes).abstain:
            return an_answer("84 is not found", supported=False, support=0.1)
        if "buoy" in text:
            return an_answer("84 kilograms")
        if "Hamlet" in text:
            return an_answer("Not found.", supported=False, support=0.2)
        return an_answer("28 days or so", support=0.9, ms=9.0)

    monkeypatch.setattr(engine, "answer", answer)
    outcomes = list(ask_all(engine, read_questions(data), AskOptions()))
    assert [text for text, abstain in asked if not abstain] == [ROWS[0]["question"], ROWS[2]["question"]]
    figures = summary(outcomes)
    answerable = figures["answerable"]
    assert answerable["n"] == answerable["n_retrieval"] == 2
    assert answerable["accuracy"]["value"] == 0.5
    assert answerable["accuracy_without_abstaining"]["value"] == 1.0
    assert answerable["exact"]["value"] == 0.0
    assert answerable["f1"]["value"] == pytest.approx((0 + 2 / 3) / 2)
    assert answerable["false_refusals"]["value"] == 0.5
    assert figures["unrelated"] == {
        "n": 1,
        "refused": pytest.approx({"value": 1, "low": 0.207, "high": 1}, abs=0.001),
    }
    assert figures["near_miss"]["refused"]["value"] == 0
    assert figures["ms"]["median"] == 7
    assert figures["ms"]["p90"] == 9
    assert figures["ms"]["phases"] == dict.fromkeys(PHASES, 1.0)
    assert figures["nfe"] == {"median": 3, "p90": 3}
    # The buoy has support 0.1 and an answer, Hamlet 0.2 and none; the others 0.9 and one.
    by = {row["min_support"]: row for row in by_min_support(outcomes)}
    refused = {
        least: tuple(by[least][kind]["value"] for kind in ("answerable", "unrelated", "near_miss"))
        for least in (0.0, 0.1, 0.2, 0.9, 0.95)
    }
    assert refused == {0.0: (0, 1, 0), 0.1: (0, 1, 0), 0.2: (0.5, 1, 0), 0.9: (0.5, 1, 0), 0.95: (1, 1, 1)}
    assert [by[least]["accuracy"]["value"] for least in (0.0, 0.2, 0.95)] == [1.0, 0.5, 0.0]


def test_retrieval_for_the_figures_comes_after_the_answer(
    engine: RagEngine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    answer, retrieve = engine.answer, engine.retrieve
    monkeypatch.setattr(engine, "answer", lambda *a, **k: calls.append("answer") or answer(*a, **k))
    monkeypatch.setattr(engine, "retrieve", lambda *a, **k: calls.append("retrieve") or retrieve(*a, **k))
    list(ask_all(engine, read_questions(data, limit=1), AskOptions(max_new_tokens=2, abstain=False)))
    assert calls == ["answer", "retrieve"]


def test_a_context_is_read_instead_of_the_store(engine: RagEngine, tmp_path: Path) -> None:
    row = {"context": "Porto opens at nine.", "question": "When does Porto open?", "answer": "nine"}
    (outcome,) = ask_all(engine, read_questions(write(tmp_path / "q.jsonl", row)), AskOptions(max_new_tokens=2))
    assert outcome.stats.context_tokens == len(row["context"]) + 1
    assert outcome.retrieved is None
    assert summary([outcome])["answerable"]["recall_at_1"] is None


def test_a_store_without_the_named_documents_is_refused(engine: RagEngine, tmp_path: Path) -> None:
    rows = [{"question": "Where?", "answer": "there", "doc_ids": [f"handbook/{d}"]} for d in TEXTS]
    questions = read_questions(write(tmp_path / "q.jsonl", *rows))
    with pytest.raises(ValueError, match=r"none of the 3 documents .*handbook/buoys\.md"):
        next(iter(ask_all(engine, questions, AskOptions())))


def test_a_few_missing_documents_draw_a_warning(
    engine: RagEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question": "Where?", "answer": "there", "doc_ids": ["gone.md", "leave.md"]}
    questions = read_questions(write(tmp_path / "q.jsonl", row))
    with caplog.at_level(logging.WARNING):
        list(ask_all(engine, questions, AskOptions(max_new_tokens=1)))
    assert "1 of 2 documents" in caplog.text


def test_nothing_asked_gives_no_summary() -> None:
    with pytest.raises(ValueError, match="no outcomes"):
        summary([])


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(engine: RagEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line against the engine's store and model, whatever they are called there."""
    opened = RagEngine.open
    monkeypatch.setattr(
        RagEngine,
        "open",
        lambda store, *_, **__: opened(store if isinstance(store, MemoryStore) else engine.store, engine.model),
    )

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["eval", "qa", *argv])
        status: int = args.run(args)
        return status

    return run


def test_json_is_one_object_of_the_stable_form_and_kept_outcomes_give_it_again(
    command: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    details = tmp_path / "details.jsonl"
    assert command("--data", str(data), "--store", "kb", "--json", "--details", str(details)) == 0
    figures = json.loads(capsys.readouterr().out)
    rest = ("by_min_support", "settings", "machine")
    assert list(figures) == ["data", "n", "answerable", "unrelated", "near_miss", "nfe", "ms", *rest]
    assert figures["n"] == 4
    measures = {"accuracy", "exact", "f1", "recall_at_1", "recall_at_4", "mrr", "false_refusals"}
    measures |= {"bm25_recall_at_1", "bm25_recall_at_4", "accuracy_without_abstaining"}
    assert set(figures["answerable"]) == {"n", "n_retrieval"} | measures
    assert all(set(figures["answerable"][name]) == {"value", "low", "high"} for name in measures)
    assert set(figures["unrelated"]) == set(figures["near_miss"]) == {"n", "refused"}
    assert set(figures["ms"]) == {"median", "p90", "phases"}
    assert figures["settings"]["decoder"] == "static_kv"
    assert figures["settings"]["k"] == 4
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["q1", "q2", "u1", "n1"]
    monkeypatch.setattr(RagEngine, "answer", None)  # nothing is asked again
    assert command("--data", str(data), "--store", "kb", "--json", "--details", str(details)) == 0
    assert json.loads(capsys.readouterr().out) == figures


def test_the_table_names_every_measure(command: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--data", str(data), "--store", "kb", "--limit", "3") == 0
    out = capsys.readouterr().out
    for label in (
        *dict(cli.ANSWERABLE_ROWS).values(),
        "unrelated",
        "near miss",
        "forward passes",
        "decode ms",
    ):
        assert label in out


def test_refusals_are_drawn_where_both_kinds_are_asked(
    command: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "refusals.png"
    argv = ("--store", "kb", "--min-support", "0.3", "--json", "--plot", str(picture), "--data")
    assert command(*argv, str(data)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out)["settings"]["min_support"] == 0.3
    with pytest.raises(ValueError, match="only one of the two"):
        command(*argv, str(write(tmp_path / "q.jsonl", *ROWS[:2])))


def test_no_store_is_needed_for_questions_with_contexts(
    command: Any, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"context": "Porto opens at nine.", "question": "When does Porto open?", "answer": "nine"}
    assert command("--data", str(write(tmp_path / "q.jsonl", row)), "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["store"] == ":memory:"
    with pytest.raises(ValueError, match="--store is missing"):
        command("--data", str(data))
