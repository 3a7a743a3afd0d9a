"""`pdllm eval reuse`: every way reads the same chunks as the engine would, and is compared question by question."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pdllm_store import KV_DTYPES, MemoryStore

from pdllm_rag.cli import eval as cli
from pdllm_rag.cli import eval_reuse
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.errors import ContextWindowError
from pdllm_rag.evaluation import grade, read_questions
from pdllm_rag.evaluation.qa import Question
from pdllm_rag.evaluation.reuse import FACTORS, Item, Outcome, Reader, Way, compare, select, summary
from pdllm_rag.evaluation.twohop import KINDS
from pdllm_rag.models import LoadedModel
from pdllm_rag.prefill import InputDocument

TEXTS = {
    "buoys.md": "The Gannet buoy weighs 84 kilograms and reports the wind every ten minutes.",
    "leave.md": "A full-time employee gets 28 days of paid annual leave under the policy of 2025.",
    "offices.md": "The office in Porto opens at nine; the harbour master has the only key.",
}
ROWS = [
    {"question": "How heavy is the Gannet buoy?", "answers": ["84"], "doc_ids": ["buoys.md"]},
    {"question": "How many days of leave are there?", "answers": ["28"], "doc_ids": ["leave.md"]},
    {"question": "Who wrote Hamlet?", "kind": "unrelated"},
]
OPTIONS = AskOptions(k=2, candidates=2, max_new_tokens=4, abstain=False)
CHUNK_LEN = 48


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    folder = tmp_path / "handbook"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, options=OPTIONS, chunk_len=CHUNK_LEN) as opened:
        opened.prefill([InputDocument(doc_id, text, doc_id) for doc_id, text in TEXTS.items()])
        yield opened


@pytest.fixture
def reader(tiny_model: LoadedModel) -> Reader:
    return Reader(tiny_model, OPTIONS, chunk_len=CHUNK_LEN)


def asked(text: str, context: str | tuple[str, ...] | None = None) -> Question:
    return Question("q", text, "answerable", ("84",), (), context)


def one_answer(reader: Reader, item: Item, way: Way) -> str:
    ((_, (text,)),) = reader.answers([item], [way])
    return text


# -- ways ----------------------------------------------------------------------------------------------------


def test_every_other_way_differs_from_the_base_in_one_factor() -> None:
    base = Way(placement="gap")
    ways = base.variations([*FACTORS, "policy"])
    assert ways[0] == base
    assert len(ways) == 1 + sum(len(values) - 1 for values in FACTORS.values())
    for way in ways[1:]:
        ((changed, value),) = [(f, v) for f, v in way._asdict().items() if v != getattr(base, f)]
        assert value in FACTORS[changed]
        assert way.name(base) in (value, f"{changed} {value}", "no BOS")
    assert base.name(base) == "independent"


def test_ways_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of policy, kv_dtype, placement, order, bos"):
        Way().variations(["colour"])
    with pytest.raises(ValueError, match="reads nothing that was stored"):
        Way(policy="joint").variations(["kv_dtype"])


# -- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        *Way().variations(["policy", "placement"]),
        Way("joint", placement="gap"),
        Way("dense", placement="reuse"),
    ],
    ids=lambda way: f"{way.policy}-{way.placement}",
)
def test_an_answer_is_the_engines_over_the_same_chunks(engine: RagEngine, reader: Reader, way: Way) -> None:
    (item,) = select(engine, [asked("How heavy is the Gannet buoy?")], 3, chunk_len=CHUNK_LEN)
    assert len(item.sources) == 3
    decoder = {"decoder": "vanilla"} if way.policy == "dense" else {"policy": way.policy}
    chunk_ids = [source.ref.chunk_id for source in item.sources]
    expected = engine.answer(item.question.text, chunk_ids=chunk_ids, placement=way.placement, **decoder)
    assert one_answer(reader, item, way) == expected.text != ""


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_stored_dtype_is_what_a_store_of_it_gives_back(
    tiny_model: LoadedModel, engine: RagEngine, reader: Reader, kv_dtype: Any
) -> None:
    (item,) = select(engine, [asked("How heavy is the Gannet buoy?")], 3, chunk_len=CHUNK_LEN)
    with RagEngine.open(MemoryStore(kv_dtype=kv_dtype), tiny_model, options=OPTIONS, chunk_len=CHUNK_LEN) as other:
        other.prefill([InputDocument(doc_id, text, doc_id) for doc_id, text in TEXTS.items()])
        refs = other.store.refs(other.fingerprint)
        wanted = {(source.ref.doc_id, source.ref.ordinal) for source in item.sources}
        chunk_ids = [ref.chunk_id for ref in refs if (ref.doc_id, ref.ordinal) in wanted]
        expected = other.answer(item.question.text, chunk_ids=chunk_ids)
    assert one_answer(reader, item, Way(kv_dtype=kv_dtype)) == expected.text
    if kv_dtype == "float32":
        assert not reader.rounding
        return
    errors, norms = reader.rounding[kv_dtype]
    low, high = (2**-10, 2**-8) if kv_dtype == "bfloat16" else (2**-8, 0.02)
    assert all(low < error < high for error in (errors / norms).sqrt().tolist())


def test_orders_and_anchors_are_those_of_the_tokens_that_are_read(
    tiny_model: LoadedModel, engine: RagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = select(engine, [asked("When does the office open?")], 3, chunk_len=CHUNK_LEN)
    first, *others = sorted(found.sources, key=lambda source: source.ref)
    item = Item(found.question, (*others, first))
    ranked = [tuple(source.token_ids) for source in item.sources]
    in_order = [ranked[-1], *ranked[:-1]]
    read: list[Any] = []
    monkeypatch.setattr(Reader, "_decode", lambda _, requests, __: read.extend(requests) or [""])
    ways = Way().variations(["order", "bos"])
    list(Reader(tiny_model, OPTIONS, chunk_len=CHUNK_LEN).answers([item], ways))
    assert [way.name(ways[0]) for way in ways] == ["independent", "order rank", "order reversed", "no BOS"]
    assert [request.chunk_ids for request in read] == [
        in_order,
        ranked,
        ranked[::-1],
        [ids[1:] for ids in in_order],
    ]
    for request in read:
        assert [kv.k.shape[1] for kv in request.chunk_kv] == [len(ids) for ids in request.chunk_ids]


def test_a_context_is_read_whole_and_named_after_its_texts(engine: RagEngine) -> None:
    texts = (TEXTS["offices.md"] * 2, TEXTS["buoys.md"], TEXTS["offices.md"] * 2)
    one, several = select(engine, [asked("Why?", texts[0]), asked("Why?", texts)], 1, chunk_len=CHUNK_LEN)
    assert one.sources == several.sources[: len(one.sources)]
    assert len({source.ref.doc_id for source in several.sources}) == 2  # the same text is read once
    ids = [token for source in several.sources for token in source.token_ids[1:]]
    assert engine.model.tokenizer.decode(ids) == texts[0] + texts[1]


def test_answers_do_not_depend_on_who_is_asked_beside(engine: RagEngine, reader: Reader) -> None:
    questions = [asked(f"Question {number} of the office?", TEXTS["offices.md"]) for number in range(10)]
    items = list(select(engine, questions, 1, chunk_len=CHUNK_LEN))
    seen: list[Outcome] = []
    outcomes = compare(reader, items, [Way(), Way("joint")], on_outcome=seen.append)
    assert outcomes == seen
    assert len(outcomes) == 20
    for outcome in outcomes[::3]:
        assert outcome.prediction == one_answer(reader, outcome.item, outcome.way)


def test_a_context_beyond_the_window_is_refused(tiny_model: LoadedModel, engine: RagEngine) -> None:
    family = replace(tiny_model.spec.family, window=100)
    small = replace(tiny_model, spec=replace(tiny_model.spec, family=family))
    (item,) = select(engine, [asked("Why?", TEXTS["offices.md"])], 1, chunk_len=CHUNK_LEN)
    with pytest.raises(ContextWindowError, match="window of 100"):
        one_answer(Reader(small, OPTIONS, chunk_len=CHUNK_LEN), item, Way())


# -- figures -------------------------------------------------------------------------------------------------


def test_differences_are_paired_with_the_base() -> None:
    said = {"independent": ["84", "84", "no", "no"], "joint": ["84", "no", "84", "84 kg"]}
    outcomes = []
    for number in range(4):
        for policy, texts in said.items():
            item = Item(asked(f"{number}"), ())
            outcomes.append(Outcome(item, Way(policy), texts[number], grade(texts[number], ("84",))))
    figures = summary(outcomes)
    base, joint = figures["ways"]
    assert figures["n"] == 4
    assert (base["name"], base["exact"]["value"], base["f1"]["value"]) == ("independent", 0.5, 0.5)
    assert base["difference"] is base["agreement"] is None
    assert joint["agreement"]["value"] == 0.25
    assert joint["difference"]["exact"]["value"] == 0
    assert joint["difference"]["f1"]["value"] == pytest.approx((0 - 1 + 1 + 2 / 3) / 4)
    assert joint["difference"]["exact"]["low"] < 0 < joint["difference"]["exact"]["high"]
    with pytest.raises(ValueError, match="no outcomes"):
        summary([])


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda *_, **__: tiny_model)

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["eval", "reuse", "--k", "2", *argv])
        status: int = args.run(args)
        return status

    return run


def test_choices_are_those_of_the_evaluation() -> None:
    assert tuple(FACTORS) == eval_reuse.FACTORS
    assert KINDS == eval_reuse.GENERATED


def test_json_is_one_object_of_the_stable_form(
    command: Any, handbook: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    details = tmp_path / "details.jsonl"
    paths = ("--documents", str(handbook), "--data", str(data))
    assert command(*paths, "--details", str(details), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["data", "sets", "stored", "settings", "machine"]
    (part,) = figures["sets"].values()
    assert (part["n"], part["chunks"]) == (2, 2)  # one question has no answer
    assert [way["name"] for way in part["ways"]] == [
        "independent",
        "joint",
        "joint_query",
        "dense",
        "kv_dtype bfloat16",
        "kv_dtype int8",
    ]
    assert set(figures["stored"]) == {"bfloat16", "int8"}
    rows = [json.loads(line) for line in details.read_text().splitlines()]
    assert len(rows) == 12
    assert {row["policy"] for row in rows} == set(FACTORS["policy"])


def test_generated_questions_need_no_files(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "reuse.png"
    line = ["--generated", "twohop,together", "--limit", "1", "--vary", "bos", "--policy", "joint"]
    assert command(*line, "--plot", str(plot)) == 0
    twohop, together = (part.splitlines() for part in capsys.readouterr().out.split("\n\n")[:2])
    assert twohop[0].startswith("twohop (n = 1)")
    assert together[0].startswith("together (n = 1)")
    assert [row.split("  ")[0] for row in twohop[1:]] == ["joint", "no BOS"]
    assert plot.stat().st_size > 0


def test_what_cannot_be_measured_is_said_before_it_is_tried(command: Any, handbook: Path, data: Path) -> None:
    (handbook / "broken.pdf").write_bytes(b"no pdf")
    for words, argv in {
        r"broken\.pdf": ["--documents", str(handbook), "--data", str(data)],
        "threehop": ["--generated", "threehop"],
        "colour": ["--vary", "colour"],
        r"reuse\.bmp": ["--plot", "reuse.bmp"],
    }.items():
        with pytest.raises(ValueError, match=words):
            command(*argv)
    data.write_text(json.dumps(ROWS[-1]))
    with pytest.raises(ValueError, match=r"no question .* has answers"):
        command("--data", str(data))


def test_joint_query_is_left_out_of_a_comparison_where_it_means_nothing(
    tiny_model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data.write_text(json.dumps({**ROWS[0], "context": TEXTS["buoys.md"]}))
    family = replace(tiny_model.spec.family, prefill_mask="block-causal-4")
    causal = replace(tiny_model, spec=replace(tiny_model.spec, family=family))
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda *_, **__: causal)
    line = ["--data", str(data), "--vary", "policy"]
    assert command(*line, "--json") == 0
    out = capsys.readouterr()
    (part,) = json.loads(out.out)["sets"].values()
    assert [way["name"] for way in part["ways"]] == ["independent", "joint", "dense"]
    assert "joint_query" in out.err
    with pytest.raises(ValueError, match="joint_query"):
        command(*line, "--policy", "joint_query")


def test_a_context_may_be_several_texts(data: Path) -> None:
    row = {"question": "When?", "answers": ["nine"], "context": list(TEXTS.values())}
    data.write_text(json.dumps(row))
    assert read_questions(data)[0].context == tuple(TEXTS.values())
    data.write_text(json.dumps({**row, "context": ["", "x"]}))
    with pytest.raises(ValueError, match=r"line 1: context is \['', 'x'\], expected a list of texts"):
        read_questions(data)
