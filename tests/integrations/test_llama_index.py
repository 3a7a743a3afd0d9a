"""The LlamaIndex components: they translate, call the engine and translate back."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any

import pytest
from langchain_pdllm import ChatPDLLM
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMRetriever, PDLLMSynthesizer
from pydantic import PrivateAttr

QUESTION = "When does the beta boat sail?"
USER = [ChatMessage(role="user", content=QUESTION)]


@pytest.fixture
def llm(place: dict[str, str]) -> PDLLM:
    return PDLLM(**place, k=2, max_tokens=8, steps=4)


@pytest.fixture
def retriever(place: dict[str, str]) -> PDLLMRetriever:
    return PDLLMRetriever(**place, similarity_top_k=3)


# -- LLM -----------------------------------------------------------------------------------------------------------


def test_complete_chat_and_their_streams_agree(llm: PDLLM) -> None:
    done = llm.complete(QUESTION)
    chat = llm.chat(USER)
    completion, chatting = list(llm.stream_complete(QUESTION)), list(llm.stream_chat(USER))
    assert done.text
    assert chat.message.role == MessageRole.ASSISTANT
    assert chat.message.content == completion[-1].text == chatting[-1].message.content == done.text
    assert "".join(part.delta or "" for part in completion) == done.text
    assert "".join(part.delta or "" for part in chatting) == done.text
    assert done.raw is not None
    for raw in (chat.raw, completion[-1].raw, chatting[-1].raw):
        assert raw["usage"] == done.raw["usage"]
        assert raw["citations"] == done.raw["citations"]
    assert done.raw["usage"]["cached_tokens"] > 0
    assert done.additional_kwargs == done.raw["usage"]


def test_the_async_methods_agree_and_leave_the_loop_free(llm: PDLLM, slow: dict[str, Any], heartbeat: Any) -> None:
    expected = llm.complete(QUESTION, **slow).text

    async def completed() -> str:
        return [part async for part in await llm.astream_complete(QUESTION, **slow)][-1].text

    async def chatted() -> str | None:
        return [part async for part in await llm.astream_chat(USER, **slow)][-1].message.content

    async def main() -> None:
        for work in (llm.acomplete(QUESTION, **slow), llm.achat(USER, **slow), completed(), chatted()):
            result = await heartbeat(work)
            text = getattr(result, "text", None) or getattr(getattr(result, "message", None), "content", result)
            assert text == expected

    asyncio.run(main())


def test_cancelling_stops_the_decoding(llm: PDLLM, slow: dict[str, Any], cancels: list[threading.Event]) -> None:
    async def main() -> None:
        task = asyncio.create_task(llm.achat(USER, **slow))
        while not cancels:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancels[0].is_set()

    asyncio.run(main())


def test_options_of_a_call_win_and_unknown_ones_are_refused(llm: PDLLM, place: dict[str, str]) -> None:
    raw = llm.complete(QUESTION, k=1).raw
    assert raw is not None
    assert raw["stats"]["chunks"]["hit"] == 1
    with pytest.raises(ValueError, match="PDLLM got unknown option 'top_k'"):
        llm.complete(QUESTION, top_k=1)
    with pytest.raises(ValueError, match="top_k"):
        PDLLM(**place, top_k=1)
    with pytest.raises(ValueError, match="k"):
        PDLLM(**place, k="3")


def test_callbacks_see_each_call(place: dict[str, str]) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = PDLLM(**place, max_tokens=4, steps=2, callback_manager=CallbackManager([debug]))
    llm.complete(QUESTION)
    llm.chat(USER)
    list(llm.stream_complete(QUESTION))
    list(llm.stream_chat(USER))
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 4


def test_the_metadata_is_the_models(llm: PDLLM, place: dict[str, str]) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (2048, 8)
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, False)
    assert metadata.model_name == place["model"]


def test_parts_that_are_no_text_are_refused_by_name(llm: PDLLM) -> None:
    with pytest.raises(ValueError, match="'image'"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="a"), ImageBlock(url="https://a.example/b.png")])])
    with pytest.raises(ValueError, match="'tool'"):
        llm.chat([ChatMessage(role="tool", content="x"), *USER])


def test_a_used_llm_copies_pickles_and_dumps_without_its_engine(llm: PDLLM, place: dict[str, str]) -> None:
    text = llm.complete(QUESTION).text
    for twin in (copy.copy(llm), copy.deepcopy(llm), pickle.loads(pickle.dumps(llm)), PDLLM.from_dict(llm.to_dict())):
        assert twin.complete(QUESTION).text == text
        assert twin.opened() is llm.opened() is ChatPDLLM(**place).opened()
    assert llm.to_dict()["store"] == place["store"]
    assert "RagEngine" not in repr(llm)


def test_a_subclass_may_add_fields_and_private_attributes(place: dict[str, str]) -> None:
    class Own(PDLLM):
        label: str = "x"
        _calls: int = PrivateAttr(default=0)

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self._calls = 5

    own = Own(**place, label="y", max_tokens=4)
    assert own.complete(QUESTION).text
    assert (own.label, own._calls) == ("y", 5)


# -- retriever -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (3, 3), (50, 10)])
def test_similarity_top_k_is_honoured(place: dict[str, str], k: int, expected: int) -> None:
    retriever = PDLLMRetriever(**place, similarity_top_k=k)
    nodes = retriever.retrieve(QUESTION)
    assert (retriever.similarity_top_k, len(nodes)) == (k, expected)
    assert asyncio.run(retriever.aretrieve(QUESTION)) == nodes


@pytest.mark.parametrize("k", [0, -1, "3"])
def test_a_bad_similarity_top_k_is_refused(place: dict[str, str], k: Any) -> None:
    with pytest.raises(ValueError, match="k"):
        PDLLMRetriever(**place, similarity_top_k=k)


def test_nodes_carry_chunk_ids_and_hide_their_metadata_from_models(retriever: PDLLMRetriever) -> None:
    for scored in retriever.retrieve(QUESTION):
        node = scored.node
        assert isinstance(node, TextNode)
        assert len(bytes.fromhex(node.node_id)) == 16
        assert node.ref_doc_id == node.metadata["doc_id"]
        assert node.start_char_idx == node.metadata["start_index"]
        assert scored.score == node.metadata["score"]
        assert node.get_content(metadata_mode=MetadataMode.LLM) == node.text
        assert node.get_content(metadata_mode=MetadataMode.EMBED) == node.text


# -- query engine --------------------------------------------------------------------------------------------------


def test_a_query_engine_keeps_its_source_nodes_and_reads_their_chunks(retriever: PDLLMRetriever, llm: PDLLM) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=PDLLMSynthesizer(llm))
    response = engine.query(QUESTION)
    nodes = retriever.retrieve(QUESTION)
    ids = [scored.node.node_id for scored in nodes]
    assert [scored.node.node_id for scored in response.source_nodes] == ids
    direct = llm.opened().answer(QUESTION, chunk_ids=ids, max_new_tokens=8, steps=4)
    assert str(response) == direct.text
    assert response.metadata is not None
    assert response.metadata[ids[0]] == nodes[0].node.metadata
    assert response.metadata["stats"]["chunks"]["hit"] == 3
    cited = {(c["doc_id"], c["ordinal"]) for c in response.metadata["citations"]}
    assert cited == {(s.node.metadata["doc_id"], s.node.metadata["ordinal"]) for s in nodes}
    assert str(asyncio.run(engine.aquery(QUESTION))) == direct.text


def test_an_asynchronous_query_leaves_the_loop_free(
    place: dict[str, str], retriever: PDLLMRetriever, slow: dict[str, Any], heartbeat: Any
) -> None:
    synthesizer = PDLLMSynthesizer(**place, **slow)
    engine = RetrieverQueryEngine(retriever, response_synthesizer=synthesizer)
    expected = str(engine.query(QUESTION))
    assert str(asyncio.run(heartbeat(engine.aquery(QUESTION)))) == expected


def test_without_nodes_the_documents_hold_no_answer(place: dict[str, str]) -> None:
    response = PDLLMSynthesizer(**place).synthesize(QUESTION, nodes=[])
    assert response.metadata is not None
    assert not response.metadata["stats"]["supported"]
    assert response.source_nodes == []


def test_plain_texts_are_read_without_being_stored(llm: PDLLM) -> None:
    synthesizer = PDLLMSynthesizer(llm)
    before = llm.opened().store.stats().documents
    text = synthesizer.get_response(QUESTION, ["The beta boat sails at noon."])
    assert text
    assert asyncio.run(synthesizer.aget_response(QUESTION, ["The beta boat sails at noon."])) == text
    assert llm.opened().store.stats().documents == before


def test_a_synthesizer_takes_an_llm_or_its_fields_but_not_both(place: dict[str, str], llm: PDLLM) -> None:
    with pytest.raises(ValueError, match="one or the other"):
        PDLLMSynthesizer(llm, **place)
