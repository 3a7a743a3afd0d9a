"""The command line, in this process, with a tiny random model and a store on disk."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from command_line import TEXTS, Pdllm, one_line, one_object
from pdllm_store import KV_DTYPES
from rich.console import Console
from tiny import SPECIALS, save_tiny_model

from pdllm_rag.answer import Answer, AnswerStats, ChunkCounts, Citation
from pdllm_rag.cli import ask, main, prefill, store
from pdllm_rag.cli import options as cli_options
from pdllm_rag.cli.console import StreamedText
from pdllm_rag.cli.main import build_parser
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding import DecodeStep
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.engine import LOADS, RagEngine
from pdllm_rag.errors import NumericsError
from pdllm_rag.events import CanvasUpdate, Final, TextDelta
from pdllm_rag.placement import MODES
from pdllm_rag.policies import POLICIES

# -- the command itself --------------------------------------------------------------------------------------


def in_fresh_process(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment, check=False)


def test_help_loads_no_model_library_and_comes_within_half_a_second_of_computing() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = in_fresh_process("-m", "pdllm_rag.cli", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shown.returncode == 0
    assert "prefill" in shown.stdout
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 0.5
    loaded = in_fresh_process("-c", "import sys, pdllm_rag.cli.main as m; m.build_parser(); print(*sys.modules)")
    assert not {"torch", "transformers", "numpy", "pdllm_store"} & set(loaded.stdout.split())


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("pdllm ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "COMMAND"),
        ("ask", "QUESTION"),
        ("ask q", "--store"),
        ("ask q --store s --k 0", "got '0', expected a whole number of 1 or more"),
        ("ask q --store s --k x", "got 'x', expected a whole number of 1 or more"),
        ("ask q --store s --max-new-tokens 0", "expected a whole number of 1 or more"),
        ("ask q --store s --candidates -1", "expected a whole number of 1 or more"),
        ("ask q --store s --filter colour", "expected KEY=VALUE"),
        ("ask q --store s --filter =red", "expected KEY=VALUE"),
        ("ask q --store s --filter a=1 --filter b=1 --filter a=2", "got the key 'a' twice, expected it once"),
        ("ask q --store s --threshold 1.5", "expected a number from 0 to 1"),
        ("ask q --store s --threshold nan", "expected a number from 0 to 1"),
        ("ask q --store s --temperature -1", "expected a number of 0 or more"),
        ("ask q --store s --seed x", "expected a whole number of 0 or more"),
        ("ask q --store s --decoder magic", "static_kv"),
        ("ask q --store s --decoder-option block", "expected KEY=VALUE"),
        ("ask q --store s --decoder-option a=1 --decoder-option a=2", "got the key 'a' twice, expected it once"),
        ("ask q --store s --max-new 8", "--max-new"),
        ("prefill d --store s --shard 3/2", "got '3/2', expected I/N"),
        ("prefill d --store s --shard 0/2", "expected I/N"),
        ("prefill d --store s --shard two", "expected I/N"),
        ("prefill d --store s --workers 2", "--ray is missing"),
        ("prefill d --store s --ray --workers 0", "expected a whole number of 1 or more"),
        ("plan --documents 5 --tokens-per-document 5 --model gpt", "dream"),
        ("store merge a b --sample 2", "expected a number from 0 to 1"),
        ("prefill d --store s --kv-dtype float16", "bfloat16"),
        ("prefill d --store s --max-bytes lots", "expected a size such as 500MB"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_was_expected(
    line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(line.split())
    assert leaving.value.code == 2
    assert expected in capsys.readouterr().err


def test_choices_and_defaults_are_those_of_the_engine() -> None:
    assert set(cli_options.DECODERS) == set(KINDS)
    assert cli_options.LOADS == LOADS
    assert set(cli_options.POLICIES) == set(POLICIES)
    assert set(cli_options.PLACEMENTS) == set(MODES)
    assert set(prefill.KV_DTYPES) == set(KV_DTYPES)
    assert ask.options_of(build_parser().parse_args(["ask", "q", "--store", "s"])) == AskOptions()


def test_every_option_of_a_question_reaches_the_engine() -> None:
    words = "--k 2 --candidates 5 --first-stage fusion --policy joint --placement gap --chunk-rows 9 --max-new-tokens 7"
    words += " --rank-weight 0.4"
    words += " --threshold 0.5 --steps 3 --score-window 1.5 --temperature 0.7 --top-p 0.9 --seed 9 --no-abstain"
    words += " --stop a --stop b --filter x=1 --filter y=2=3"
    options = ask.options_of(build_parser().parse_args(["ask", "q", "--store", "s", *words.split()]))
    same = [f.name for f in fields(options) if getattr(options, f.name) == getattr(AskOptions(), f.name)]
    assert same == [
        "decoder",
        "decoder_options",
        "min_support",
        "cancel",
    ]  # which would clash
    least = build_parser().parse_args(["ask", "q", "--store", "s", "--min-support", "0.8"])
    assert ask.options_of(least).min_support == 0.8
    assert options.stop == ("a", "b")
    assert options.filter == {"x": "1", "y": "2=3"}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo\r\n  three"), "pdllm: error: one two three\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a\x1b[2Jb"),
            "a\\x1b[2Jb: No such file or directory\n",
        ),
        (OSError(), "pdllm: error: OSError\n"),
    ],
)
def test_an_error_is_one_plain_line(error: Exception, line: str, pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "run", raising(error))
    assert one_line(pdllm("store", "list", "--store", "s")).endswith(line)


def test_verbose_adds_the_traceback(pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "run", raising(ValueError("bad")))
    for argv in (
        ("--verbose", "store", "list", "--store", "s"),
        ("store", "list", "--store", "s", "--verbose"),
    ):
        outcome = pdllm(*argv)
        assert outcome.status == 1
        assert "Traceback" in outcome.err
        assert outcome.err.endswith("pdllm: error: bad\n")


def test_an_error_that_nobody_foresaw_is_not_hidden(pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "run", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        pdllm("store", "list", "--store", "s")


def test_an_interrupted_prefill_says_that_it_can_go_on(
    pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    monkeypatch.setattr(RagEngine, "prefill", raising(KeyboardInterrupt()))
    outcome = pdllm("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path, "--json")
    assert outcome.status == 130
    assert outcome.err == ("pdllm: interrupted: run the same command again and it goes on where it stopped\n")


def test_a_reader_that_goes_away_is_no_complaint() -> None:
    script = (
        "import sys; from pdllm_rag.cli import main, store\n"
        "store.run = lambda args: [print('x' * 1000) for _ in range(1000)] and 0\n"
        "sys.exit(main(['store', 'list', '--store', 's']))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


# -- prefill -------------------------------------------------------------------------------------------------


def test_prefill_prints_one_json_object_and_no_progress(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path, "--json")
    first = pdllm(*argv)
    report = one_object(first)
    assert first.status == 0
    assert first.err.count("\n") == 1
    assert "\x1b" not in first.err
    documents = report["documents"]
    assert (documents["added"], documents["updated"], documents["unchanged"]) == (2, 0, 0)
    assert documents["failed"] == []
    assert documents["missing"] == []
    assert report["chunks"]["computed"] >= 2
    assert report["tokens"] > 0
    assert report["tokens_per_s"] > 0
    assert report["seconds"] > 0

    again = one_object(pdllm(*argv))
    assert again["documents"]["unchanged"] == 2
    assert again["chunks"]["computed"] == 0


def test_prefill_shows_its_progress_to_a_person_on_stderr_only(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    shown = pdllm(*argv)
    assert shown.status == 0
    assert "2/2" in screen.getvalue()
    assert "tokens" in screen.getvalue()
    assert shown.out.startswith("2 documents: 2 added")
    assert "\x1b" not in shown.out
    screen.truncate(0)
    one_object(pdllm(*argv, "--json"))
    assert "2/2" not in screen.getvalue()


def test_prefill_says_first_what_a_token_takes_and_then_what_was_written(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    outcome = pdllm("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    assert outcome.status == 0
    announced, ended = outcome.err.splitlines()
    assert "0.4 KiB a token in bfloat16" in announced
    assert "2 documents: 2 added" in ended
    assert outcome.out.startswith("2 documents: 2 added, 0 updated, 0 unchanged, 0 failed, 0 missing\n")
    assert " of text, 0.4 KiB a token in bfloat16 (int8: 0.2 KiB)\n" in outcome.out


def test_a_binary_file_among_good_ones_is_reported_and_the_others_go_in(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    (folder / "noise.txt").write_bytes(bytes(range(256)) * 8)
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    outcome = pdllm(*argv)
    assert outcome.status == 3
    assert "3 documents: 2 added, 0 updated, 0 unchanged, 1 failed" in outcome.out
    (told,) = [line for line in outcome.err.splitlines() if line.startswith("pdllm: failed: ")]
    assert told.count("noise.txt") == 1
    assert "binary" in told
    (failed,) = one_object(pdllm(*argv, "--json"))["documents"]["failed"]
    assert set(failed) == {"path", "reason"}
    assert failed["path"] == "noise.txt"


def test_prefill_fails_when_every_document_failed(pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path) -> None:
    outcome = pdllm("prefill", tmp_path / "nothing", "--store", tmp_path / "kb", "--model", tiny_model_path, "--json")
    assert outcome.status == 1
    (failed,) = one_object(outcome)["documents"]["failed"]
    assert failed == {"path": str(tmp_path / "nothing"), "reason": "no such file or folder"}


def test_a_vanished_file_is_named_and_pruned_on_request(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    pdllm(*argv)
    (folder / "leave.md").unlink()
    told = pdllm(*argv)
    assert "1 missing" in told.out
    assert "--prune" in told.out
    assert "  leave.md\n" in told.out
    pruned = one_object(pdllm(*argv, "--prune", "--json"))
    assert pruned["documents"]["pruned"] == ["leave.md"]
    listed = one_object(pdllm("store", "list", "--store", tmp_path / "kb", "--json"))
    assert [document["doc_id"] for document in listed["documents"]] == ["buoys/gannet.txt"]


def test_shards_share_the_documents_and_a_prefix_goes_before_their_ids(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    for shard in ("1/2", "2/2"):
        argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
        assert pdllm(*argv, "--id-prefix", "hb/", "--shard", shard, "--json").status == 0
    listed = one_object(pdllm("store", "list", "--store", tmp_path / "kb", "--json"))
    assert [document["doc_id"] for document in listed["documents"]] == ["hb/buoys/gannet.txt", "hb/leave.md"]


def test_a_store_keeps_the_dtype_it_was_made_with(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    assert "in int8\n" in pdllm(*argv, "--kv-dtype", "int8").out
    assert "int8" in one_line(pdllm(*argv, "--kv-dtype", "bfloat16", "--json"))


def test_the_text_of_special_tokens_in_a_document_is_text(pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path) -> None:
    text = f"A mask is written {SPECIALS[3]} and an end {SPECIALS[2]}, says the manual."
    (tmp_path / "manual.txt").write_text(text)
    kb = tmp_path / "kb"
    assert pdllm("prefill", tmp_path / "manual.txt", "--store", kb, "--model", tiny_model_path).status == 0
    (document,) = one_object(pdllm("store", "list", "--store", kb, "--json"))["documents"]
    assert document["tokens"] == len(text) + document["chunks"]
    asked = pdllm("ask", f"What is {SPECIALS[3]}?", "--store", kb, "--model", tiny_model_path, "--steps", "2", "--json")
    assert asked.status == 0
    assert one_object(asked)["stats"]["finish_reason"] in ("stop", "length")


# -- ask -----------------------------------------------------------------------------------------------------


def test_ask_prints_the_answer_as_one_json_object(pdllm: Pdllm, filled: Path, tiny_model_path: Path) -> None:
    argv = ("ask", "How heavy is the Gannet?", "--store", filled, "--model", tiny_model_path)
    outcome = pdllm(*argv, "--steps", "4", "--json")
    answer = one_object(outcome)
    assert outcome.status == 0
    assert outcome.err == ""
    assert set(answer) == {"answer", "citations", "stats"}
    assert {"nfe", "tokens", "ms", "chunks", "policy", "decoder", "model"} <= set(answer["stats"])
    assert set(answer["stats"]["ms"]) == {"first_stage", "draft", "score", "load", "decode", "total"}
    assert set(answer["stats"]["chunks"]) == {"hit", "recomputed", "candidates"}
    for citation in answer["citations"]:
        assert set(citation) - {"page"} == {"doc_id", "ordinal", "char_start", "char_end", "score", "quote"}
        assert TEXTS[citation["doc_id"]][citation["char_start"] : citation["char_end"]] == citation["quote"]


def test_a_trace_has_one_json_object_a_denoising_step(
    pdllm: Pdllm, filled: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = (
        "ask",
        "How heavy is it?",
        "--store",
        filled,
        "--model",
        tiny_model_path,
        "--no-abstain",
        "--json",
    )
    answer = one_object(pdllm(*argv, "--trace", tmp_path / "steps.jsonl", "--steps", "4"))
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["nfe"] for step in steps] == list(range(1, answer["stats"]["nfe"] + 1))
    assert set(steps[0]) == set(DecodeStep._fields)
    assert steps[-1]["finished"] == answer["stats"]["finish_reason"]


def test_a_question_is_read_from_stdin(
    pdllm: Pdllm, filled: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--store", filled, "--model", tiny_model_path, "--steps", "2", "--json")
    asked = one_object(pdllm("ask", "How heavy is it?", *argv))
    monkeypatch.setattr(sys, "stdin", io.StringIO("How heavy is it?"))
    piped = one_object(pdllm("ask", "-", *argv))
    assert (piped["answer"], piped["citations"]) == (asked["answer"], asked["citations"])


def test_wrong_stores_models_and_questions_are_told_in_one_line(
    pdllm: Pdllm, filled: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    model = ("--model", tiny_model_path)
    assert "no store at" in one_line(pdllm("ask", "q", "--store", tmp_path / "typo", *model))
    assert not (tmp_path / "typo").exists()
    assert "'no-such'" in one_line(pdllm("ask", "q", "--store", filled, "--model", "no-such"))
    assert "question is empty" in one_line(pdllm("ask", "", "--store", filled, *model))
    assert "question is empty" in one_line(pdllm("ask", " \n ", "--store", filled, *model))
    assert "no-folder" in one_line(pdllm("ask", "q", "--store", filled, *model, "--trace", tmp_path / "no-folder/f"))
    assert "another model" in one_line(
        pdllm("ask", "q", "--store", filled, "--model", save_tiny_model(tmp_path / "other", seed=1))
    )
    assert "no store at" in one_line(pdllm("store", "stats", "--store", tmp_path / "typo"))


class Scripted:
    """An engine that streams given events."""

    def __init__(self, *events: TextDelta | CanvasUpdate | Final, error: Exception | None = None) -> None:
        self.events = events
        self.error = error

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self, *_: object, **__: object) -> Iterator[TextDelta | CanvasUpdate | Final]:
        yield from self.events
        if self.error is not None:
            raise self.error


def an_answer(text: str, *citations: Citation, finish_reason: str = "stop") -> Answer:
    ms = dict.fromkeys(("first_stage", "draft", "score", "load", "decode"), 1.0)
    return Answer(
        text,
        citations,
        AnswerStats(
            nfe=5,
            tokens=3,
            prompt_tokens=9,
            context_tokens=99,
            cached_tokens=99,
            ms={**ms, "total": 5.0},
            chunks=ChunkCounts(hit=2, recomputed=1, candidates=8),
            policy="independent",
            decoder="static_kv",
            model="demo",
            finish_reason=finish_reason,
            supported=bool(citations),
            support=None,
        ),
    )


def test_an_answer_is_followed_by_its_sources_and_its_cost(pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Citation("a/b.pdf", 3, 10, 200, -1.234, "The battery [lasts] 18 months. " * 5, page=2)
    second = Citation("c.md", 0, 0, 4, -2.0, "clear\x1b[2J\nscreen")
    answer = an_answer("18 months", first, second, finish_reason="length")
    engine = Scripted(TextDelta("18 "), TextDelta("months"), Final(answer))
    monkeypatch.setattr(RagEngine, "open", lambda *_, **__: engine)
    outcome = pdllm("ask", "q", "--store", "kb", "--max-new-tokens", "3")
    assert outcome.status == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[:4] == ["18 months", "", "Sources", " 1  a/b.pdf  page 2, chunk 3, score -1.23"]
    assert lines[4].startswith("    The battery [lasts] 18 months. The battery")
    assert max(len(line) for line in lines[:-1]) <= 80
    assert " 2  c.md  chunk 0, score -2.00" in lines
    assert "    clear\\x1b[2J screen" in lines
    assert "The answer was cut at 3 tokens; --max-new-tokens allows more." in lines
    cost = " ".join(lines[-2:])
    assert "5 ms (first_stage 1, draft 1, score 1, load 1, decode 1), nfe 5, chunks 2 hit, 1 recomputed" in cost


def test_an_answer_without_support_names_no_source(pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(TextDelta("Not found in the documents."), Final(an_answer("Not found in the documents.")))
    monkeypatch.setattr(RagEngine, "open", lambda *_, **__: engine)
    outcome = pdllm("ask", "q", "--store", "kb")
    said, blank, told, *_ = outcome.out.splitlines()
    assert (said, blank) == ("Not found in the documents.", "")
    assert told == "No source: the documents in kb do not hold an answer to this question."
    assert "Sources" not in outcome.out


def test_an_error_in_the_middle_of_an_answer_has_a_line_of_its_own(
    pdllm: Pdllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Scripted(TextDelta("18 mon"), error=NumericsError("not finite"))
    monkeypatch.setattr(RagEngine, "open", lambda *_, **__: engine)
    outcome = pdllm("ask", "q", "--store", "kb")
    assert outcome.out == "18 mon\n"
    assert one_line(outcome) == "pdllm: error: not finite\n"


def test_streamed_text_breaks_between_words_and_loses_none() -> None:
    screen = io.StringIO()
    streamed = StreamedText(Console(file=screen, force_terminal=True, width=20, color_system=None))
    text = "Eighteen months in cold water,\nor about twenty months in a warm sea-of-extraordinary-width."
    for start in range(0, len(text), 3):
        streamed.write(text[start : start + 3])
    streamed.end()
    lines = screen.getvalue().splitlines()
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= 20 for line in lines if " " in line)
    assert "water," in lines[1]
    assert lines[2].startswith("or about")


# -- models ---------------------------------------------------------------------------------------------------


def test_models_list_names_the_bundled_models_and_the_families(pdllm: Pdllm) -> None:
    listed = one_object(pdllm("models", "list", "--json"))
    assert [model["name"] for model in listed["bundled"]] == ["demo"]
    assert all({"name", "title", "model_type", "licence"} <= set(family) for family in listed["families"])
    assert "demo" in pdllm("models", "list").out


def test_models_pull_names_the_folder_and_refuses_what_is_not_there(
    pdllm: Pdllm, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pulled = one_object(pdllm("models", "pull", tiny_model_path, "--json"))
    assert set(pulled) == {"name", "family", "folder", "weights_bytes"}
    assert pulled["weights_bytes"] == sum(f.stat().st_size for f in tiny_model_path.glob("*.safetensors"))
    assert "HF_HUB_OFFLINE" in one_line(pdllm("models", "pull", "nobody/nothing", "--revision", "v1"))


def test_models_info_describes_a_checkpoint_and_counts_its_documents(
    pdllm: Pdllm, filled: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    info = one_object(pdllm("models", "info", tiny_model_path, "--json"))
    assert (info["n_layers"], info["n_heads"], info["n_kv_heads"], info["head_dim"]) == (3, 4, 2, 16)
    assert (info["mask_id"], info["bos_id"], info["eos_ids"], info["logit_shift"]) == (3, 0, [2], True)
    assert info["kv_bytes_per_token"] == {"bfloat16": 384, "float32": 768, "int8": 240}
    assert info["compute_dtype"] in ("bfloat16", "float32")
    assert "store" not in info
    held = one_object(pdllm("models", "info", tiny_model_path, "--store", filled, "--json"))
    assert held["store"]["documents"] == 2
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert one_object(pdllm("models", "info", other, "--store", filled, "--json"))["store"]["documents"] == 0
    shown = pdllm("models", "info", tiny_model_path, "--store", filled).out
    assert "0.4 KiB in bfloat16" in shown
    assert "2 documents of this model" in shown
    assert "'nope'" in one_line(pdllm("models", "info", "nope"))
