"""Quoted figures have their source: each number of the README is that of a file in docs/numbers, and every file there
says how it was made and stands on a page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdllm_rag.cli.main import build_parser

ROOT = Path(__file__).parent.parent
NUMBERS = ROOT / "docs" / "numbers"
SCRIPT = ROOT / "docs" / "measure.py"
NAMES = sorted(path.stem for path in NUMBERS.glob("*.json"))
PAGES = sorted(ROOT.glob("docs/**/*.md"))

# What the README says, and the figures in it by their order: a file, then what is multiplied (or, behind a "/", divided
# by): keys of the file and plain factors. A figure that was measured again with another outcome fails here: change the
# sentence with it.
DENSE, CONTROL = "results/{}/series/0/{}", "sets/dev, one paragraph and two others/ways/control, {}/f1/value"
WON = "sets/dev, one paragraph and two others/share of the gap in F1 won back"
KV = "/result/shapes/{}/kv_bytes_per_token"
QUOTES: dict[str, list[tuple[Any, ...]]] = {
    "{:.1f} GB of KV": [("prefill", "result/bytes/written", 1e-9)],
    "finds {:.0f} of {:.0f} ten-digit numbers at the very beginning": [
        ("needle_dense_gpu", DENSE.format(0, "cells/10/hits")),
        ("needle_dense_gpu", DENSE.format(0, "cells/10/n")),
    ],
    "of 16k and 32k tokens {:.0f} of {:.0f} anywhere": [
        ("needle_dense_gpu", DENSE.format(1, "tasks/0/hits")),
        ("needle_dense_gpu", DENSE.format(1, "tasks/0/n")),
    ],
    "at every depth: {:.0f} of {:.0f} up to 32k tokens": [
        ("needle_gpu", "result/series/0/tasks/1/hits"),
        ("needle_gpu", "result/series/0/tasks/1/n"),
    ],
    "{:.0f} of {:.0f} in 128k": [
        ("needle_128k", "result/series/0/tasks/1/hits"),
        ("needle_128k", "result/series/0/tasks/1/n"),
    ],
    "a denoising step takes {:.1f} ms instead of {:,.0f}": [
        ("gpu_decode_dream", "contexts/2/step/static_kv/ms/median"),
        ("gpu_decode_dream", "contexts/2/step/vanilla/ms/median"),
    ],
    "its {:.0f} chunks scored and their KV on the device {:.2f} s instead of {:.1f}": [
        ("gpu_decode_dream", "contexts/2/question/candidates"),
        ("gpu_decode_dream", "contexts/2/question/all_steps/warm/ms/median", 1e-3),
        ("gpu_decode_dream", "contexts/2/question/all_steps/vanilla_ms", 1e-3),
    ],
    "the same four chunks takes {:.2f} s": [("gpu_decode_dream", "autoregressive/kinds/split_s/total_ms/median", 1e-3)],
    "a step over {:,.0f} cached tokens is {:.1f} times as fast": [
        ("bench_query", "result/decode/divisor/context_tokens"),
        ("bench_query", "result/decode/ratio/median"),
    ],
    "a question over the handbook takes {:.2f} s": [("qa", "result/ms/median", 1e-3)],
    "right for {:.2f} ({:.2f} to {:.2f}) of the handbook's {:.0f} answerable questions": [
        *(("qa", f"result/answerable/accuracy/{name}") for name in ("value", "low", "high")),
        ("qa", "result/answerable/n"),
    ],
    "among the four best for {:.0f} of {:.0f}": [
        ("qa", "result/answerable/recall_at_4/value", "result/answerable/n_retrieval"),
        ("qa", "result/answerable/n_retrieval"),
    ],
    "and a share of {:.2f} of SQuAD": [("support", "held out/refused/near miss")],
    "{:.0f} of {:.0f} unrelated questions are refused": [
        ("qa", "result/unrelated/refused/value", "result/unrelated/n"),
        ("qa", "result/unrelated/n"),
    ],
    "only {:.0f} of {:.0f} near misses": [
        ("qa", "result/near_miss/refused/value", "result/near_miss/n"),
        ("qa", "result/near_miss/n"),
    ],
    "loses {:.1f} points of F1 by it ({:.3f} against {:.3f}, n = {:.0f})": [
        ("chunk_lora", "sets/dev, one paragraph and two others/control joint against independent/f1/value", 100),
        ("chunk_lora", CONTROL.format("independent")),
        ("chunk_lora", CONTROL.format("joint")),
        ("chunk_lora", "sets/dev, one paragraph and two others/n"),
    ],
    "wins {:.2f} ({:.2f} to {:.2f}) of that back": [
        ("chunk_lora", f"{WON}/{name}") for name in ("value", "low", "high")
    ],
    "takes {:.0f} KiB with the bundled model ({:.1f} in int8)": [
        ("reuse_singlehop", "result/stored/bfloat16/kv_bytes_per_1k_tokens", 1 / 1000 / 1024),
        ("reuse_singlehop", "result/stored/int8/kv_bytes_per_1k_tokens", 1 / 1000 / 1024),
    ],
    "{:.1f} KB for each byte of text": [("prefill", "result/bytes/written", "/result/bytes/text", 1e-3)],
    "{:.0f} KiB in Dream-7B's shape, {:.0f} in LLaDA-8B's": [
        ("gpu_model_shapes", "result/shapes/dream-7b/kv_bytes_per_token", 1 / 1024),
        ("gpu_model_shapes", "result/shapes/llada-8b/kv_bytes_per_token", 1 / 1024),
    ],
}
# Digits that are no measurement.
NAMED = (
    "a chunk LoRA of 934 steps",  # its command says so: below
    "1.4 GB of them",  # what pip fetches changes with the packages' releases
    "104 M parameters in 58 MB",  # the bundled model's card
    "H200",
    "7B or 8B",
    "Dream-7B",
    "BLAKE3",
    "xxh3-128",
    "transformers' own forward to 1e-5",  # a test's bound
    "Apache-2.0",
    "of 2k tokens",
    "over 32k tokens",
    "2.0's",  # of SQuAD
)
FENCED = re.compile(r"^```.*?^```|^ {4}.*?$", re.MULTILINE | re.DOTALL)
TARGETS = re.compile(r"\]\([^)]*\)|`[^`]*`|\[\w+/?\w*\.(?:md|json)\]")


@cache
def source(name: str) -> Any:
    return json.loads((NUMBERS / f"{name}.json").read_text())


def figure(name: str, *factors: float | str | tuple[str, ...]) -> float:
    """The product of a file's values and plain factors; a key behind "/" divides, keys in a tuple are added."""
    found = 1.0
    for factor in factors:
        if isinstance(factor, tuple):
            found *= sum(figure(name, key) for key in factor)
        elif isinstance(factor, str):
            node = source(name)
            for key in factor.removeprefix("/").split("/"):
                node = node[int(key)] if isinstance(node, list) else node[key]
            found = found / node if factor.startswith("/") else found * node
        else:
            found *= factor
    return found


def quoted() -> Iterator[str]:
    """Each sentence as it has to be by its sources."""
    for text, figures in QUOTES.items():
        yield text.format(*(figure(*one) for one in figures))


def files_of(figures: list[tuple[Any, ...]]) -> str:
    return ", ".join(sorted({name for name, *_ in figures}))


def prose() -> str:
    return FENCED.sub("", (ROOT / "README.md").read_text())


@pytest.mark.parametrize(("text", "files"), list(zip(quoted(), map(files_of, QUOTES.values()), strict=True)))
def test_the_readme_quotes_what_was_measured(text: str, files: str) -> None:
    assert text in prose(), f"the README should say {text!r}: so it is in {files} of docs/numbers"


def test_every_number_of_the_readme_has_a_source() -> None:
    rest = prose()
    for text in (*quoted(), *NAMED):
        assert text in rest, f"{text!r} is no longer in the README"
        rest = rest.replace(text, "")
    without = [line for line in TARGETS.sub("", rest).splitlines() if re.search(r"\d", line)]
    assert not without, "numbers without an entry in QUOTES or NAMED"
    assert any("--steps 934" in command for command in source("chunk_lora")["commands"])


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_how_it_was_made_and_on_what(name: str) -> None:
    record = source(name)
    assert all(script().commands(record))
    assert script().machines(record)
    if "NVIDIA" in str(script().machines(record)):  # it cannot be made again here: when it was is part of it
        assert "date" in record


def test_each_figure_of_a_cpu_is_made_again_or_a_reason_is_given() -> None:
    again = list(script().on_cpu())
    assert len(again) == len(set(again))
    assert {*script().MINUTES, *script().ELSEWHERE} <= {*NAMES}
    for name in again:
        for command in script().commands(source(name)):
            program, *words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
            if program == "pdllm":
                build_parser().parse_args(words)
                assert "--json" in words
            else:
                assert program == "python"
                assert words[0] == "-m" or (ROOT / words[0]).is_file()


def test_what_cannot_be_made_here_is_refused_before_anything_runs() -> None:
    """As a script, whose folder comes first among the places that modules are looked for in."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "store", "integrations"))
    command = [sys.executable, SCRIPT, "qa", "gpu_prefill"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "gpu_prefill: cannot be made here; these can: prefill, qa," in done.stderr


def test_files_are_written_anew_by_their_own_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "if '--out' in sys.argv: open(sys.argv[-1], 'w').write(json.dumps({'runs': sys.argv[2]}))\n"
        "else: print(json.dumps({'machine': 'here', 'over': sys.argv[2]}))\n"
    )
    asked = {name: f"A=1 python {program} --store kb {more}".rstrip() for name, more in (("a", "--json"), ("b", ""))}
    twice = {"commands": [asked["a"]] * 2, "note": "on a busy machine"}
    for name, record in {"a": {"command": asked["a"]}, "b": {"command": asked["b"]}, "c": twice}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(script(), "NUMBERS", tmp_path)
    store = tmp_path / "my store"
    store.mkdir()
    for name in "abc":
        script().measure(name, store)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in "abc"}
    assert all(record.pop("date") for record in found.values())
    over = {"machine": "here", "over": str(store)}
    assert found["a"] == {"command": asked["a"], "result": over}
    assert found["c"] == {"commands": [asked["a"]] * 2, "results": [over] * 2}
    assert found["b"].pop("machine")["torch"]
    assert found["b"] == {"command": asked["b"], "runs": str(store)}


def named(text: str) -> set[str]:
    """Files of docs/numbers that a text names."""
    whole = re.sub(
        r"(\w*)\{([\w,]+)\}\.json", lambda m: " ".join(f"{m[1]}{part}.json" for part in m[2].split(",")), text
    )
    return {name for name in re.findall(r"(\w+)\.json\b", whole) if name in NAMES}


def test_every_file_stands_on_a_page() -> None:
    assert not set(NAMES) - {name for page in [*PAGES, ROOT / "README.md"] for name in named(page.read_text())}


def test_files_that_pages_name_exist() -> None:
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "README.md"])
    assert not [name for name in re.findall(r"numbers/(\w+)\.json", text) if name not in NAMES]
