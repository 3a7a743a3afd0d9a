from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pdllm_store import MemoryStore

from pdllm_rag.bench import query
from pdllm_rag.bench.corpus import bench_corpus
from pdllm_rag.bench.machine import Spread, compare, describe, take_turns
from pdllm_rag.bench.prefill import bench_prefill, random_chunks
from pdllm_rag.bench.query import QueryShapes, bench_query
from pdllm_rag.cli import bench as cli
from pdllm_rag.clock import PHASES
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.models import LoadedModel
from pdllm_rag.prefill import InputDocument

TINY = QueryShapes(chunk_len=8, n_chunks=2, long_chunks=4, candidates=3, steps=2)
SPREAD = {"median", "q1", "q3"}


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(), tiny_model, options=AskOptions(max_new_tokens=4)) as opened:
        opened.prefill([InputDocument("a.md", "The buoy weighs 84 kilograms.", "a.md")])
        yield opened


def is_spread(value: dict[str, float]) -> bool:
    return set(value) == SPREAD and 0 <= value["q1"] <= value["median"] <= value["q3"]


def is_comparison(value: dict[str, Any]) -> bool:
    sides = [value["dividend"], value["divisor"]]
    return (
        bool(value["compares"])
        and is_spread(value["ratio"])
        and all(side["name"] and is_spread(side["ms"]) for side in sides)
    )


def test_runs_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []
    ms = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, device=torch.device("cpu"))
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in ms.items()} == {"a": 2, "b": 2}
    with pytest.raises(ValueError, match="repeat is 0"):
        take_turns({}, 0, device=torch.device("cpu"))


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (3, 2, 4)
    assert Spread.of([4.0]) == (4, 4, 4)


def test_a_ratio_is_taken_within_each_round() -> None:
    compared = compare("a / b", {"name": "a", "ms": [2.0, 20.0, 6.0]}, {"name": "b", "ms": [1.0, 10.0, 2.0]})
    assert compared["ratio"] == {"median": 2, "q1": 2, "q3": 2.5}
    assert compared["dividend"]["ms"]["median"] == 6


def test_the_machine_is_named(tiny_model: LoadedModel) -> None:
    machine = describe(tiny_model)
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.threads == torch.get_num_threads()
    assert (machine.device, machine.dtype, machine.torch) == ("cpu", "float32", torch.__version__)


def test_random_chunks_begin_with_bos_and_are_repeatable(tiny_model: LoadedModel) -> None:
    chunks = random_chunks(tiny_model, 3, 9, seed=1)
    assert [chunk.shape for chunk in chunks] == [(9,)] * 3
    assert all(chunk[0] == tiny_model.spec.bos_id for chunk in chunks)
    assert all(chunk.max() < tiny_model.spec.n_tokens for chunk in chunks)
    assert [c.tolist() for c in random_chunks(tiny_model, 3, 9, seed=1)] == [c.tolist() for c in chunks]


def test_prefill_reports_both_sides_and_the_writing(tiny_model: LoadedModel) -> None:
    figures = bench_prefill(tiny_model, batch=2, chunk_len=8, repeat=3)
    assert set(figures) == {"machine", "model", "repeat", "shapes", "kv_dtype", "encode", "write"}
    assert figures["shapes"] == {"batch": 2, "chunk_len": 8, "tokens": 16}
    assert is_comparison(figures["encode"])
    assert figures["encode"]["target"] == 0.9
    assert is_spread(figures["encode"]["divisor"]["tokens_per_s"])
    assert is_spread(figures["write"]["tokens_per_s"])
    assert figures["write"]["mib_per_s"]["q1"] > 0
    json.dumps(figures)
    with pytest.raises(ValueError, match="chunk_len 1"):
        bench_prefill(tiny_model, chunk_len=1)


def test_query_compares_decoders_over_equal_steps(engine: RagEngine) -> None:
    figures = bench_query(engine, ["How heavy is the buoy?"], repeat=2, shapes=TINY)
    for key in ("decode", "long_context", "question", "scoring"):
        assert is_comparison(figures[key]), key
    assert figures["decode"]["dividend"]["context_tokens"] == figures["decode"]["divisor"]["context_tokens"] == 16
    assert figures["long_context"]["dividend"]["context_tokens"] == 32
    assert figures["shapes"]["steps"] == figures["decode"]["divisor"]["steps"] == 2
    assert set(figures["question"]["parts_ms"]) == {"load", "s_i", "draft", "s_p", "static_kv"}
    assert is_comparison(figures["scoring"]["s_i"])
    asks = figures["asks"]
    assert (asks["n_questions"], asks["n_asks"]) == (1, 2)
    assert set(asks["ms"]) == {*PHASES, "total"}
    assert all(is_spread(spread) for spread in (*asks["ms"].values(), asks["nfe"]))
    json.dumps(figures)


def test_query_without_questions_asks_nothing(engine: RagEngine) -> None:
    assert bench_query(engine, repeat=1, shapes=TINY)["asks"] is None


@pytest.mark.parametrize("shape", [{"chunk_len": 1}, {"steps": 0}, {"candidates": 3}])
def test_impossible_shapes_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        QueryShapes(**shape)


def test_more_steps_than_a_block_are_refused(engine: RagEngine) -> None:
    with pytest.raises(ValueError, match="of one block"):
        bench_query(engine, shapes=QueryShapes(steps=33))


def test_a_growing_store_is_asked_at_every_size(tiny_model: LoadedModel, tmp_path: Path) -> None:
    """The words are told apart by the index, the answers read real KV, and nothing is left behind."""
    figures = bench_corpus(tiny_model, (5, 120), questions=2, repeat=1, chunk_len=8, folder=tmp_path)
    assert [row["chunks"] for row in figures["sizes"]] == [5, 120]
    for row in figures["sizes"]:
        assert row["build_ms"] > 0
        assert is_spread(row["open_ms"])
        assert {phase for phase, spread in row["ms"].items() if spread["median"] > 0} >= {
            "first_stage",
            "score",
            "total",
        }
    assert figures["growth"]["chunks"] == 24
    assert not list(tmp_path.iterdir())
    for sizes in ((), (0, 5), (5, 5)):
        with pytest.raises(ValueError, match="ascending"):
            bench_corpus(tiny_model, sizes)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(engine: RagEngine, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command line with small shapes against the engine's store and model."""
    monkeypatch.setattr(RagEngine, "open", lambda *_, **__: engine)
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda *_, **__: tiny_model)
    monkeypatch.setattr(
        "pdllm_rag.bench.query.bench_query",
        lambda *a, shapes, **k: bench_query(*a, **k, shapes=replace(TINY, steps=shapes.steps)),
    )
    assert tuple(query.SECTIONS) == cli.QUERY_SECTIONS

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["bench", *argv])
        status: int = args.run(args)
        return status

    return run


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    rows = [
        {"question": "Who wrote Hamlet?", "kind": "unrelated"},
        {"question": "How heavy?", "answer": "84"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_query_prints_one_json_object_over_the_answerable_questions(
    command: Callable[..., int], questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("query", "--store", "kb", "--questions", str(questions), "--repeat", "1", "--json")
    assert command(*argv, "--sections", "scoring") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["asks"]["n_questions"] == 1
    assert set(figures) & set(query.SECTIONS) == {"scoring"}
    with pytest.raises(SystemExit):
        command(*argv, "--sections", "scoring,other")


def test_query_prints_a_table_and_the_machine(
    command: Callable[..., int], questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("query", "--store", "kb", "--questions", str(questions), "--repeat", "1", "--steps", "2") == 0
    out = capsys.readouterr().out
    for text in ("vanilla over 32 tokens", "selecting among 3 chunks, 2 steps", "1 questions", "float32", "threads"):
        assert text in out


def test_query_refuses_a_file_without_answerable_questions(command: Callable[..., int], tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Who wrote Hamlet?", "kind": "unrelated"}\n')
    with pytest.raises(ValueError, match="no answerable question"):
        command("query", "--store", "kb", "--questions", str(path))


def test_corpus_prints_a_table_of_sizes(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda *_, **__: tiny_model)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "corpus", "--sizes", "4,9", "--questions", "1", "--repeat", "1"])
    assert args.run(args) == 0
    out = capsys.readouterr().out
    for text in ("4 chunks", "9 chunks", "opening, first search", "total"):
        assert text in out


def test_prefill_prints_a_table_or_one_json_object(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batch", "1", "--chunk-len", "8", "--repeat", "1")
    assert command("prefill", *sizes, "--json") == 0
    assert is_comparison(json.loads(capsys.readouterr().out)["encode"])
    assert command("prefill", *sizes) == 0
    assert "transformers' forward" in capsys.readouterr().out
