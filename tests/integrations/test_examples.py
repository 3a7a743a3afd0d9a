"""The examples run as they are, on the bundled model and the handbook."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from prompt_templates import ONE_MESSAGE

from pdllm_rag import RagEngine
from pdllm_rag.evaluation.qa import read_questions

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handbook, read once for all that use it."""
    folder = tmp_path_factory.mktemp("handbook") / "kb"
    with RagEngine.open(folder) as engine:
        assert engine.prefill([EXAMPLES / "handbook"]).failed == []
    return folder


def test_every_question_of_the_handbook_is_asked_as_if_its_chunks_were_handed_over(store: Path) -> None:
    """A template around a question changes nothing: same chunks, same question, so token for token the same answer."""
    with RagEngine.open(store) as engine:
        for question in read_questions(EXAMPLES / "handbook_questions.jsonl"):
            refs = [candidate.ref for candidate in engine._index.search(question.text, 4)]
            texts = {ref.doc_id: engine.store.document(engine.fingerprint, ref.doc_id).text for ref in refs}
            context = "\n\n".join(texts[ref.doc_id][ref.char_start : ref.char_end].strip() for ref in refs)
            for template in ONE_MESSAGE.values():
                prompt = template.format(context=context, question=question.text)
                resolved = engine.resolver.prompt([{"role": "user", "content": prompt}])
                assert resolved.chunks == [ref.chunk_id for ref in refs]
                assert resolved.turns == [{"role": "user", "content": question.text}]
                assert resolved.unmatched_chars == 0


def run(name: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr(sys, "argv", [name, str(store)])
    runpy.run_path(str(EXAMPLES / name))
    return capsys.readouterr().out.splitlines()


def test_the_langchain_chain(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pasted, batch, exact, streamed = run("langchain_chain.py", store, monkeypatch, capsys)
    assert "'hit': 4, 'recomputed': 0, 'candidates': 4, 'recognised': 4, 'unmatched_chars': 0" in pasted
    assert batch.startswith("[")
    assert "products/" in exact
    assert "'cache_creation': 0" in streamed


def test_the_llama_index_query_engine(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pasted, synthesized, streamed = run("llamaindex_query_engine.py", store, monkeypatch, capsys)
    assert pasted.count(".") >= 4
    assert "'hit': 4, 'recomputed': 0" in synthesized
    assert "[" in streamed


def test_the_index_that_is_kept_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, more, with_notice, without, after = run(
        "langchain_index_and_update.py", tmp_path / "kb", monkeypatch, capsys
    )
    assert first == str({"num_added": 3, "num_updated": 0, "num_skipped": 0, "num_deleted": 0})
    assert again == str({"num_added": 0, "num_updated": 0, "num_skipped": 3, "num_deleted": 0})
    assert more == str({"num_added": 1, "num_updated": 0, "num_skipped": 3, "num_deleted": 0})
    assert without == str({"num_added": 0, "num_updated": 0, "num_skipped": 3, "num_deleted": 1})
    assert with_notice
    assert after
