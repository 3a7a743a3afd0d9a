"""The store as LangChain's document index and record manager, and the splitter that cuts as it does."""

from __future__ import annotations

import asyncio
import datetime
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.indexing import aindex, index
from langchain_pdllm import ChatPDLLM, PDLLMDocumentIndex, PDLLMRecordManager, PDLLMTextSplitter
from pdllm_store import LMDBStore

from pdllm_rag import InputDocument, RagEngine
from pdllm_rag.metadata import plain
from pdllm_rag.prefill import PrefillReport

NOTHING = {"num_added": 0, "num_updated": 0, "num_skipped": 0, "num_deleted": 0}


@pytest.fixture
def documents(tmp_path: Path, tiny_model_path: Path) -> PDLLMDocumentIndex:
    return PDLLMDocumentIndex(store=tmp_path / "kb", model=str(tiny_model_path))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[PrefillReport]:
    """What each prefill did, as it is done."""
    seen: list[PrefillReport] = []
    prefill = RagEngine.prefill

    def recording(self: RagEngine, *given: Any, **options: Any) -> PrefillReport:
        seen.append(prefill(self, *given, **options))
        return seen[-1]

    monkeypatch.setattr(RagEngine, "prefill", recording)
    return seen


def source(name: str, n: int, changed: dict[int, str] | None = None) -> list[Document]:
    """Pieces of one source, some with another text."""
    texts = {i: f"Line {i} of {name} says that the boat sails at {i} o'clock." for i in range(n)} | (changed or {})
    return [Document(page_content=text, metadata={"source": name}) for text in texts.values()]


def kept_in_step(documents: PDLLMDocumentIndex, docs: list[Document], **options: Any) -> dict[str, int]:
    """One run of LangChain's indexing; by default what a nightly job does."""
    given = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256", **options}
    result = index(docs, PDLLMRecordManager(documents, given["source_id_key"]), documents, **given)
    return {key: value for key, value in result.items() if value}


# -- indexing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleanup", ["incremental", "scoped_full", "full"])
def test_the_indexing_api_keeps_a_store_in_step(
    documents: PDLLMDocumentIndex, reports: list[PrefillReport], cleanup: str
) -> None:
    """Report 27: unchanged, changed, shortened, gone, back again; a source in several batches where LangChain can."""
    batch_size = 30 if cleanup == "incremental" else 10  # it deletes a source's documents that it has yet to see
    first, second = source("a.txt", 25), source("b.txt", 3)
    assert kept_in_step(documents, [*first, *second], cleanup=cleanup, batch_size=batch_size) == {"num_added": 28}
    reports.clear()
    assert kept_in_step(documents, [*first, *second], cleanup=cleanup, batch_size=batch_size) == {"num_skipped": 28}
    assert sum(report.chunks_computed for report in reports) == 0
    changed = source("a.txt", 25, {7: "Line 7 of a.txt says that the boat is sold."})
    result = kept_in_step(documents, [*changed, *second], cleanup=cleanup, batch_size=batch_size)
    assert result == {"num_added": 1, "num_deleted": 1, "num_skipped": 27}
    assert sum(report.chunks_computed for report in reports) == 1
    shorter = changed[:20]
    assert kept_in_step(documents, [*shorter, *second], cleanup=cleanup, batch_size=batch_size) == {
        "num_skipped": 23,
        "num_deleted": 5,
    }
    texts = {info.doc_id for info in documents.opened().documents()}
    assert len(texts) == 23
    assert not any(" at 7 o'clock" in doc.page_content for doc in documents.invoke("When is 7 o'clock?", k=20))
    if cleanup == "full":
        assert kept_in_step(documents, second, cleanup=cleanup) == {"num_skipped": 3, "num_deleted": 20}
    assert kept_in_step(documents, [*changed, *second], cleanup=cleanup, batch_size=batch_size)["num_skipped"] >= 3
    assert len(documents.opened().documents()) == 28


def test_indexing_is_asynchronous_too(documents: PDLLMDocumentIndex) -> None:
    docs = source("a.txt", 5)

    async def main() -> None:
        for expected in ({**NOTHING, "num_added": 5}, {**NOTHING, "num_skipped": 5}):
            manager = PDLLMRecordManager(documents, "source")
            await manager.acreate_schema()
            options: Any = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256"}
            assert await aindex(docs, manager, documents, **options) == expected

    asyncio.run(main())


def test_a_record_is_what_the_store_holds(documents: PDLLMDocumentIndex) -> None:
    """A document that somebody else deleted, or whose KV is gone, is indexed anew: the two cannot differ."""
    docs = source("a.txt", 4)
    kept_in_step(documents, docs)
    engine = documents.opened()
    first, second, *_ = [info.doc_id for info in engine.documents()]
    engine.delete(first)
    engine.store.discard([ref.chunk_id for ref in engine.store.document(engine.fingerprint, second).chunks])
    assert PDLLMRecordManager(documents).exists([first, second, "unknown"]) == [False, False, False]
    assert kept_in_step(documents, docs) == {"num_added": 2, "num_skipped": 2}
    assert PDLLMRecordManager(documents).exists([first, second]) == [True, True]


def test_documents_of_files_and_of_other_hands_are_left_alone(documents: PDLLMDocumentIndex, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("A note of a file.")
    documents.opened().prefill([tmp_path / "note.txt"])
    kept_in_step(documents, source("a.txt", 2), cleanup="full")
    manager = PDLLMRecordManager(documents, "source")
    started = manager.get_time()
    documents.upsert([Document(id="newcomer", page_content="Came while others indexed.", metadata={"source": "c"})])
    assert "newcomer" not in manager.list_keys(before=started)
    assert "newcomer" in manager.list_keys(after=started)
    assert kept_in_step(documents, source("a.txt", 2), cleanup="full") == {"num_skipped": 2, "num_deleted": 1}
    assert [info.doc_id for info in documents.opened().documents()][-1] == "note.txt"


def test_a_record_manager_of_another_source_key_is_refused(documents: PDLLMDocumentIndex) -> None:
    docs = [Document(page_content="Tea is at four o'clock.", metadata={"source": "a", "file": "b"})]
    for manager_key, index_key in (("file", "source"), (None, "source"), ("source", lambda doc: doc.page_content)):
        with pytest.raises(ValueError, match="same source_id_key"):
            index(
                docs,
                PDLLMRecordManager(documents, manager_key),
                documents,
                cleanup="incremental",
                source_id_key=index_key,
                key_encoder="sha256",
            )
    grouped: Any = lambda doc: doc.metadata["file"].upper()  # noqa: E731
    assert kept_in_step(documents, docs, source_id_key=grouped) == {"num_skipped": 1}


# -- documents -----------------------------------------------------------------------------------------------------


def test_metadata_comes_back_as_json_has_it(documents: PDLLMDocumentIndex, tmp_path: Path) -> None:
    """Report 18."""
    when = datetime.datetime(2026, 11, 30, 12, 0, tzinfo=datetime.timezone.utc)
    metadata = {
        "when": when,
        "day": when.date(),
        "n": np.int64(3),
        "x": np.float32(0.5),
        "p": Path("a/b"),
        "tags": {"y", "x"},
        "deep": {"k": [1, None, (2, True)]},
        "source": "mine",
    }
    expected = {
        "when": "2026-11-30T12:00:00+00:00",
        "day": "2026-11-30",
        "n": 3,
        "x": 0.5,
        "p": str(Path("a/b")),
        "tags": ["x", "y"],
        "deep": {"k": [1, None, [2, True]]},
        "source": "mine",
    }
    documents.upsert([Document(id="a", page_content="The beta boat sails at dawn.", metadata=metadata)])
    again = PDLLMDocumentIndex(store=tmp_path / "kb", model=documents.model)
    assert again.get(["a"]) == [Document(id="a", page_content="The beta boat sails at dawn.", metadata=expected)]
    (hit,) = again.invoke("When does the boat sail?")
    assert expected.items() <= hit.metadata.items()
    assert (hit.metadata["doc_id"], hit.id) == ("a", hit.metadata["chunk_id"])


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"deep": {"k": [object()]}}, r"metadata\['deep'\]\['k'\]\[0\] is of type object"),
        ({1: "a"}, "metadata has the key 1"),
        ({"b": b"raw"}, r"metadata\['b'\] is of type bytes"),
    ],
)
def test_metadata_that_no_store_takes_is_refused_by_its_key(metadata: dict[Any, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plain(metadata)


def test_what_does_not_go_in_is_named_and_leaves_the_others(
    documents: PDLLMDocumentIndex, caplog: pytest.LogCaptureFixture
) -> None:
    items = [
        Document(id="good", page_content="Tea is at four."),
        Document(id="blank", page_content=" \n "),
        Document(id="odd", page_content="Tea is at five.", metadata={"x": object()}),
    ]
    with caplog.at_level(logging.WARNING):
        assert documents.upsert(items) == {"succeeded": ["good"], "failed": ["odd", "blank"]}
    assert {record.getMessage().split(":")[0] for record in caplog.records} == {
        "document 'blank' was not stored",
        "document 'odd' was not stored",
    }
    assert [doc.id for doc in documents.get(["good", "blank", "odd"])] == ["good"]


def test_a_document_of_a_file_is_not_overwritten(documents: PDLLMDocumentIndex) -> None:
    documents.opened().prefill([InputDocument("a", "Of a file.", "/a/file")])
    assert documents.upsert([Document(id="a", page_content="Of a framework.")])["failed"] == ["a"]
    assert documents.get(["a"])[0].page_content == "Of a file."


def test_documents_without_id_are_known_again(documents: PDLLMDocumentIndex) -> None:
    docs = [Document(page_content="Tea is at four.", metadata={"a": {"x", "y"}}), Document(page_content="Tea is late.")]
    ids = documents.upsert(docs)["succeeded"]
    assert documents.upsert(docs)["succeeded"] == ids
    assert len(documents.opened().documents()) == 2


def test_many_documents_are_deleted_at_the_cost_of_one(documents: PDLLMDocumentIndex) -> None:
    ids = [f"d{i}" for i in range(6)]
    documents.upsert([Document(id=name, page_content=f"Text of {name}.") for name in ids])
    documents.invoke("text?")
    deleted = documents.delete([*ids[:5], "unknown", ids[0]])
    assert (deleted["succeeded"], deleted["num_deleted"]) == (ids[:5], 5)
    assert [doc.metadata["doc_id"] for doc in documents.invoke("text?", k=9)] == ["d5"]
    assert documents.opened().store.stats().chunks == 1


def test_the_store_is_made_and_shared_with_a_chat_model(documents: PDLLMDocumentIndex) -> None:
    documents.upsert([Document(id="a", page_content="The beta boat sails at dawn.")])
    chat = ChatPDLLM(store=documents.store, model=documents.model, max_tokens=8)
    assert chat.opened() is documents.opened()
    assert chat.invoke("When does it sail?").response_metadata["kv"]["hit"] == 1
    with pytest.raises(ValueError, match="unknown option 'namespace'"):
        documents.upsert([], namespace="x")


def test_upserting_and_asking_leave_the_loop_free(documents: PDLLMDocumentIndex, heartbeat: Any) -> None:
    documents.opened()
    docs = [Document(id=f"d{i}", page_content=f"Text {i}. " * 30) for i in range(8)]
    assert len(asyncio.run(heartbeat(documents.aupsert(docs)))["succeeded"]) == 8


# -- splitter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_len", [40, 160])
def test_the_splitter_cuts_as_the_store_does(tmp_path: Path, tiny_model_path: Path, chunk_len: int) -> None:
    text = "The alpha boat sails at dawn.\n\nIts captain likes tea. " * 9
    with RagEngine.open(tmp_path / "kb", str(tiny_model_path), chunk_len=chunk_len) as engine:
        engine.prefill([InputDocument("a", text, "a")])
        refs = engine.store.refs(engine.fingerprint)
    splitter = PDLLMTextSplitter(str(tiny_model_path), chunk_len=chunk_len)
    pieces = splitter.split_text(text)
    assert pieces == [text[ref.char_start : ref.char_end] for ref in refs]
    assert "".join(pieces) == text
    documents = splitter.split_documents([Document(page_content=text, metadata={"source": "a"})])
    assert [doc.page_content for doc in documents] == pieces
    assert [doc.metadata for doc in documents] == [{"source": "a", "start_index": ref.char_start} for ref in refs]
    assert splitter.transform_documents([Document(page_content=" ")]) == splitter.split_text("") == []


def test_a_splitters_default_is_what_a_store_is_made_with(tmp_path: Path) -> None:
    splitter = PDLLMTextSplitter()
    text = "Every employee gets 28 days of paid leave. " * 40
    assert len(splitter.split_text(text)) > 1
    with LMDBStore.open(tmp_path / "kb", kv_dtype="bfloat16") as store, RagEngine.open(store) as engine:
        document, _ = engine._prefiller.encode_text("a", text)
    assert splitter.split_text(text) == [text[ref.char_start : ref.char_end] for ref in document.chunks]
