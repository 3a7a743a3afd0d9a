"""One rule for filters, wherever one is given: on the command line, in Python, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome
from pdllm_store import DocumentInfo
from serving import served

from pdllm_rag import AskOptions, RagEngine
from pdllm_rag.cli import main
from pdllm_rag.metadata import admitted

FILES = {
    "north/boat.md": "---\nteam: north\nyear: 2025\ntags: [boat, sea]\ndraft: true\n---\nThe boat sails at dawn.\n",
    "north/deep/tug.md": "---\nteam: no\u0308rth\nyear: 2024\ntags: boat\nlength: 1.5\n---\nThe tug sails at noon.\n",
    "train.txt": "The train leaves at night.\n",
}
Ask = Callable[[dict[str, Any]], tuple[set[str], str]]


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    top = tmp_path_factory.mktemp("filters")
    for name, text in FILES.items():
        (top / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (top / "docs" / name).write_text(text)
    assert main(["prefill", str(top / "docs"), "--store", str(top / "kb"), "--model", str(tiny_model_path)]) == 0
    return top / "kb"


@pytest.fixture(scope="module")
def engine(kb: Path, tiny_model_path: Path) -> Iterator[RagEngine]:
    options = AskOptions(k=9, max_new_tokens=4, score_window=float("inf"), abstain=False)
    with RagEngine.open(kb, str(tiny_model_path), create=False, options=options) as opened:
        yield opened


@pytest.fixture(scope="module")
def over_http(engine: RagEngine) -> Iterator[Ask]:
    with served(engine) as site:
        yield lambda wanted: _read(site.ask("boat", filter=wanted).json())


@pytest.fixture
def ask(request: pytest.FixtureRequest, kb: Path, engine: RagEngine, tiny_model_path: Path) -> Ask:
    """Asks in the way of the parameter."""
    if request.param == "http":
        http: Ask = request.getfixturevalue("over_http")
        return http
    if request.param == "python":
        return lambda wanted: _read(engine.answer("boat", filter=wanted).as_dict())
    pdllm: Callable[..., Outcome] = request.getfixturevalue("pdllm")
    place = ("--store", kb, "--model", tiny_model_path, "--k", 9, "--score-window", "inf", "--no-abstain", "--json")

    def on_the_command_line(wanted: dict[str, Any]) -> tuple[set[str], str]:
        given = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in wanted.items()]
        return _read(json.loads(pdllm("ask", "boat", *place, *(f"--filter={one}" for one in given)).out))

    return on_the_command_line


def _read(answer: dict[str, Any]) -> tuple[set[str], str]:
    return {citation["doc_id"] for citation in answer["citations"]}, answer["stats"]["note"]


BOAT, TUG, TRAIN = FILES


@pytest.mark.parametrize("ask", ["command line", "python", "http"], indirect=True)
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"team": "north"}, {BOAT}),
        ({"team": "n\u00f6rth"}, {TUG}),
        ({"year": "2025"}, {BOAT}),
        ({"year": 2025}, {BOAT}),
        ({"draft": "true"}, {BOAT}),
        ({"draft": True}, {BOAT}),
        ({"length": 1.5}, {TUG}),
        ({"tags": "boat"}, {BOAT, TUG}),
        ({"tags": "sea", "year": 2025}, {BOAT}),
        ({"tags": "sea", "year": 2024}, set()),
        ({"folder": "north"}, {BOAT}),
        ({"folder": "north/deep"}, {TUG}),
        ({"folder": ""}, {TRAIN}),
        ({"suffix": ".md"}, {BOAT, TUG}),
        ({"media_type": "text/plain"}, {TRAIN}),
        ({"doc_id": TRAIN}, {TRAIN}),
    ],
)
def test_a_filter_admits_the_same_documents_everywhere(ask: Ask, wanted: dict[str, Any], expected: set[str]) -> None:
    found, note = ask(wanted)
    assert found == expected
    assert note == ("" if expected else "no document has the values that the filter asks for (tags, year)")


@pytest.mark.parametrize("ask", ["command line", "python", "http"], indirect=True)
@pytest.mark.parametrize("value", ["None", "null", "2025"])
def test_a_key_that_no_document_has_matches_nothing_and_is_named(ask: Ask, value: str) -> None:
    found, note = ask({"yaer": value, "suffix": ".md"})
    assert found == set()
    assert note.startswith("no document has the metadata 'yaer'")
    assert "year" in note


def test_retrieval_alone_says_so_too(engine: RagEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.retrieve("boat", filter={"yaer": 2025}) == []
    assert "no document has the metadata 'yaer'" in caplog.text


def test_the_command_line_says_why_it_has_no_source(
    kb: Path, tiny_model_path: Path, pdllm: Callable[..., Outcome]
) -> None:
    outcome = pdllm("ask", "boat", "--store", kb, "--model", tiny_model_path, "--filter", "yaer=2025")
    assert "No source: no document has the metadata 'yaer'" in outcome.out


def test_a_documents_own_id_and_source_stand_before_metadata_of_that_name() -> None:
    info = DocumentInfo(
        doc_id="a", source="/a", text_id=b"", recipe="", chunk_ids=(), n_tokens=1, n_bytes=1, pinned=False,
        metadata={"source": "https://example.org", "doc_id": "b"},
    )  # fmt: skip
    assert admitted([info], {"doc_id": "a", "source": "/a"}) == ({"a"}, "")
    assert admitted([info], {"doc_id": "b"})[0] == set()
    with pytest.raises(ValueError, match="filter\\['x'\\]"):
        admitted([info], {"x": object()})
