"""`pdllm bench decoders`: answers over a store and speed under forced commits, here at tiny sizes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import TEXTS, Pdllm, one_line, one_object
from pdllm_store import MemoryStore

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.bench import decoders
from pdllm_rag.bench.decoder_quality import BASELINE, CHOSEN, Setting, bench_quality, default_settings
from pdllm_rag.bench.decoders import CONTENDERS, Contender, Forced, Run, SpeedSizes, bench_decoders, by_name, run
from pdllm_rag.bench.shapes import random_model
from pdllm_rag.decoding import DecodeRequest, DecodeStep
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.evaluation.qa import Question

CPU = torch.device("cpu")
SIZES = SpeedSizes(question_rows=4, answer_rows=64, repeat=1, max_s=0.0)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model("tiny", CPU, torch.float32)


@pytest.fixture(scope="module")
def speed(model: LoadedModel) -> dict[str, Any]:
    seen: list[Forced] = []

    def salient(model: LoadedModel, forced: Forced) -> Any:
        seen.append(forced)
        return by_name("static_kv", order="margin")(model, forced)

    more = {**CONTENDERS, "of one's own": Contender(salient, lambda _: 3, dense=False)}
    parts: list[str] = []
    figures = bench_decoders(
        model,
        cases=((12, 2),),
        tokens_per_step=(16, 32),
        salient=0.5,
        contenders=more,
        sizes=SIZES,
        on_part=lambda f: parts.append(json.dumps(f)),
    )
    assert {(one.tokens_per_step, one.rule.steps, one.salient) for one in seen} == {(16, 2, 0.5), (32, 1, 0.5)}
    assert json.loads(parts[-1]) == json.loads(json.dumps(figures))
    assert len(parts) == 2
    return figures


def test_every_contender_takes_the_same_steps_and_both_ratios_are_told(speed: dict[str, Any]) -> None:
    for case in speed["speed"]:
        passes = 64 // case["tokens_per_step"]
        base = case["contenders"]["vanilla"]
        assert base["step_ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
        assert set(case["contenders"]) == {*CONTENDERS, "of one's own"}
        for side in case["contenders"].values():
            assert (side["nfe"], side["policy_ratio"]) == (passes, case["tokens_per_step"])
            assert side["speed_up"] == pytest.approx(side["step_ratio"]["median"] * side["policy_ratio"])
            speed_of_steps = 2 * case["tokens_per_step"] * 1000 / side["step_ms"]["median"]
            assert side["tokens_per_s"]["median"] == pytest.approx(speed_of_steps)
            assert 2 <= side["passes_timed"] <= passes


def test_a_run_is_cut_after_whole_units_and_the_rest_is_like_those_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(decoders.time, "perf_counter", lambda: now)

    class Ticking:
        """The first pass of each unit of four takes three times as long as others; the very first another 10 s."""

        name, needs_kv, backend = "ticking", True, "none"

        def steps(self, requests: Any) -> Iterator[DecodeStep]:
            nonlocal now
            now += 10.0
            for number in range(16):
                now += 3.0 if number % 4 == 0 else 1.0
                for index in range(len(requests)):
                    yield DecodeStep(index, (number,), (1,), (1.0,), number + 1, "length" if number == 15 else None)

    requests: list[DecodeRequest] = [None, None]  # type: ignore[list-item]
    assert run(Ticking(), requests, 4, 1e9) == Run([16.0, 6.0, 6.0, 6.0], 16, True)
    cut = run(Ticking(), requests, 4, 0.0)
    assert cut == Run([16.0, 6.0], 8, False)
    assert cut.whole(16) == Run([16.0, 18.0], 16, True)
    assert run(Ticking(), requests, 5, 0.0).units_s == [19.0, 7.0]
    assert run(Ticking(), requests, 5, 1e9).units_s == [19.0, 7.0, 7.0, 1.0]


def test_sizes_that_do_not_fit_are_refused(model: LoadedModel) -> None:
    for sizes, counts, cases in ((SIZES, (3,), ((12, 1),)), (SpeedSizes(answer_rows=33), (1,), ((99, 1),))):
        with pytest.raises(ValueError, match="multiples and divisors of 32"):
            bench_decoders(model, cases=cases, tokens_per_step=counts, sizes=sizes)
    with pytest.raises(ValueError, match="expected more than 4 tokens"):
        bench_decoders(model, cases=((4, 1),), tokens_per_step=(8,), sizes=SIZES)
    with pytest.raises(ValueError, match="expected max_s"):
        SpeedSizes(repeat=0)


# -- answers -------------------------------------------------------------------------------------------------


def asked(text: str, *answers: str, context: str | None = None) -> Question:
    return Question(text, text, "answerable" if answers else "unrelated", answers, (), context)


def test_answers_are_paired_with_the_baselines_over_the_same_chunks(tiny_model: LoadedModel) -> None:
    options = AskOptions(k=1, max_new_tokens=8)
    settings = [Setting("static_kv", {"threshold": 0.0}), Setting("fast_dllm", {}, {"cache": "prefix"})]
    with RagEngine.open(MemoryStore(), tiny_model) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        said = engine.answer("How heavy?", options=BASELINE.options(options)).text
        questions = [asked("How heavy?", said), asked("Which?"), asked("What?", "x", context="Some text.")]
        seen: list[None] = []
        figures = bench_quality(engine, questions, settings, options, on_question=lambda: seen.append(None))
        names = {setting.decoder for setting in default_settings(engine)}
        with pytest.raises(ValueError, match="none of the 1 questions has an answer"):
            bench_quality(engine, [asked("Which?")], settings, options)
    assert (figures["n"], len(seen)) == (2, 2)
    base, at_once, fast = figures["quality"]
    assert [base["setting"], at_once["setting"]] == ["static_kv threshold=1.0", "static_kv threshold=0.0"]
    assert fast["setting"] == "fast_dllm cache=prefix"
    assert base["accuracy"]["value"] == 0.5
    assert base["against_baseline"]["f1"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert (base["policy_ratio"], base["step_ratio"], base["same_answers"]) == (1.0, 1.0, 1.0)
    assert at_once["nfe"]["median"] == 1
    assert at_once["policy_ratio"] == base["nfe"]["median"]
    against = at_once["accuracy"]["value"] - base["accuracy"]["value"]
    assert at_once["against_baseline"]["accuracy"]["value"] == pytest.approx(against)
    assert names == {name for name, kind in KINDS.items() if kind.why_not(tiny_model) is None}
    assert set(CHOSEN) <= set(KINDS)


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_asks_settings_and_draws(pdllm: Pdllm, filled: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "How heavy?", "answers": ["310"]}\n')
    argv = ["bench", "decoders", "--model", tiny_model_path, "--store", filled, "--questions", data]
    argv += ["--setting", "fast_dllm cache=dual factor=2 threshold=0.5", "--max-new-tokens", "4"]
    figures = one_object(pdllm(*argv, "--json", "--plot", tmp_path / "q.png", "--out", tmp_path / "q.json"))
    assert figures["quality"][1]["setting"] == "fast_dllm threshold=0.5 cache=dual factor=2"
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "q.json").read_text()) == figures
    assert "static_kv threshold=1.0 (baseline)" in pdllm(*argv).out
    assert "no option 'colour'" in one_line(pdllm(*argv, "--setting", "fast_dllm colour=red"))
    assert "expected one of static_kv" in one_line(pdllm(*argv, "--setting", "magic"))
    for lacking in (["--questions", data], ["--store", filled], ["--setting", "static_kv"], ["--limit", "1"]):
        assert "both --store and --questions" in one_line(pdllm("bench", "decoders", *lacking))


def test_the_command_measures_speed_and_draws(pdllm: Pdllm, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ["bench", "decoders", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--cases", "12x1,16x2"]
    argv += ["--tokens-per-step", "32", "--question-rows", 4, "--answer-rows", 64, "--repeat", 1, "--max-s", 0]
    outcome = pdllm(*argv, "--plot", tmp_path / "s.png")
    assert "prompt 16 x 2, 32 tokens a step" in outcome.out
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value"),
    [("cases", "8k"), ("cases", "8kx0"), ("tokens-per-step", "0"), ("setting", "fast_dllm cache="), ("salient", "0")],
)
def test_wrong_usage_says_what_was_expected(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pdllm_rag.cli.main import main

    with pytest.raises(SystemExit):
        main(["bench", "decoders", f"--{option}", value])
    assert "expected" in capsys.readouterr().err
