"""`pdllm bench decode` on a shape of random weights, here at tiny sizes on the CPU (see `test_bench_gpu`)."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdllm_rag.attends import DenseAttend
from pdllm_rag.bench import autoregressive, shapes
from pdllm_rag.bench.autoregressive import KINDS, Autoregressive
from pdllm_rag.bench.decode import SECTIONS, bench_decode, default_candidates
from pdllm_rag.bench.decode_sides import (
    DecodeSizes,
    StepCost,
    VanillaStep,
    check_family,
    endless,
    random_ids,
    step_rounds,
)
from pdllm_rag.bench.shapes import random_model
from pdllm_rag.cli import bench as cli
from pdllm_rag.cli import bench_decode as decode_cli
from pdllm_rag.decoding import CommitRule, DecodeRequest, VanillaDecoder
from pdllm_rag.models import LoadedModel
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.placement import plan_offsets

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, for the GPU only")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPREAD = {"median", "q1", "q3"}
SIZES = DecodeSizes(question_rows=12, chunk_len=8, selected=2, candidates=4, few_steps=3, repeat=2)


def is_spread(value: dict[str, float]) -> bool:
    return set(value) == SPREAD and 0 < value["q1"] <= value["median"] <= value["q3"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model("tiny", CPU, torch.float32)


@pytest.fixture(scope="module")
def decode_figures(model: LoadedModel) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdllm_rag.bench.decode.KINDS", ("sdpa",))
        patch.setattr(autoregressive, "why_not", lambda *_: "interpreting takes long")
        seen: list[str] = []
        figures = bench_decode(
            model, contexts=(16, 32), batches=(1, 2), sizes=SIZES, on_part=lambda f: seen.append(json.dumps(f))
        )
    assert len(seen) == 8
    return figures


def test_a_step_and_a_question_are_held_against_vanilla(decode_figures: dict[str, Any]) -> None:
    for row, candidates in zip(decode_figures["contexts"], (2, 4), strict=True):
        step, question = row["step"], row["question"]
        assert is_spread(step["static_kv"]["ms"])
        assert step["vanilla"]["steps_timed"] == 2
        assert step["speed_up"] == step["speed_up_spread"]["median"] > 0
        assert question["candidates"] == candidates
        assert (question["all_steps"]["nfe"], question["few_steps"]["nfe"]) == (32, 3)
        for key in ("all_steps", "few_steps"):
            vanilla_ms = question[key]["nfe"] * step["vanilla"]["ms"]["median"]
            assert question[key]["vanilla_ms"] == pytest.approx(vanilla_ms)
            for name in ("warm", "page_cache"):
                side = question[key][name]
                assert side["speed_up"] == pytest.approx(vanilla_ms / side["ms"]["median"])
                parts = sum(part["q1"] for part in side["parts_ms"].values())
                assert parts <= side["ms"]["q3"] * 1.01
        assert row["prefix_cached"]["question_ms"] > step["vanilla"]["ms"]["median"]
        assert row["prefix_cached"]["floor"]["bytes"] > step["static_kv"]["floor"]["bytes"] or row["context"] == 16


@pytest.mark.gpu
@on_gpu
def test_decoding_is_measured_on_a_gpu() -> None:
    model = random_model("tiny", torch.device("cuda"), torch.bfloat16)
    figures = bench_decode(model, contexts=(1024,), batches=(1, 2), sizes=replace(SIZES, chunk_len=256))
    assert figures["decoder"] == {"backend": "triton, graphed"}
    assert set(figures["autoregressive"]["kinds"]) == set(KINDS)
    assert figures["contexts"][0]["question"]["speed_up"] > 0


def test_batches_are_held_against_their_own_floor(decode_figures: dict[str, Any], model: LoadedModel) -> None:
    one, two = decode_figures["batch"]
    cost = StepCost.of(model)
    assert cost.kv_row_bytes == 2 * 3 * 2 * 16 * 4
    assert two["floor"]["bytes"] - one["floor"]["bytes"] == 16 * cost.kv_row_bytes
    assert one["floor"]["bytes"] == cost.weight_bytes + 16 * cost.kv_row_bytes
    assert two["floor"]["flops"] == 2 * one["floor"]["flops"]
    for entry in (one, two):
        assert entry["tokens_per_s"] == pytest.approx(entry["questions"] * 1000 / entry["step_ms"]["median"])
        assert entry["over_floor"] == pytest.approx(entry["step_ms"]["median"] / entry["floor"]["ms"])


def test_autoregressive_decoding_is_in_the_same_run(decode_figures: dict[str, Any]) -> None:
    found = decode_figures["autoregressive"]
    assert (found["prompt_rows"], found["tokens"], found["skipped"]) == (28, 32, {})
    side = found["kinds"]["sdpa"]
    assert all(is_spread(side[key]) for key in ("prefill_ms", "decode_ms", "step_ms", "total_ms"))
    speed_up = side["total_ms"]["median"] / found["static_kv"]["ms"]["median"]
    assert found["static_kv"]["speed_up"] == pytest.approx(speed_up)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_autoregressive_tokens_are_those_of_a_whole_causal_forward(model: LoadedModel, kind: str) -> None:
    side = Autoregressive(model, prompt_len=9, n_steps=2, kind=kind)
    side.prefill()
    side.decode()
    backbone, ids = model.backbone, torch.cat((side.prompt, side.tokens[:2]))
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    hidden = backbone.hidden(ids, DenseAttend(backbone.rope, [11], torch.arange(11), [mask]))
    assert torch.equal(backbone.logits(hidden[8:]).argmax(dim=-1), side.tokens)


@interpreted
def test_the_fused_layers_of_a_gpu_give_the_same_tokens(model: LoadedModel) -> None:
    plain = model.backbone
    copied = copy.deepcopy(plain.model)  # fusing rearranges the weights
    fused = FusedBackbone(copied, plain.rope, mask_id=plain.mask_id, forbidden_from=plain.forbidden_from)
    sides = []
    for one in (model, replace(model, backbone=fused)):
        side = Autoregressive(one, prompt_len=9, n_steps=1)
        side.prefill()
        side.decode()
        sides.append((side.tokens, VanillaStep(one, 8, SIZES)()))
    (ours, (tokens, confidence)), (theirs, (fused_tokens, fused_confidence)) = sides
    assert torch.equal(ours, theirs)
    assert torch.equal(tokens, fused_tokens)
    assert torch.allclose(confidence, fused_confidence)


def test_an_unknown_kind_of_attention_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="expected one of sdpa, split_s"):
        Autoregressive(model, prompt_len=4, n_steps=1, kind="paged")
    with pytest.raises(ValueError, match="expected one row"):
        autoregressive.CausalAttend(model, torch.zeros(1), torch.zeros(1), 3, 2)


def test_a_vanilla_step_predicts_what_the_vanilla_decoder_does(model: LoadedModel) -> None:
    step = VanillaStep(model, 16, SIZES)
    tokens, confidence = step()
    ids = random_ids(model, 16 + SIZES.question_rows)
    request = DecodeRequest(ids[16:], plan_offsets([16], "sequential", chunk_len=16), 32, chunk_ids=[ids[:16]])
    first = next(iter(VanillaDecoder(endless(model), CommitRule(threshold=0.0)).steps([request])))
    assert list(first.tokens) == tokens.tolist()
    assert torch.allclose(torch.tensor(first.confidence), confidence)


def test_decoding_refuses_what_it_cannot_compare(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="section 'steps' is unknown"):
        bench_decode(model, sections=("steps",))
    with pytest.raises(ValueError, match="at least the 4096 rows"):
        bench_decode(model, contexts=(1024,))
    with pytest.raises(ValueError, match="expected chunk_len"):
        DecodeSizes(chunk_len=1)
    monkeypatch.setattr(shapes, "_fill", lambda *_: None)
    with pytest.raises(ValueError, match="bidirectional models"):
        check_family(random_model("sdar-8b", CPU, torch.bfloat16, layers=1))
    assert default_candidates(model) == 32
    monkeypatch.setattr("pdllm_rag.bench.decode.MANY_BYTES", 100)
    assert default_candidates(model) == 16


def test_a_long_step_is_warm_after_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    assert step_rounds(lambda: calls.append(None), CPU, 5) == (5, [])
    monkeypatch.setattr("pdllm_rag.bench.decode_sides.once_ms", lambda *_: 4000.0)
    assert step_rounds(lambda: calls.append(None), CPU, 5) == (1, [4000.0])


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `pdllm bench decode ...` and gives its status and stdout."""

    def run(*argv: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["bench", *argv])
        status: int = args.run(args)
        return status, capsys.readouterr().out

    return run


def test_decode_prints_tables_and_draws(
    command: Any, decode_figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    asked: dict[str, Any] = {}

    def bench(model: LoadedModel, **options: Any) -> dict[str, Any]:
        asked.update(options, model=model)
        return decode_figures

    monkeypatch.setattr("pdllm_rag.bench.decode.bench_decode", bench)
    shape = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32")
    status, text = command("decode", *shape, "--context", "8k,16384", "--plot", str(tmp_path / "d.png"))
    assert (status, asked["contexts"], asked["batches"]) == (0, [8192, 16384], [1, 2, 4, 8])
    assert asked["sizes"] == DecodeSizes()
    for part in ("vanilla over 32", "32 steps, KV in the page cache", "autoregressive, sdpa", "questions in one step"):
        assert part in text
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(command("decode", *shape, "--json")[1]) == json.loads(json.dumps(decode_figures))


@pytest.mark.parametrize("device", ["meta", "gpu"])
def test_devices_that_are_none_are_refused(command: Any, device: str) -> None:
    with pytest.raises(ValueError, match="cpu or cuda"):
        command("decode", "--shape", "tiny", "--device", device)


def test_the_command_line_names_the_sections() -> None:
    assert decode_cli.SECTIONS == SECTIONS


@pytest.mark.parametrize(
    "argument", [("--out", "/nonexistent/x.json"), ("--plot", "/nonexistent/x.png"), ("--plot", "x")]
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(argument: tuple[str, str]) -> None:
    from pdllm_rag.cli.main import main

    for bench in (["decode", "--shape", "tiny"], ["attention"]):
        assert main(["bench", *bench, "--device", "cpu", *argument]) == 1


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from pdllm_rag.cli.main import main

    sizes = ["--question-rows", "99999999999", "--context", "4096", "--sections", "step"]
    assert main(["bench", "decode", "--shape", "tiny", "--device", "cpu", *sizes]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "not enough memory" in told
