"""LlamaIndex query engines: pasted and explicit context, every response mode, streams, citations, one call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ImageBlock,
    TextBlock,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMQueryEngine, PDLLMRetriever, PDLLMSynthesizer
from pydantic import BaseModel, PrivateAttr

from pdllm_rag.errors import GenerationCancelled, UnmatchedContextError

QUESTION = "When does the beta boat sail?"
FOREIGN = "The zeta boat sails at noon from pier nine. Its captain likes rum."
OPTIONS = {"max_tokens": 8, "steps": 4}
MODES = [mode for mode in ResponseMode if mode not in (ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY)]
UNREAD = (ResponseMode.GENERATION,)  # it asks the model without the nodes


@pytest.fixture
def llm(place: dict[str, str]) -> PDLLM:
    return PDLLM(**place, k=2, **OPTIONS)


@pytest.fixture
def retriever(place: dict[str, str]) -> PDLLMRetriever:
    return PDLLMRetriever(**place, similarity_top_k=3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """`kv` of every answer of an LLM, as it is given."""
    seen: list[dict[str, int]] = []
    from llama_index.llms.pdllm import base

    raw = base.raw

    def recording(*given: Any) -> dict[str, Any]:
        data = raw(*given)
        seen.append(data["kv"])
        return data

    monkeypatch.setattr(base, "raw", recording)
    return seen


def ids(nodes: list[NodeWithScore]) -> list[str]:
    return [scored.node.node_id for scored in nodes]


# -- context in prompts --------------------------------------------------------------------------------------------


def test_an_ordinary_query_engine_reads_its_chunks_from_the_store(
    llm: PDLLM, retriever: PDLLMRetriever, asked: list[dict[str, int]]
) -> None:
    response = RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
    (kv,) = asked
    assert (kv["hit"], kv["recomputed"], kv["recognised"], kv["unmatched_chars"]) == (3, 0, 3, 0)
    nodes = retriever.retrieve(QUESTION)
    assert ids(response.source_nodes) == ids(nodes)
    assert str(response) == llm.opened().answer(QUESTION, chunk_ids=ids(nodes), max_new_tokens=8, steps=4).text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_response_mode_reads_from_the_store_and_keeps_its_source_nodes(
    llm: PDLLM, retriever: PDLLMRetriever, asked: list[dict[str, int]], mode: ResponseMode, streaming: bool
) -> None:
    if streaming and "accumulate" in mode:
        pytest.skip("LlamaIndex does not stream it")
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, streaming=streaming)
    response = engine.query(QUESTION)
    text = str(response)
    assert text
    assert ids(response.source_nodes) == ids(retriever.retrieve(QUESTION))
    if mode not in UNREAD:
        read = sum(kv["hit"] for kv in asked)
        assert read == sum(kv["recognised"] for kv in asked)
        assert (read, {kv["recomputed"] for kv in asked}) == (3, {0})
    if not streaming:
        assert str(asyncio.run(engine.aquery(QUESTION))) == text


@pytest.mark.parametrize("mode", [ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY])
def test_response_modes_without_a_model_keep_their_source_nodes(
    llm: PDLLM,
    retriever: PDLLMRetriever,
    asked: list[dict[str, int]],
    mode: ResponseMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)  # they ask for LlamaIndex's default one, and then do not use it
    response = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode).query(QUESTION)
    assert len(response.source_nodes) == 3
    assert asked == []


def test_context_that_is_in_no_chunk_is_answered_and_reported(llm: PDLLM) -> None:
    prompt = f"Context information is below.\n-----\n{FOREIGN}\n-----\nQuery: When does the zeta boat sail?\nAnswer: "
    done = llm.complete(prompt)
    assert done.raw is not None
    assert (done.raw["kv"]["unmatched_chars"], done.raw["kv"]["hit"]) == (len(FOREIGN), 0)
    assert done.text == llm.complete("When does the zeta boat sail?", context=FOREIGN).text
    with pytest.raises(UnmatchedContextError):
        llm.complete(prompt, on_unmatched="error")


# -- explicit context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.SIMPLE_SUMMARIZE])
def test_an_empty_context_is_not_looked_for(llm: PDLLM, asked: list[dict[str, int]], mode: ResponseMode) -> None:
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
    text = str(synthesizer.get_response(QUESTION, [""]))
    assert text == llm.complete(QUESTION, retrieve=False).text == llm.complete(QUESTION, chunks=[]).text
    assert all((kv["hit"], kv["recomputed"], kv["candidates"]) == (0, 0, 0) for kv in asked)
    assert llm.complete(QUESTION).raw["kv"]["hit"] > 0  # type: ignore[index]


def test_nodes_handed_over_are_answered_as_by_the_engine(place: dict[str, str], llm: PDLLM) -> None:
    """Retrieval within the engine's own window, handed over with its scores, is the engine's own answer."""
    engine = llm.opened()
    direct = engine.answer(QUESTION, k=3, max_new_tokens=8, steps=4)
    retriever = PDLLMRetriever(**place, similarity_top_k=3, score_window=engine.model.spec.family.score_window)
    response = RetrieverQueryEngine(retriever, response_synthesizer=PDLLMSynthesizer(llm)).query(QUESTION)
    assert str(response) == direct.text
    assert response.metadata is not None
    assert response.metadata["citations"] == direct.as_dict()["citations"]
    assert response.metadata["kv"]["hit"] == direct.stats.chunks.hit == len(response.source_nodes)
    nodes = retriever.retrieve(QUESTION)
    assert llm.complete(QUESTION, chunks=nodes).text == direct.text
    assert llm.complete(QUESTION, chunks=[scored.node for scored in nodes]).text == direct.text
    assert llm.complete(QUESTION, chunks=ids(nodes)).text == direct.text


def test_one_call_is_the_engines_own_answer(place: dict[str, str], llm: PDLLM) -> None:
    direct = llm.opened().answer(QUESTION, k=2, max_new_tokens=8, steps=4)
    engine = PDLLMQueryEngine(llm)
    response = engine.query(QUESTION)
    assert str(response) == str(asyncio.run(engine.aquery(QUESTION))) == direct.text
    assert response.metadata is not None
    assert response.metadata["citations"] == direct.as_dict()["citations"]
    expected = [(citation.doc_id, citation.ordinal, citation.score) for citation in direct.citations]
    cited = [(n.node.metadata["doc_id"], n.node.metadata["ordinal"], n.score) for n in response.source_nodes]
    assert cited == expected
    assert str(PDLLMQueryEngine(**place, k=2, **OPTIONS).query(QUESTION)) == direct.text


def test_nodes_of_another_retriever_are_known_by_their_text(llm: PDLLM, retriever: PDLLMRetriever) -> None:
    stored = [scored.node.get_content() for scored in retriever.retrieve(QUESTION)][:2]
    nodes = [NodeWithScore(node=TextNode(text=text.strip(), metadata={"file": "a"})) for text in (*stored, FOREIGN)]
    response = PDLLMSynthesizer(llm).synthesize(QUESTION, nodes)
    assert response.metadata is not None
    kv = response.metadata["kv"]
    assert (kv["hit"], kv["recognised"], kv["unmatched_chars"]) == (2, 2, len(FOREIGN))
    assert ids(response.source_nodes) == ids(nodes)


def test_citable_blocks_are_context_and_citations_come_back_as_blocks(llm: PDLLM, retriever: PDLLMRetriever) -> None:
    nodes = retriever.retrieve(QUESTION)
    blocks = [
        CitableBlock(title=n.node.metadata["doc_id"], source=n.node.metadata["source"], content=n.node.get_content())  # type: ignore[arg-type]
        for n in nodes
    ]
    cache = CachePoint(cache_control={"type": "ephemeral", "ttl": "5m"})  # type: ignore[arg-type]
    message = ChatMessage(role="user", blocks=[*blocks, cache, TextBlock(text=QUESTION)])
    answered = llm.chat([message])
    assert answered.raw["kv"]["recognised"] == answered.raw["kv"]["hit"] == 3
    citations = [block for block in answered.message.blocks if isinstance(block, CitationBlock)]
    assert [block.source for block in citations] == [citation["doc_id"] for citation in answered.raw["citations"]]
    for block, plain in zip(citations, answered.raw["citations"], strict=True):
        assert block.cited_content.text == plain["quote"]  # type: ignore[union-attr]
        assert block.additional_location_info["char_start"] == plain["char_start"]
    assert answered.message.content == answered.raw["answer"]
    *_, last = llm.stream_chat([message])
    assert last.message.blocks == answered.message.blocks
    again = llm.chat([ChatMessage(role="user", content="Hello."), answered.message, message])
    assert again.message.content
    picture = CitableBlock(title="a", source="a", content=[ImageBlock(url="https://a.example/b.png")])
    with pytest.raises(ValueError, match="'citable'"):
        llm.chat([ChatMessage(role="user", blocks=[picture, TextBlock(text=QUESTION)])])


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["synthesizer", "query engine"])
def test_a_streamed_response_has_text_source_nodes_and_citations(
    llm: PDLLM, retriever: PDLLMRetriever, kind: str
) -> None:
    def made(streaming: bool) -> Any:
        if kind == "query engine":
            return PDLLMQueryEngine(llm, streaming=streaming)
        return RetrieverQueryEngine(retriever, response_synthesizer=PDLLMSynthesizer(llm, streaming=streaming))

    def stable(response: Any) -> tuple[Any, ...]:
        metadata = {key: value for key, value in response.metadata.items() if key != "stats"}
        return str(response), ids(response.source_nodes), metadata

    whole = made(False).query(QUESTION)
    streamed = made(True).query(QUESTION)
    assert isinstance(streamed, StreamingResponse)
    assert str(streamed) == str(whole)
    assert stable(streamed) == stable(whole)

    async def main() -> Any:
        response = await made(True).aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse)
        return await response.get_response()

    assert stable(asyncio.run(main())) == stable(whole)


def test_leaving_a_streamed_response_stops_the_decoding(
    llm: PDLLM, slow: dict[str, Any], cancels: list[threading.Event]
) -> None:
    async def main() -> None:
        engine = PDLLMQueryEngine(llm.model_copy(update=slow), streaming=True)
        response = await engine.aquery(QUESTION)
        texts = response.response_gen
        await anext(texts)
        assert not cancels[0].is_set()
        await texts.aclose()
        assert cancels[0].is_set()

    asyncio.run(main())


def test_the_one_call_engine_leaves_the_loop_free(llm: PDLLM, slow: dict[str, Any], heartbeat: Any) -> None:
    engine = PDLLMQueryEngine(llm.model_copy(update=slow))
    assert str(asyncio.run(heartbeat(engine.aquery(QUESTION)))) == str(engine.query(QUESTION))


# -- all the ways to call ------------------------------------------------------------------------------------------


def test_stop_strings_end_the_answer_in_every_form(llm: PDLLM) -> None:
    user = [ChatMessage(role="user", content=QUESTION)]
    full = llm.complete(QUESTION).text
    stop = full[2:4]
    expected = full[: full.index(stop)].rstrip()
    assert expected

    async def streams() -> list[str | None]:
        completion = [part async for part in await llm.astream_complete(QUESTION, stop=[stop])]
        chat = [part async for part in await llm.astream_chat(user, stop=[stop])]
        assert "".join(part.delta or "" for part in completion) == completion[-1].text
        return [completion[-1].text, chat[-1].message.content]

    said = [
        llm.complete(QUESTION, stop=[stop]).text,
        llm.chat(user, stop=[stop]).message.content,
        [*llm.stream_complete(QUESTION, stop=[stop])][-1].text,
        [*llm.stream_chat(user, stop=[stop])][-1].message.content,
        asyncio.run(llm.acomplete(QUESTION, stop=[stop])).text,
        asyncio.run(llm.achat(user, stop=[stop])).message.content,
        *asyncio.run(streams()),
        llm.model_copy(update={"stop": [stop]}).complete(QUESTION).text,
        str(PDLLMQueryEngine(llm.model_copy(update={"stop": [stop]})).query(QUESTION)),
    ]
    assert said == [expected] * 10


def test_a_timeout_ends_an_answer(llm: PDLLM, slow: dict[str, Any]) -> None:
    with pytest.raises(GenerationCancelled):
        llm.complete(QUESTION, timeout=0.01, **slow)


def test_callbacks_and_events_see_a_query(place: dict[str, str], retriever: PDLLMRetriever) -> None:
    class Listener(BaseEventHandler):
        _seen: list[str] = PrivateAttr(default_factory=list)

        def handle(self, event: Any, **_: Any) -> None:
            self._seen.append(event.class_name())

    listener = Listener()
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(listener)
    try:
        llm = PDLLM(**place, k=2, **OPTIONS, callback_manager=manager)
        PDLLMQueryEngine(llm).query(QUESTION)
        RetrieverQueryEngine(
            retriever, response_synthesizer=PDLLMSynthesizer(llm, callback_manager=manager), callback_manager=manager
        ).query(QUESTION)
    finally:
        dispatcher.event_handlers.remove(listener)
    assert len(debug.get_event_pairs(CBEventType.QUERY)) == 2
    assert len(debug.get_event_pairs(CBEventType.SYNTHESIZE)) == 1
    for name in ("QueryStartEvent", "QueryEndEvent", "RetrievalEndEvent", "SynthesizeStartEvent", "SynthesizeEndEvent"):
        assert name in listener._seen


def test_structured_output_and_functions_say_that_they_are_not_there(llm: PDLLM) -> None:
    class Boat(BaseModel):
        name: str

    assert not llm.metadata.is_function_calling_model
    sentence = "PDLLM supports neither function calling nor structured output"
    prompt = PromptTemplate("Which boat?")
    for refused in (
        lambda: llm.as_structured_llm(Boat),
        lambda: llm.structured_predict(Boat, prompt),
        lambda: llm.stream_structured_predict(Boat, prompt),
        lambda: asyncio.run(llm.astructured_predict(Boat, prompt)),
        lambda: asyncio.run(llm.astream_structured_predict(Boat, prompt)),  # type: ignore[arg-type]
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            refused()
