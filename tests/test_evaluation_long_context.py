"""`pdllm eval longbench|infinitebench`: metrics by hand, files that are wrong, and runs that are taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Pdllm, one_line, one_object
from pdllm_store import MemoryStore

from pdllm_rag.answer import Answer
from pdllm_rag.cli import eval_long_context as cli
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.errors import ContextWindowError
from pdllm_rag.evaluation import longbench
from pdllm_rag.evaluation.infinitebench import INFINITEBENCH
from pdllm_rag.evaluation.long_context import Benchmark, Sample, read_samples, task_files
from pdllm_rag.evaluation.long_context_asking import ask_samples, summary
from pdllm_rag.evaluation.longbench import LONGBENCH
from pdllm_rag.models import LoadedModel

BENCHMARKS = {"longbench": LONGBENCH, "infinitebench": INFINITEBENCH}
OPTIONS = AskOptions(k=2, candidates=3, score_window=float("inf"))
FLAGS = ("--chunk-len", "64", "--k", "2", "--max-new-tokens", "4")

QA_ROWS: list[dict[str, Any]] = [
    {
        "input": "How heavy is the Gannet buoy?",
        "context": "".join(f"The Gannet buoy {i} weighs {80 + i} kilograms. " for i in range(6)),
        "answers": ["84 kilograms", "84"],
        "length": 40,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "first",
    },
    {
        "input": "Wie öffnet man das Büro?",
        "context": "".join(f"Das Büro {i} in Porto öffnet um neun – „früh“. 東京も。 " for i in range(6)),
        "answers": ["um neun"],
        "length": 50,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "second",
    },
]
KEY_ROWS: list[dict[str, Any]] = [
    {"id": i, "context": f"Grass is green. The pass key is {key}. " * 5, "input": "What is it?", "answer": [key]}
    for i, key in enumerate(("01234", "56789"))
]


def write(folder: Path, task: str, *rows: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def samples_of(benchmark: Benchmark, folder: Path) -> list[Sample]:
    return list(read_samples(benchmark, task_files(benchmark, folder, None)))


def a_sample(*answers: Any, choices: tuple[str, ...] = ()) -> Sample:
    return Sample("task", "1", "context", "query", "prompt", answers, choices)


# -- metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The 28 days.", "28 days", 1),
        ("28 days of leave", "28 days", 2 * 2 / (4 + 2)),
        ("28 28", "28 days", 2 * 1 / (2 + 2)),
        ("", "28 days", 0),
        ("the", "a", 0),  # no words on either side is no match here
        ("“früh”", "früh", 0),  # only ASCII punctuation is taken out
        ("Café, naïve!", "café naïve", 1),
    ],
)
def test_qa_f1(prediction: str, answer: str, score: float) -> None:
    assert longbench.qa_f1(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "precision", "recall"),
    [
        ("one two three", "one three", 2 / 3, 1),
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 4 / 8, 4 / 5),  # the union of both sentences
        ("three one", "one three", 1 / 2, 1 / 2),
        ("one one one", "one", 1, 1),  # a word counts once
        ("one. two. one", "two. one", 1, 1),
        ("日本 東京", "日本", 1 / 2, 1),
        ("One", "one", 0, 0),
    ],
)
def test_rouge_l(prediction: str, answer: str, precision: float, recall: float) -> None:
    both = precision + recall
    score = 2 * precision * recall / both if both else 0
    assert longbench.rouge_l(prediction, answer) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize(("prediction", "answer"), [("", "one"), ("...", "one"), ("one", ""), ("", "")])
def test_rouge_l_of_nothing_is_0(prediction: str, answer: str) -> None:
    assert longbench.rouge_l(prediction, answer) == 0


def test_a_summary_of_thousands_of_words_is_scored() -> None:
    words = " ".join(str(number) for number in range(1500))
    assert longbench.rouge_l(words, words) == pytest.approx(1)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Other number", 1),  # "number" is part of the right one
        ("Other number or Date", 1 / 2),
        ("Date", 0),
        ("", 0),
        ("number", 0),
    ],
)
def test_classification(prediction: str, score: float) -> None:
    assert longbench.classification(prediction, "Other number", ("number", "Other number", "Date")) == score


def test_classification_passes_over_the_name_behind_one_that_it_removes() -> None:
    assert longbench.classification("abc", "abc", ("a", "ab", "abc")) == 1 / 2


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "score"),
    [
        (longbench.count, "12", "12", 1),
        (longbench.count, "between 12 and 13, so 12", "12", 2 / 3),
        (longbench.count, "none", "12", 0),
        (longbench.count, "012", "12", 0),
        (longbench.retrieval, "Paragraph 7", "Paragraph 7", 1),
        (longbench.retrieval, "Paragraph 7 or 17", "Paragraph 7", 1 / 2),
        (longbench.retrieval, "", "Paragraph 7", 0),
        (longbench.code_similarity, "\n\nreturn x\n# and so on", "return x", 1),
        (longbench.code_similarity, "```python\n# first\nreturn y", "return x", 0.88),  # 2 * 7 / 16 in hundredths
        (longbench.code_similarity, "// nothing else", "return x", 0),
        (longbench.code_similarity, "", "return x", 0),
    ],
)
def test_counts_and_code(metric: Any, prediction: str, answer: str, score: float) -> None:
    assert metric(prediction, answer) == pytest.approx(score)


def test_an_answer_without_a_paragraph_is_refused() -> None:
    with pytest.raises(ValueError, match="expected such as 'Paragraph 12'"):
        longbench.retrieval("Paragraph 7", "7")


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "score"),
    [
        ("hotpotqa", "84", ("84 kilograms", "84"), 1),  # the best of several answers
        ("hotpotqa", "84\nand more", ("84",), 2 / 4),
        ("triviaqa", "\n84\nPassage: more", ("84",), 1),  # of few-shot tasks the first line counts
        ("samsum", "", ("They meet.",), 0),
        ("trec", "Date\nType: number", ("Date",), 1),
        ("passage_count", "7", (7,), 1),
    ],
)
def test_longbench_tasks_take_the_best_answer(task: str, prediction: str, answers: Any, score: float) -> None:
    sample = a_sample(*answers, choices=("Date", "number"))
    assert LONGBENCH.tasks[task].metric(prediction, sample) == pytest.approx(score)


TWO = ("Avonlea", "Carmody", "Bolingbroke", "White Sands")


@pytest.mark.parametrize(
    ("task", "prediction", "sample", "score"),
    [
        ("passkey", " 01234.", a_sample("01234"), 1),
        ("passkey", "1234", a_sample("01234"), 0),
        ("passkey", "key 9, then 01234", a_sample("01234"), 0),
        ("number_string", "", a_sample("7"), 0),
        ("kv_retrieval", 'the value: "ab-12".', a_sample("ab-12"), 1),
        ("kv_retrieval", "ab-123", a_sample("ab-12"), 0),
        ("longbook_choice_eng", "B. Carmody", a_sample("Carmody", choices=TWO), 1),
        ("longbook_choice_eng", "B", a_sample("Carmody", "B"), 1),
        ("longbook_choice_eng", "Bolingbroke", a_sample("Carmody", choices=TWO), 1),  # the official first letter
        ("longbook_choice_eng", "Avonlea", a_sample("Avonlea", "C"), 0),
        ("longbook_choice_eng", "White Sands", a_sample("White Sands", choices=TWO), 1),
        ("longbook_choice_eng", "I say the answer is: Carmody", a_sample("Carmody", choices=TWO), 1),
        ("longbook_choice_eng", "surely C then", a_sample("Carmody", choices=TWO), 0),
        ("longbook_choice_eng", "", a_sample("Carmody", choices=TWO), 0),
        ("math_find", "it is 83", a_sample(83), 1),
        ("math_find", "83.5", a_sample(83), 0),
        ("math_find", "-2.5", a_sample(2.5), 1),
        ("code_debug", "C. run", a_sample("run", choices=("a", "b", "run", "d")), 1),
        ("code_debug", "C", a_sample("run", "C"), 0),  # official: a letter alone is none
        ("code_debug", "the answer is: `run`", a_sample("run", "C"), 1),
        ("longbook_qa_eng", "the sea", a_sample("a lake", "sea"), 1),
        ("longdialogue_qa_eng", "It is Bob!", a_sample("BOB"), 1),
        ("code_run", "The value is -8.", a_sample(-8), 1),
        ("code_run", "-8 is it", a_sample(-8), 0),
    ],
)
def test_infinitebench_tasks(task: str, prediction: str, sample: Sample, score: float) -> None:
    assert INFINITEBENCH.tasks[task].metric(prediction, sample) == score


@pytest.mark.parametrize(
    ("task", "sample", "problem"),
    [
        ("longbook_choice_eng", a_sample("Paris", choices=TWO), "expected one of its four options"),
        ("math_find", a_sample("many"), "expected a number"),
    ],
)
def test_answers_that_a_metric_cannot_take_are_refused(task: str, sample: Sample, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        INFINITEBENCH.tasks[task].metric("1 x", sample)


def test_the_papers_tasks_are_here() -> None:
    assert len(LONGBENCH.tasks) == 16
    six = {"passkey", "number_string", "kv_retrieval", "longbook_choice_eng", "math_find", "code_debug"}
    assert six <= set(INFINITEBENCH.tasks)  # that Prefilling-dLLM (arXiv 2606.10537) averages over
    assert {cli_name: benchmark.name for cli_name, benchmark in BENCHMARKS.items()} == cli.BENCHMARKS


# -- files -------------------------------------------------------------------------------------------------------


def test_a_sample_has_its_prompt_and_its_query(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", QA_ROWS[0], "", QA_ROWS[1])
    write(tmp_path, "lcc", {**QA_ROWS[0], "input": "", "context": "x = 1\n" * 200})
    write(tmp_path, "gov_report", {**QA_ROWS[0], "input": ""})
    samples = list(read_samples(LONGBENCH, task_files(LONGBENCH, tmp_path, None)))
    assert [(sample.task, sample.id) for sample in samples] == [
        ("hotpotqa", "first"),
        ("hotpotqa", "second"),
        ("gov_report", "first"),
        ("lcc", "first"),
    ]
    assert samples[1].query == QA_ROWS[1]["input"]
    assert samples[1].prompt.endswith(f"Question: {QA_ROWS[1]['input']}\nAnswer:")
    assert samples[2].query == samples[2].prompt
    assert samples[3].query == ("x = 1\n" * 200)[-400:].strip()
    assert len(list(read_samples(LONGBENCH, task_files(LONGBENCH, tmp_path, ["hotpotqa"]), limit=1))) == 1


def test_options_stand_in_the_prompt_with_their_letters(tmp_path: Path) -> None:
    row = {"id": 1, "context": "A {book}.", "input": "Where?", "answer": "Carmody", "options": list(TWO)}
    (sample,) = read_samples(
        INFINITEBENCH, task_files(INFINITEBENCH, write(tmp_path, "longbook_choice_eng", row), None)
    )
    assert "\nA. Avonlea\nB. Carmody\nC. Bolingbroke\nD. White Sands\n" in sample.prompt
    assert (sample.context, sample.answers, sample.choices) == ("A {book}.", ("Carmody",), TWO)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 2: Expecting"),
        ([1], "line 2: got list, expected a JSON object"),
        ({**QA_ROWS[1], "context": 7}, "line 2: context is 7, expected some text"),
        ({**QA_ROWS[1], "context": " \n"}, "line 2: context is str"),
        ({**QA_ROWS[1], "input": None}, "line 2: input is None, expected text"),
        ({**QA_ROWS[1], "answers": []}, r"line 2: answers is list \[\], expected a text or number"),
        ({**QA_ROWS[1], "answers": [None]}, "line 2: answers is list"),
        ({**QA_ROWS[1], "all_classes": "Date"}, "line 2: all_classes is str 'Date', expected a list of texts"),
        ({**QA_ROWS[1], "_id": "first"}, "line 2: _id is 'first' again"),
    ],
)
def test_a_bad_line_says_which_and_why(tmp_path: Path, row: Any, problem: str) -> None:
    files = task_files(LONGBENCH, write(tmp_path, "hotpotqa", QA_ROWS[0], row), None)
    with pytest.raises(ValueError, match=problem):
        list(read_samples(LONGBENCH, files))


def test_missing_files_and_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no task of LongBench; expected files such as narrativeqa\.jsonl"):
        task_files(LONGBENCH, tmp_path, None)
    write(tmp_path, "hotpotqa")
    with pytest.raises(ValueError, match=r"qasper\.jsonl is no file"):
        task_files(LONGBENCH, tmp_path, ["hotpotqa", "qasper"])
    with pytest.raises(ValueError, match="LongBench has no task 'dureader' here; expected some of narrativeqa"):
        task_files(LONGBENCH, tmp_path, ["dureader"])
    with pytest.raises(ValueError, match="holds no samples"):
        list(read_samples(LONGBENCH, task_files(LONGBENCH, tmp_path, None)))


# -- asking ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(), tiny_model, chunk_len=64) as opened:
        yield opened


@pytest.mark.parametrize("keep", [True, False])
def test_a_sample_reads_its_own_context_only(
    engine: RagEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    samples = samples_of(LONGBENCH, write(tmp_path, "hotpotqa", *QA_ROWS, {**QA_ROWS[1], "_id": "third"}))
    answer, asked = engine.answer, []

    def listening(question: str, **options: Any) -> Answer:
        asked.append((question, options))
        return answer(question, **options)

    monkeypatch.setattr(engine, "answer", listening)
    results, stored = [], []
    for result in ask_samples(engine, LONGBENCH, samples, OPTIONS, max_new_tokens=4, keep=keep):
        results.append(result)
        stored.append(len(engine.documents()))
    assert stored == ([1, 2, 2] if keep else [1, 1, 1])
    assert [question for question, _ in asked] == [sample.prompt for sample in samples]
    for result, sample, (_, options) in zip(results, samples, asked, strict=True):
        read = [engine.store.meta(chunk_id).token_ids[1:].tolist() for chunk_id in options["chunk_ids"] if keep]
        assert all(engine.model.tokenizer.decode(ids) in sample.context for ids in read)
        assert result.n_chunks == len(options["chunk_ids"]) == OPTIONS.k
        assert result.score == LONGBENCH.tasks["hotpotqa"].metric(result.prediction, sample)
        assert not options["options"].abstain
        assert result.document_tokens > result.context_tokens > 0


@pytest.mark.parametrize("score_window", [0.0, float("inf")])
def test_where_prompt_and_query_are_one_the_engine_reads_the_same(
    engine: RagEngine, tmp_path: Path, score_window: float
) -> None:
    row = {"id": 1, "context": QA_ROWS[0]["context"], "input": QA_ROWS[0]["input"], "answer": "84"}
    options = OPTIONS.with_changes({"score_window": score_window, "max_new_tokens": 6, "abstain": False})
    samples = samples_of(INFINITEBENCH, write(tmp_path, "kv_retrieval", row))
    (result,) = ask_samples(engine, INFINITEBENCH, samples, options, max_new_tokens=6)
    answer = engine.answer(row["input"], options=options)
    assert result.n_chunks == answer.stats.chunks.hit == (1 if score_window == 0 else OPTIONS.k)
    assert result.prediction == (answer.text if answer.stats.tokens else "")
    assert (result.nfe, result.context_tokens) == (answer.stats.nfe, answer.stats.context_tokens)


def test_the_first_stages_ranking_counts_as_much_as_is_asked(
    engine: RagEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = list(samples_of(LONGBENCH, write(tmp_path, "hotpotqa", *QA_ROWS)))
    answer, read = engine.answer, []

    def listening(question: str, **options: Any) -> Answer:
        read.append(options["chunk_ids"])
        return answer(question, **options)

    monkeypatch.setattr(engine, "answer", listening)
    for rank_weight, candidates in ((1e6, 8), (0.0, 1), (0.0, 8)):  # a weight as large as this leaves BM25's order
        options = OPTIONS.with_changes({"k": 1, "rank_weight": rank_weight, "candidates": candidates})
        list(ask_samples(engine, LONGBENCH, samples, options, max_new_tokens=1, keep=True))
    n = len(samples)
    assert read[:n] == read[n : 2 * n] != read[2 * n :]


def test_tasks_have_their_own_lengths_of_answers(
    engine: RagEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    answer = engine.answer

    def short(question: str, *, options: AskOptions, **others: Any) -> Answer:
        lengths.append(options.max_new_tokens)
        return answer(question, options=options, **others, max_new_tokens=1)

    monkeypatch.setattr(engine, "answer", short)
    write(tmp_path, "hotpotqa", QA_ROWS[0])
    list(ask_samples(engine, LONGBENCH, samples_of(LONGBENCH, write(tmp_path, "qmsum", QA_ROWS[0])), OPTIONS))
    assert lengths == [32, 512]


def test_what_does_not_fit_is_left_out(engine: RagEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {**QA_ROWS[0], "input": "begin " + "word " * 2000 + "end?"}
    samples = samples_of(LONGBENCH, write(tmp_path, "hotpotqa", long))
    answer, n_chunks = engine.answer, []

    def narrow(question: str, *, chunk_ids: Any, **options: Any) -> Answer:
        n_chunks.append(len(chunk_ids))
        if len(chunk_ids) > 1:
            raise ContextWindowError("does not fit")
        assert len(engine.model.tokenizer.encode(question)) <= engine.model.spec.family.window // 2
        assert question.startswith("Answer the question")
        assert question.endswith("end?\nAnswer:")
        return answer(question, chunk_ids=chunk_ids, **options)

    monkeypatch.setattr(engine, "answer", narrow)
    (result,) = ask_samples(engine, LONGBENCH, samples, OPTIONS, max_new_tokens=4)
    assert n_chunks == [2, 1]
    assert result.n_chunks == 1
    with pytest.raises(ContextWindowError, match="Lower --max-new-tokens"):
        list(ask_samples(engine, LONGBENCH, samples, OPTIONS, max_new_tokens=100_000))


# -- a whole run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "task", "rows"), [("longbench", "hotpotqa", QA_ROWS), ("infinitebench", "passkey", KEY_ROWS)]
)
def test_a_run_is_taken_up_where_it_was_left(
    pdllm: Pdllm, tiny_model_path: Path, tmp_path: Path, command: str, task: str, rows: list[dict[str, Any]]
) -> None:
    data, out = write(tmp_path / "data", task, *rows), tmp_path / "results.jsonl"
    run = ("eval", command, "--data", data, "--model", tiny_model_path, *FLAGS, "--out", out, "--json")
    first = one_object(pdllm(*run, "--limit", 1))
    assert (first["n"], list(first["tasks"]), first["limit"]) == (1, [task], 1)
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1
    out.write_bytes(b"".join(lines) + b'{"task": "hot')  # killed while it wrote
    both = one_object(pdllm(*run))
    again = one_object(pdllm(*run))
    assert both["n"] == both["tasks"][task]["n"] == 2
    assert again["tasks"] == both["tasks"]  # times as well: nothing was asked again
    assert len(both["left_out"]) == len(BENCHMARKS[command].tasks) - 1
    results = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert out.read_bytes().startswith(b"".join(lines))
    assert len(results) == 2
    scores = [
        BENCHMARKS[command].tasks[task].metric(result["prediction"], sample)
        for result, sample in zip(results, samples_of(BENCHMARKS[command], data), strict=True)
    ]
    assert [result["score"] for result in results] == scores
    assert both["average"] == pytest.approx(50 * sum(scores))
    assert both["settings"]["max_new_tokens"] == 4
    assert f"{out}, line 1: of another run, with k 2, and it is 3 now" in one_line(pdllm(*run, "--k", 3))
    out.write_text("{}\n")
    assert "line 1: KeyError('task'); expected a line of an earlier run" in one_line(pdllm(*run))


def test_the_table_says_how_many_tasks_the_average_is_of(pdllm: Pdllm, tiny_model_path: Path, tmp_path: Path) -> None:
    data, store = write(tmp_path / "data", "passkey", *KEY_ROWS), tmp_path / "kb"
    run = ("eval", "infinitebench", "--data", data, "--model", tiny_model_path, *FLAGS, "--store", store)
    outcome = pdllm(*run)
    assert outcome.status == 0
    assert "passkey" in outcome.out
    assert "average of 1 of 9" in outcome.out
    listed = one_object(pdllm("store", "list", "--store", store, "--json"))
    assert len(listed["documents"]) == 2
    assert "has no task 'nothing'" in one_line(pdllm(*run, "--tasks", "nothing"))


def test_no_results_are_not_summarised() -> None:
    with pytest.raises(ValueError, match="no results"):
        summary([])
