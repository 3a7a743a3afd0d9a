"""A citation of a PDF names the page that its quote stands on, and a chunk both pages that it stands on, everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome
from langchain_pdllm import ChatPDLLM, PDLLMRetriever, as_message
from llama_index.core.base.llms.types import ChatMessage, CitationBlock
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMQueryEngine, PDLLMSynthesizer
from llama_index.retrievers.pdllm import PDLLMRetriever as NodeRetriever
from llama_index.vector_stores.pdllm import PDLLMVectorStore
from pdllm_store import MemoryStore
from serving import served
from test_readers import pdf

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.cli import main
from pdllm_rag.metadata import pages_of

PAGES = ("Boats sail at dawn.", "", "Trains leave at night.")  # one chunk, whose best passage is on one of its pages
ASKED = {"boats sail dawn": 1, "trains leave night": 3}
OPTIONS = {"max_tokens": 1, "abstain": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> dict[str, str]:
    top = tmp_path_factory.mktemp("pages")
    (top / "times.pdf").write_bytes(pdf(*PAGES))
    found = {"store": str(top / "kb"), "model": str(tiny_model_path)}
    assert main(["prefill", str(top / "times.pdf"), *(f"--{name}={value}" for name, value in found.items())]) == 0
    return found


@pytest.fixture(scope="module")
def engine(place: dict[str, str]) -> Iterator[RagEngine]:
    with RagEngine.open(**place, create=False, options=AskOptions(max_new_tokens=1, abstain=False)) as opened:
        yield opened


@pytest.mark.parametrize(("question", "page"), ASKED.items())
def test_a_citation_names_the_page_of_its_quote(
    place: dict[str, str], engine: RagEngine, pdllm: Callable[..., Outcome], question: str, page: int
) -> None:
    (citation,) = engine.answer(question).citations
    assert (citation.quote, citation.page, citation.page_end) == (PAGES[page - 1], page, None)
    plain = citation.as_dict()
    assert "page_end" not in plain
    with served(engine) as site:
        assert site.ask(question).json()["citations"] == [plain]
    argv = ("ask", question, *(f"--{n}={v}" for n, v in place.items()), "--max-new-tokens", 1, "--no-abstain")
    assert f" 1  times.pdf  page {page}, chunk 0" in pdllm(*argv).out
    message = ChatPDLLM(**place, **OPTIONS).invoke(question)
    (block,) = message.content_blocks
    (annotation,) = block["annotations"]
    assert annotation["extras"]["page"] == page
    assert message.response_metadata["citations"] == [plain]
    blocks = PDLLM(**place, **OPTIONS).chat([ChatMessage(role="user", content=question)]).message.blocks
    (place_of,) = [one.additional_location_info for one in blocks if isinstance(one, CitationBlock)]
    assert place_of == {name: plain[name] for name in ("ordinal", "char_start", "char_end", "page")}


def test_a_chunk_across_pages_names_the_first_and_the_last(place: dict[str, str]) -> None:
    (document,) = PDLLMRetriever(**place).invoke("boats")
    (scored,) = NodeRetriever(**place).retrieve("boats")
    for metadata in (document.metadata, scored.node.metadata):
        assert (metadata["page"], metadata["page_end"]) == (1, 3)
        assert "page_ends" not in metadata


def test_a_quote_across_pages_names_both(tiny_model: LoadedModel) -> None:
    text = "Boats sail\nat dawn"
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64) as engine:
        engine.prefill([InputDocument("a", text, "a", pages=[(0, 10), (11, 18)])])
        answer = engine.answer("dawn", abstain=False, max_new_tokens=1)
    (citation,) = answer.citations
    assert (citation.quote, citation.page, citation.page_end) == (text, 1, 2)
    assert answer.as_dict()["citations"][0]["page_end"] == 2


def by_looking(pages: list[tuple[int, int]], start: int, text: str) -> tuple[int | None, int | None]:
    """The pages of the first and last sign, found by looking at each page."""
    signs = [start + i for i, sign in enumerate(text) if not sign.isspace()]
    first, last = ([n for n, (a, b) in enumerate(pages, 1) if a <= at < b][0] for at in (signs[0], signs[-1]))  # noqa: RUF015
    return first, None if first == last else last


def test_pages_are_those_of_the_first_and_the_last_sign() -> None:
    text, pages = "ab\n\nc\n\nde f", [(0, 2), (2, 2), (4, 5), (7, 11)]
    ends = [end for _, end in pages]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            if text[start:end].strip():
                assert pages_of(ends, start, text[start:end]) == by_looking(pages, start, text[start:end])
    assert pages_of([], 0, "ab") == (None, None)


def test_a_document_of_a_store_from_before_has_no_pages(tiny_model: LoadedModel) -> None:
    store = MemoryStore(kv_dtype="float32")
    with RagEngine.open(store, tiny_model, chunk_len=64) as engine:
        given: dict[str, Any] = {"pages": [(0, 19)]}
        engine.prefill([InputDocument("a", PAGES[0], "a", **given)])
        document = store.document(engine.fingerprint, "a")
        store.add_document(engine.fingerprint, document.__class__(**{**document.__dict__, "metadata": {}}))
        assert engine.answer("boats", abstain=False, max_new_tokens=1).citations[0].page is None
        report = engine.prefill([InputDocument("a", PAGES[0], "a", **given)])
        assert (report.updated, report.chunks_computed) == (1, 0)
        assert engine.answer("boats", abstain=False, max_new_tokens=1).citations[0].page == 1


def test_a_single_chunk_has_no_score_anywhere(
    place: dict[str, str], engine: RagEngine, pdllm: Callable[..., Outcome]
) -> None:
    """Nothing is scored where there is nothing to choose: None, null and "not scored", never 0."""
    question = "boats sail dawn"
    argv = ("ask", question, *(f"--{n}={v}" for n, v in place.items()), "--max-new-tokens", 1, "--no-abstain")
    assert "chunk 0, not scored" in pdllm(*argv).out
    assert '"score": null' in pdllm(*argv, "--json").out
    with served(engine) as site:
        assert site.ask(question).json()["citations"][0]["score"] is None
    (document,) = PDLLMRetriever(**place).invoke(question)
    assert document.metadata["score"] is None
    message = ChatPDLLM(**place, **OPTIONS).invoke([as_message([document], question)])
    assert message.response_metadata["citations"][0]["score"] is None
    (scored,) = NodeRetriever(**place).retrieve(question)
    response = PDLLMSynthesizer(**place, **OPTIONS).synthesize(question, [scored])
    assert (scored.score, response.source_nodes[0].score) == (None, None)
    assert PDLLMQueryEngine(**place, **OPTIONS).query(question).source_nodes[0].score is None
    found = PDLLMVectorStore(**place).query(VectorStoreQuery(query_str=question, similarity_top_k=2))
    assert (len(found.nodes or ()), found.similarities) == (1, None)
