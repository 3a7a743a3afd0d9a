"""`pdllm train`, in this process, with a tiny random model and a few rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Pdllm, one_line, one_object
from tiny import save_tiny_model

from pdllm_rag.cli import train
from pdllm_rag.models import load_model
from pdllm_rag.training.masters import ROUNDINGS

SMALL = ("--steps", "2", "--rows", "1", "--warmup", "1", "--context-len", "1024", "--canvas-len", "512",
         "--answer-lens", "32,64", "--device", "cpu", "--json")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    buoys = [("Gannet", 310, 18), ("Petrel", 95, 7), ("Fulmar", 140, 11), ("Skua", 77, 9)]
    with file.open("w") as lines:
        for name, weight, months in buoys:
            context = f"The {name} buoy weighs {weight} kilograms. Its battery lasts {months} months in cold water."
            for question, answer in ((f"How heavy is the {name}?", f"{weight} kilograms"),
                                     (f"How long does the {name}'s battery last?", f"{months} months")):  # fmt: skip
                print(json.dumps({"context": context, "question": question, "answer": answer}), file=lines)
    return file


def test_the_choices_are_those_of_the_library() -> None:
    assert tuple(ROUNDINGS) == train.ROUNDINGS


@pytest.mark.parametrize(
    ("kind", "more", "option"),
    [
        ("adapt", ("--rounding", "4bit"), None),
        ("chunk-lora", ("--rank", "4"), "adapter"),
        ("d2f", ("--rank", "4", "--rounding", "8bit", "--block-len", "8"), "canvas_adapter"),
        (
            "d2f",
            ("--hard-labels", "0.5", "--fill", "0.1", "--recipe", "both", "--stored-alpha", "16"),
            "canvas_adapter",
        ),
    ],
)
def test_what_is_trained_can_be_loaded(
    pdllm: Pdllm, model: str, rows: Path, tmp_path: Path, kind: str, more: tuple[str, ...], option: str | None
) -> None:
    if option is not None:
        pytest.importorskip("peft")
    told = one_object(
        pdllm("train", kind, "--model", model, "--data", str(rows), "--out", str(tmp_path), *SMALL, *more)
    )
    assert told["steps"] == 2
    logged: list[dict[str, Any]] = [json.loads(line) for line in Path(told["log"]).read_text().splitlines()]
    assert logged[0]["step"] == 2
    if option is None:
        assert load_model(told["result"]).weights_digest != load_model(model).weights_digest
    else:
        load_model(model, **{option: told["result"]})  # type: ignore[arg-type]
        settings = json.loads((Path(told["result"]) / "adapter_config.json").read_text())
        assert settings["lora_alpha"] == (16 if "--stored-alpha" in more else 32)


def test_a_model_that_is_to_be_made_smaller_needs_a_mask(pdllm: Pdllm, model: str, rows: Path, tmp_path: Path) -> None:
    given = ("train", "adapt", "--model", model, "--data", str(rows), "--out", str(tmp_path), *SMALL)
    assert "--mask-in-place-of" in one_line(pdllm(*given, "--keep-layers", "0-1"))
    with pytest.raises(SystemExit):
        pdllm(*given, "--keep-layers", "x")


def test_data_that_is_not_there_is_told(pdllm: Pdllm, model: str, tmp_path: Path) -> None:
    given = ("train", "adapt", "--model", model, "--out", str(tmp_path), *SMALL)
    assert "nowhere" in one_line(pdllm(*given, "--data", str(tmp_path / "nowhere.jsonl")))


def test_checkpoints_are_rounded_and_load(pdllm: Pdllm, model: str, rows: Path, tmp_path: Path) -> None:
    given = ("--model", model, model, "--data", str(rows), "--batches", "1", "--context-len", "512")
    told = one_object(pdllm("train", "round", *given, "--canvas-len", "256", "--out", str(tmp_path), "--json"))
    assert told["models"] == [model, model]
    assert load_model(told["result"]).weights_digest != load_model(model).weights_digest
