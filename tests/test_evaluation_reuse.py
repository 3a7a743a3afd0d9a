"""`pdllm eval reuse`: stored dtypes against float32."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from pdllm_store import KV_DTYPES

from pdllm_rag.cli import eval as cli
from pdllm_rag.config import AskOptions
from pdllm_rag.evaluation import read_questions
from pdllm_rag.evaluation.reuse import compare_dtypes
from pdllm_rag.models import LoadedModel

TEXTS = {
    "buoys.md": "The Gannet buoy weighs 84 kilograms and reports the wind every ten minutes.",
    "leave.md": "A full-time employee gets 28 days of paid annual leave under the policy of 2025.",
}
ROWS = [
    {"question": "How heavy is the Gannet buoy?", "answers": ["84"], "doc_ids": ["buoys.md"]},
    {"question": "Who wrote Hamlet?", "kind": "unrelated"},
]
OPTIONS = AskOptions(k=1, candidates=2, max_new_tokens=4)
MEASURES = {"n", "answerable", "unrelated", "near_miss", "nfe", "ms"}
MEASURES |= {"agreement", "relative_l2_error", "kv_bytes_per_1k_tokens", "load"}


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


def test_every_dtype_is_measured_against_float32(tiny_model: LoadedModel, handbook: Path, data: Path) -> None:
    asked: list[Any] = []
    kv_dtypes = ["int8", "bfloat16", "int8"]
    found = compare_dtypes(tiny_model, [handbook], read_questions(data), OPTIONS, kv_dtypes, on_outcome=asked.append)
    assert list(found) == ["float32", "int8", "bfloat16"]
    assert len(asked) == 3 * len(ROWS)
    for figures in found.values():
        assert set(figures) == MEASURES
        assert set(figures["agreement"]) == set(figures["load"]["ms"]) == {"value", "low", "high"}
        assert figures["load"]["chunks"] == 2
        assert figures["answerable"]["recall_at_4"]["value"] == 1
    assert found["float32"]["agreement"]["value"] == 1
    assert found["float32"]["relative_l2_error"] == {"k": 0, "v": 0}
    for kind in "kv":
        bfloat16, int8 = (found[dtype]["relative_l2_error"][kind] for dtype in ("bfloat16", "int8"))
        assert 0 < bfloat16 < 2**-8 < 2 * int8 < 0.02
    sizes = [found[dtype]["kv_bytes_per_1k_tokens"] for dtype in ("float32", "bfloat16", "int8")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_document_that_does_not_go_in_ends_the_comparison(
    tiny_model: LoadedModel, handbook: Path, data: Path
) -> None:
    (handbook / "broken.pdf").write_bytes(b"no pdf")
    with pytest.raises(ValueError, match=r"broken\.pdf"):
        compare_dtypes(tiny_model, [handbook], read_questions(data), OPTIONS, ["float32"])


@pytest.fixture
def command(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda *_, **__: tiny_model)

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["eval", "reuse", "--k", "1", "--candidates", "2", *argv])
        status: int = args.run(args)
        return status

    return run


def test_json_is_one_object_of_the_stable_form(
    command: Any, handbook: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--documents", str(handbook), "--questions", str(data), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["questions", "documents", "kv_dtypes", "settings"]
    assert set(figures["kv_dtypes"]) == set(KV_DTYPES)
    assert set(figures["kv_dtypes"]["int8"]) == MEASURES
    assert figures["settings"]["dtype"] == "float32"


def test_the_table_has_a_column_for_each_dtype(
    command: Any, handbook: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ("--documents", str(handbook), "--questions", str(data))
    assert command(*paths, "--kv-dtype", "int8", "--limit", "1") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["measure", "float32", "int8"]
    for label in ("recall@1", "near miss: refused", "same text", "error of keys", "1,000 tokens", "loading 2 chunks"):
        assert any(label in line for line in lines), label
