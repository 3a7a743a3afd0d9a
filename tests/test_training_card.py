"""The model card of a training run: what it says against what is there, and scores put into it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
import yaml
from command_line import Pdllm, one_line, one_object
from tiny import save_tiny_model

from pdllm_rag.cli.main import build_parser
from pdllm_rag.models import load_model
from pdllm_rag.models.loader import load_modules, read_spec
from pdllm_rag.training.card import Base, nameable
from pdllm_rag.training.texts import Corpus

N_ROWS = 60
SMALL = ("--rows", "1", "--warmup", "1", "--context-len", "1024", "--canvas-len", "512", "--answer-lens", "32,64",
         "--device", "cpu", "--json")  # fmt: skip
SOURCES = [
    {"name": "Buoys | all", "licence": "CC0"},
    {"name": "SQuAD", "licence": "CC BY-SA 4.0", "url": "https://huggingface.co/datasets/rajpurkar/squad"},
]
ESTIMATE = {"value": 0.75, "low": 0.5, "high": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "base")
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: owner/tiny\n---\n")
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with file.open("w") as lines:
        for number in range(N_ROWS):
            context = f"Buoy {number * 37} weighs {number + 30} kilograms and lies off pier {number * 11}."
            question = f"How heavy is buoy {number * 37}?"
            print(
                json.dumps(
                    {"context": context, "question": question, "answer": f"{number + 30} kilograms" if number else ""}
                ),
                file=lines,
            )
    return file


@pytest.fixture
def trained(pdllm: Pdllm, model: Path, rows: Path, tmp_path: Path) -> Callable[..., Path]:
    """Trains with the tiny model and these rows; gives the result's folder."""

    def train(kind: str, *more: str) -> Path:
        if kind in ("chunk-lora", "d2f"):
            pytest.importorskip("peft")
        given = ("train", kind, "--model", str(model), "--data", str(rows), "--out", str(tmp_path / "run"))
        return Path(one_object(pdllm(*given, "--steps", "2", *SMALL, *more))["result"])

    return train


def front_of(card: str) -> dict[str, Any]:
    begin, head, _ = card.split("---\n", 2)
    assert begin == ""
    found: dict[str, Any] = yaml.safe_load(head)
    return found


def cells(card: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in card.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def has_folders(card: str) -> bool:
    return re.search(r"(?:^|[\s`'\"=(])[~/][\w/]", card) is not None


def test_the_card_says_what_is_there(trained: Callable[..., Path], model: Path, rows: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources.json"
    sources.write_text(json.dumps(SOURCES))
    folder = trained("adapt", "--rounding", "4bit", "--seed", "3", "--sources", str(sources))
    card = (folder / "README.md").read_text()
    front, told = front_of(card), cells(card)
    assert front["license"] == "mit"
    assert front["base_model"] == "owner/tiny"
    assert front["datasets"] == ["rajpurkar/squad"]
    assert front["library_name"] == "pdllm-rag"
    modules, _ = load_modules(read_spec(str(folder))[0], folder, torch.device("cpu"), torch.float32)
    assert told["parameters"] == [f"{sum(one.numel() for one in modules.parameters()):,}"]
    assert told["bytes of weights"] == [f"{sum(one.stat().st_size for one in folder.glob('*.safetensors')):,}"]
    assert told["BLAKE3 of weights and config"] == [load_model(str(folder)).weights_digest]
    assert told["base"][-1] == load_model(str(model)).weights_digest
    assert told["rows.jsonl"] == [str(N_ROWS), blake3.blake3(rows.read_bytes()).hexdigest()]
    assert told["positions"] == [str(2 * 1 * (1024 + 512))]
    training, held = Corpus.read([rows]).split()
    assert held.n_texts
    assert [told[f"texts {name}"] for name in ("trained on", "held out")] == [
        [str(training.n_texts)],
        [str(held.n_texts)],
    ]
    logged = [json.loads(line) for line in (folder.parent / "log.jsonl").read_text().splitlines()]
    losses = {name: value for line in logged for name, value in line.items() if name.endswith("loss")}
    assert told["last training loss"] == [str(losses["loss"])]
    assert told["last validation loss"] == [str(losses["validation_loss"])]
    assert told["Buoys \\| all"] == ["CC0", ""]
    assert {name: told[name] for name in ("seed", "steps", "rounding", "lr")} == {
        "seed": ["3"], "steps": ["2"], "rounding": ["4bit"], "lr": ["0.0004"]}  # fmt: skip
    assert told["torch"] == [torch.__version__]
    assert not has_folders(card)


@pytest.mark.parametrize("more", [(), ("--keep-layers", "0-1", "--mask-in-place-of", "<|mask|>", "--views", "1,0,0")])
def test_the_command_does_the_same_again(trained: Callable[..., Path], tmp_path: Path, more: tuple[str, ...]) -> None:
    card = (trained("adapt", *more) / "README.md").read_text()
    [line] = [line for line in card.splitlines() if line.startswith("pdllm train adapt")]
    given = ("--model", "base", "--data", "rows.jsonl", "--out", "run", "--steps", "2", *SMALL)
    wanted = build_parser().parse_args(["train", "adapt", *given, *more])
    assert vars(build_parser().parse_args([*shlex.split(line)[1:], "--json"])) == vars(wanted)
    if more:
        start = (tmp_path / "run" / "start" / "README.md").read_text()
        assert "rows.jsonl" not in start.replace(line, "")
        assert front_of(start)["base_model"] == "owner/tiny"
        assert cells(start)["kind"] == ["prune"]
        assert not has_folders(start)


def test_the_card_is_the_same_again_and_changes_no_fingerprint(trained: Callable[..., Path]) -> None:
    folder = trained("adapt")
    first = (folder / "README.md").read_text()
    assert (trained("adapt") / "README.md").read_text() == first  # gone on with at its end: no step is taken
    with_card = load_model(str(folder))
    (folder / "README.md").unlink()
    without = load_model(str(folder))
    assert with_card.fingerprint("float32") == without.fingerprint("float32")


@pytest.mark.parametrize(
    ("kind", "rounding", "library"), [("chunk-lora", "none", "peft"), ("d2f", "8bit", "pdllm-rag")]
)
def test_an_adapter_has_a_card(
    trained: Callable[..., Path], model: Path, kind: str, rounding: str, library: str
) -> None:
    card = (trained(kind, "--rank", "4", "--rounding", rounding) / "README.md").read_text()
    front, told = front_of(card), cells(card)
    width, queries, keys = 32, 4 * 16, 2 * 16
    n_parameters = 3 * 4 * sum(a + b for a, b in ((width, queries), (width, keys), (width, keys), (queries, width)))
    assert told["parameters"] == [f"{n_parameters:,}"]
    assert told["adapter"][0].startswith("rank 4, alpha 32, on ")
    assert told["base"][-1] == load_model(str(model)).weights_digest
    assert "were not given" in card
    assert "datasets" not in front
    assert front["library_name"] == library
    assert not has_folders(card)


def test_a_mean_of_differently_licensed_checkpoints_has_no_licence(
    pdllm: Pdllm, model: Path, rows: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    given = ("--model", str(model), str(other), "--data", str(rows), "--out", str(tmp_path / "mean"), "--json")
    pdllm("train", "round", *given, "--batches", "1", "--context-len", "512", "--canvas-len", "256")
    card = (tmp_path / "mean" / "README.md").read_text()
    told = cells(card)
    assert front_of(card)["license"] == "unknown"
    assert [told["base"][0], told["other"][0]] == ["mit", "unknown"]
    assert told["other"][-1] == load_model(str(other)).weights_digest
    assert told["positions"] == ["768"]
    assert not has_folders(card)


def test_scores_are_put_in_and_all_else_stays(
    trained: Callable[..., Path], pdllm: Pdllm, rows: Path, tmp_path: Path
) -> None:
    folder = trained("adapt")
    card = folder / "README.md"
    before = card.read_text() + "\n## In our own words\n\nIt is small.\n"
    card.write_text(before)
    asked = tmp_path / "asked.jsonl"
    row = json.loads(rows.read_text().splitlines()[1])
    asked.write_text(json.dumps({"question": row["question"], "answers": [row["answer"]], "context": row["context"]}))
    answers = one_object(pdllm("eval", "qa", "--data", str(asked), "--model", str(folder), "--json"))
    qa, decoders = tmp_path / "qa.json", tmp_path / "decoders.json"
    command = f"pdllm eval qa --data {asked} --model {folder} --json"
    qa.write_text(json.dumps({"command": command, "date": "2026-01-31", "result": answers}))
    retrieval = {"given": {"n": 6, "n_retrieval": 5, "recall_at_4": ESTIMATE}}
    setting = {"setting": "static_kv threshold=1.0", "f1": ESTIMATE, "against_baseline": {"f1": ESTIMATE}}
    decoders.write_text(json.dumps({"model": "/somewhere/result", "n": 7, "quality": [setting], **retrieval}))
    assert one_object(pdllm("train", "card", str(folder), "--scores", str(qa), str(decoders), "--json"))["card"]
    after = card.read_text()
    mark = "\n## Scores\n"
    assert after.partition(mark)[0] == before.partition(mark)[0]
    assert after.endswith(before[before.index("\n## In our own words") :])
    value = answers["answerable"]["f1"]
    interval = f"{value['low']:.3f} to {value['high']:.3f}"
    assert f"| qa.json | answerable, f1 | 1 | {value['value']:.3f} | {interval} |" in after
    assert "| decoders.json | static_kv threshold=1.0, f1 | 7 | 0.750 | 0.500 to 0.900 |" in after
    assert "| decoders.json | static_kv threshold=1.0, against_baseline, f1 | 7 |" in after
    assert "| decoders.json | given, recall_at_4 | 5 | 0.750 |" in after
    assert "by_min_support" not in after
    assert "2026-01-31 | pdllm eval qa --data asked.jsonl --model result --json |" in after
    assert "| decoders.json | result | not recorded | not recorded | not recorded | not recorded |" in after
    assert not has_folders(after)
    pdllm("train", "card", str(folder), "--scores", str(qa), str(decoders))
    assert card.read_text() == after
    pdllm("train", "card", str(folder), "--scores", str(decoders))
    assert "qa.json" not in card.read_text()


@pytest.mark.parametrize(
    ("report", "told"),
    [
        ({"answerable": {"f1": ESTIMATE}, "settings": {"weights": "beef"}}, "was measured on weights beef"),
        ({"speed": [{"prompt": 8, "step_ms": {"median": 1.0}}]}, "no value with an interval"),
        ([1], "expected a JSON object"),
        (None, "No such file"),
    ],
)
def test_what_are_no_scores_of_the_model_is_refused(
    pdllm: Pdllm, model: Path, tmp_path: Path, report: Any, told: str
) -> None:
    before = (model / "README.md").read_text()
    file = tmp_path / "report.json"
    if report is not None:
        file.write_text(json.dumps(report))
    assert told in one_line(pdllm("train", "card", str(model), "--scores", str(file)))
    assert (model / "README.md").read_text() == before


@pytest.mark.parametrize(
    "sources", ["{", {"name": "a", "licence": "b"}, ["a"], [{"name": "a"}], [{"name": "a", "licence": 1}],
                [{"name": "a", "licence": "b", "link": "c"}]]
)  # fmt: skip
def test_sources_that_say_too_little_are_refused_before_training(
    pdllm: Pdllm, model: Path, rows: Path, tmp_path: Path, sources: Any
) -> None:
    file = tmp_path / "sources.json"
    file.write_text(sources if isinstance(sources, str) else json.dumps(sources))
    given = ("--model", str(model), "--data", str(rows), "--out", str(tmp_path / "run"), "--steps", "2", *SMALL)
    assert "url optional" in one_line(pdllm("train", "adapt", *given, "--sources", str(file)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("card", "ids", "licence"),
    [
        (None, (), {"license": "unknown"}),
        ("# no front matter: license: mit", (), {"license": "unknown"}),
        ("---\nlicense:\nbase_model: 5\n---\n", ("5",), {"license": "unknown"}),
        (
            "---\nlicense: other\nlicense_name: llama3\nbase_model: [a/b, c/d]\n---\n",
            ("a/b", "c/d"),
            {"license": "other", "license_name": "llama3"},
        ),
    ],
)
def test_a_licence_is_what_the_card_of_the_base_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, card: str | None, ids: tuple[str, ...], licence: dict[str, str]
) -> None:
    folder = save_tiny_model(tmp_path / "base")
    if card is not None:
        (folder / "README.md").write_text(card)
    found = Base.of(str(folder))
    assert (found.name, found.ids, found.licence) == ("base", ids, licence)
    monkeypatch.setattr("pdllm_rag.training.card.locate", lambda _: folder)
    assert Base.of("owner/tiny")[::2] == ("owner/tiny", ("owner/tiny",))


def test_a_card_that_somebody_wrote_is_left_as_it_is(trained: Callable[..., Path], tmp_path: Path) -> None:
    own = tmp_path / "run" / "result" / "README.md"
    own.parent.mkdir(parents=True)
    own.write_text("# Mine\n")
    assert trained("adapt") == own.parent
    assert own.read_text() == "# Mine\n"


def test_words_lose_their_folders_and_ids_stay() -> None:
    given = ("/a/b/c.json", "~/b", "../x/y.txt", "--out=/a/b", "GSAI-ML/LLaDA-8B-Instruct", "a/b/c", "--n=3", "plain")
    wanted = ["c.json", "b", "y.txt", "--out=b", "GSAI-ML/LLaDA-8B-Instruct", "c", "--n=3", "plain"]
    assert list(map(nameable, given)) == wanted
