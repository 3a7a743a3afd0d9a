"""The LangChain components: they translate, call the engine and translate back."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_pdllm import PDLLM, ChatPDLLM, PDLLMRetriever, as_message
from llama_index.llms.pdllm import PDLLM as LlamaIndexLLM
from llama_index.retrievers.pdllm import PDLLMRetriever as Nodes
from pdllm_store import LMDBStore, MemoryStore, StoreNotFoundError
from pydantic import PrivateAttr

from pdllm_rag import AskOptions, InputDocument, RagEngine
from pdllm_rag.components.fields import ENGINE_NAMES, ask_options

QUESTION = "When does the beta boat sail?"


@pytest.fixture
def chat(place: dict[str, str]) -> ChatPDLLM:
    return ChatPDLLM(**place, k=2, max_tokens=8, steps=4)


@pytest.fixture
def retriever(place: dict[str, str]) -> PDLLMRetriever:
    return PDLLMRetriever(**place, k=2)


def whole(chunks: Iterable[Any]) -> AIMessageChunk:
    return reduce(add, chunks)


def stable(message: AIMessage) -> dict[str, Any]:
    """What two answers to one question must share."""
    metadata = {key: value for key, value in message.response_metadata.items() if key != "timings"}
    return {
        "text": message.text,
        "usage": message.usage_metadata,
        "metadata": metadata,
        "blocks": [{**block, "index": None} for block in message.content_blocks],
    }


# -- answers -------------------------------------------------------------------------------------------------------


def test_invoke_answers_with_usage_citations_and_circumstances(chat: ChatPDLLM) -> None:
    message = chat.invoke(QUESTION)
    metadata = message.response_metadata
    assert message.text
    assert metadata["model_name"] == chat.model
    expected = {"hit": 2, "recomputed": 0, "candidates": 8, "recognised": 0, "unmatched_chars": 0}
    assert metadata["kv"] == expected
    stats = chat.opened().answer(QUESTION, k=2, max_new_tokens=8, steps=4).stats
    assert (metadata["supported"], metadata["support"]) == (stats.supported, stats.support)
    assert 0 < metadata["support"] < 1
    assert metadata["nfe"] >= 1
    assert metadata["finish_reason"] in ("stop", "length")
    assert metadata["timings"]["total"] > 0
    assert len(metadata["citations"]) == 2
    usage = message.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    details = usage["input_token_details"]
    assert details["cache_creation"] == 0
    assert 0 < details["cache_read"] < usage["input_tokens"]


def test_citations_are_standard_annotations_that_quote_the_document(chat: ChatPDLLM) -> None:
    message = chat.invoke(QUESTION)
    (block,) = message.content_blocks
    assert block["type"] == "text"
    for annotation, plain in zip(block["annotations"], message.response_metadata["citations"], strict=True):
        assert annotation["type"] == "citation"
        assert (annotation["title"], annotation["cited_text"]) == (plain["doc_id"], plain["quote"])
        text = chat.opened().store.document(chat.opened().fingerprint, plain["doc_id"]).text
        assert text[annotation["extras"]["char_start"] : annotation["extras"]["char_end"]] == plain["quote"]


def test_a_joined_stream_is_the_invoked_answer_with_its_usage(chat: ChatPDLLM) -> None:
    chunks = list(chat.stream(QUESTION))
    joined, invoked = whole(chunks), chat.invoke(QUESTION)
    assert chunks[-1].chunk_position == "last"
    assert stable(joined) == stable(invoked)


def test_every_streamed_text_reaches_the_callbacks(chat: ChatPDLLM) -> None:
    tokens: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:  # noqa: ARG002
            tokens.append(chunk.text)

    text = "".join(chunk.text for chunk in chat.stream(QUESTION, config={"callbacks": [Listener()]}))
    assert "".join(tokens) == text == chat.invoke(QUESTION).text


def test_a_chain_parses_the_answer_to_text(chat: ChatPDLLM) -> None:
    assert (chat | StrOutputParser()).invoke(QUESTION) == chat.invoke(QUESTION).text


def test_batch_keeps_the_order(chat: ChatPDLLM) -> None:
    questions = [f"When does the {name} boat sail?" for name in ("alpha", "beta", "gamma")]
    texts = [message.text for message in chat.batch(questions, config={"max_concurrency": 2})]
    assert texts == [chat.invoke(question).text for question in questions]


def test_one_failure_in_a_batch_leaves_the_others(chat: ChatPDLLM) -> None:
    good, bad = chat.batch([QUESTION, "boat " * 2000], return_exceptions=True)
    assert isinstance(good, AIMessage)
    assert isinstance(bad, Exception)


def test_a_conversation_with_a_system_message_is_answered(chat: ChatPDLLM) -> None:
    turns = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hello."), HumanMessage(QUESTION)]
    message = chat.invoke(turns)
    assert message.usage_metadata is not None
    alone = chat.invoke(QUESTION).usage_metadata
    assert alone is not None
    assert message.usage_metadata["input_tokens"] > alone["input_tokens"]


def test_an_answer_can_be_part_of_the_next_conversation(chat: ChatPDLLM) -> None:
    first = chat.invoke(QUESTION)
    assert chat.invoke([HumanMessage(QUESTION), first, HumanMessage("And who likes tea?")]).text


def test_tokens_are_counted_by_the_models_own_tokenizer(chat: ChatPDLLM) -> None:
    assert chat.get_num_tokens("tea") == 3  # the tiny model reads bytes


def test_context_tokens_are_counted_as_stored_or_computed(chat: ChatPDLLM) -> None:
    for changes, is_stored in (({}, True), ({"policy": "joint"}, False), ({"decoder": "vanilla"}, False)):
        details = chat.invoke(QUESTION, **changes).usage_metadata["input_token_details"]
        assert (details["cache_read"] > 0) == is_stored
        assert (details["cache_creation"] > 0) == (not is_stored)


# -- async ---------------------------------------------------------------------------------------------------------


def test_ainvoke_and_astream_give_the_same_answer_and_leave_the_loop_free(
    chat: ChatPDLLM, slow: dict[str, Any], heartbeat: Any
) -> None:
    expected = chat.invoke(QUESTION, **slow)

    async def streamed() -> AIMessageChunk:
        return whole([chunk async for chunk in chat.astream(QUESTION, **slow)])

    async def main() -> None:
        for work in (chat.ainvoke(QUESTION, **slow), streamed()):
            message = await heartbeat(work)
            assert message.text == expected.text
            assert message.usage_metadata == expected.usage_metadata

    asyncio.run(main())


def test_cancelling_or_leaving_stops_the_decoding(
    chat: ChatPDLLM, slow: dict[str, Any], cancels: list[threading.Event]
) -> None:
    async def main() -> None:
        task = asyncio.create_task(chat.ainvoke(QUESTION, **slow))
        while not cancels:
            await asyncio.sleep(0.005)
        assert not cancels[0].is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancels[0].is_set()
        stream = chat.astream(QUESTION, **slow)
        await anext(stream)
        assert not cancels[1].is_set()
        await stream.aclose()  # type: ignore[attr-defined]
        assert cancels[1].is_set()

    asyncio.run(main())


# -- options -------------------------------------------------------------------------------------------------------


def test_every_option_of_the_engine_has_a_field() -> None:
    names = {ENGINE_NAMES.get(name, name) for name in ask_options()}
    assert names == {field.name for field in fields(AskOptions)} - {"cancel"}
    assert ask_options() <= set(ChatPDLLM.model_fields)


def test_options_of_a_call_win_by_keyword_and_by_bind(chat: ChatPDLLM) -> None:
    assert chat.invoke(QUESTION, k=1).response_metadata["kv"]["hit"] == 1
    assert chat.bind(k=3).invoke(QUESTION).response_metadata["kv"]["hit"] == 3
    assert chat.invoke(QUESTION, decoder="vanilla").response_metadata["decoder"] == "vanilla"
    assert chat.invoke(QUESTION).response_metadata["kv"]["hit"] == 2
    assert chat.invoke(QUESTION).response_metadata["nfe"] <= 4
    assert chat.invoke(QUESTION, steps=12, threshold=1.0).response_metadata["nfe"] > 4


def test_stop_strings_end_the_answer(chat: ChatPDLLM) -> None:
    full = chat.invoke(QUESTION).text
    stop = full[1:3]
    assert chat.invoke(QUESTION, stop=[stop]).text == full[: full.index(stop)].rstrip()
    assert "".join(chunk.text for chunk in chat.stream(QUESTION, stop=[stop])) == full[: full.index(stop)].rstrip()


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever])
@pytest.mark.parametrize("k", [0, -1, "3", 2.5, True])
def test_a_k_that_is_no_positive_whole_number_is_refused(cls: Any, place: dict[str, str], k: object) -> None:
    with pytest.raises(ValueError, match="k"):
        cls(**place, k=k)
    with pytest.raises(ValueError, match="k is"):
        cls(**place).invoke(QUESTION, k=k)


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever])
def test_unknown_options_are_refused(cls: Any, place: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="top_k"):
        cls(**place, top_k=3)
    with pytest.raises(ValueError, match=f"{cls.__name__} got unknown option 'top_k'"):
        cls(**place).invoke(QUESTION, top_k=3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", "a"),
        ("temperature", True),
        ("seed", "x"),
        ("threshold", "0.5"),
        ("timeout", "1"),
        ("timeout", -1),
        ("max_history_tokens", -3),
        ("recognise", "no"),
        ("retrieve", 0),
        ("on_unmatched", "drop"),
        ("cancel", True),
        ("chunks", "abc"),
        ("chunks", 3),
        ("context", 3),
        ("stop", 3),
    ],
)
def test_an_option_of_a_call_is_checked_as_that_of_a_component(
    chat: ChatPDLLM, place: dict[str, str], option: str, value: object
) -> None:
    if option in ChatPDLLM.model_fields:
        with pytest.raises(ValueError, match=option):
            ChatPDLLM(**place, **{option: value})  # type: ignore[arg-type]
    expected = f"^{option} is {value!r}; .*(expected|greater than)"
    with pytest.raises(ValueError, match=expected):
        chat.invoke(QUESTION, **{option: value})
    llm = LlamaIndexLLM(**place)
    if option != "stop":
        with pytest.raises(ValueError, match=expected):
            llm.complete(QUESTION, **{option: value})
    if option in PDLLMRetriever.model_fields:
        with pytest.raises(ValueError, match=expected):
            PDLLMRetriever(**place).invoke(QUESTION, **{option: value})


def test_an_unknown_option_is_answered_with_what_a_call_may_give(chat: ChatPDLLM) -> None:
    with pytest.raises(ValueError, match="got unknown option 'top_k'") as caught:
        chat.invoke(QUESTION, top_k=3)
    named = str(caught.value).partition("expected one of ")[2].split(", ")
    assert {"chunks", "context", "recognise", "on_unmatched", "retrieve", "timeout", "max_history_tokens"} <= {*named}
    assert not {"chunk_ids", "max_new_tokens"} & {*named}


def test_a_used_model_equals_an_unused_one(chat: ChatPDLLM, retriever: PDLLMRetriever, place: dict[str, str]) -> None:
    chat.invoke(QUESTION)
    assert chat == ChatPDLLM(**place, k=2, max_tokens=8, steps=4) != ChatPDLLM(**place, k=3, max_tokens=8, steps=4)
    retriever.invoke(QUESTION)
    assert retriever == PDLLMRetriever(**place, k=2)


def test_a_bad_decoder_or_store_is_refused_when_the_component_is_made(place: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="decoder is 'greedy'"):
        ChatPDLLM(**place, decoder="greedy")
    with pytest.raises(ValueError, match="store is 3"):
        ChatPDLLM(store=3)


def test_a_missing_store_is_an_error_and_is_not_made(tmp_path: Path, place: dict[str, str]) -> None:
    chat = ChatPDLLM(store=tmp_path / "kb", model=place["model"])
    assert chat.asdict()["generation"] is None
    with pytest.raises(StoreNotFoundError):
        chat.invoke(QUESTION)
    assert not (tmp_path / "kb").exists()


# -- what it does not take -----------------------------------------------------------------------------------------


def test_tools_and_structured_output_are_refused_by_name(chat: ChatPDLLM) -> None:
    with pytest.raises(NotImplementedError, match="ChatPDLLM supports neither tool calling nor structured output"):
        chat.bind_tools([])
    with pytest.raises(NotImplementedError, match="ChatPDLLM"):
        chat.with_structured_output({"title": "Answer", "type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]), "image_url"),
        (HumanMessage([{"type": "text", "text": "a"}, {"type": "file", "file_id": "f"}]), "file"),
        (ToolMessage("x", tool_call_id="1"), "'tool' message"),
        (AIMessage("", tool_calls=[{"name": "t", "args": {}, "id": "1"}]), "tool calls"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(chat: ChatPDLLM, message: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        chat.invoke([message, HumanMessage(QUESTION)])


# -- objects -------------------------------------------------------------------------------------------------------


def used(cls: Any, place: dict[str, str]) -> Any:
    component = cls(**place, k=2)
    component.invoke(QUESTION)
    return component


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever])
def test_a_used_component_copies_and_pickles_and_shares_its_engine(cls: Any, place: dict[str, str]) -> None:
    component = used(cls, place)
    for twin in (copy.copy(component), copy.deepcopy(component), component.model_copy(deep=True)):
        assert twin.opened() is component.opened()
    data = pickle.dumps(component)
    assert len(data) < 10_000
    again = pickle.loads(data)
    assert again.invoke(QUESTION)
    assert again.opened() is component.opened()


def test_components_of_one_store_and_model_share_an_engine(place: dict[str, str]) -> None:
    chat, retriever = ChatPDLLM(**place), PDLLMRetriever(store=Path(place["store"]) / ".", model=place["model"])
    assert chat.opened() is retriever.opened()


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever, Nodes])
def test_components_of_other_adapters_share_no_engine_and_keep_theirs_in_copies(
    cls: Any, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        def __init__(self, **adapters: str | None) -> None:
            self.adapters, self.store = adapters, MemoryStore()

    def opening(*_: Any, adapter: str | None, canvas_adapter: str | None, **__: Any) -> Opened:
        return Opened(adapter=adapter, canvas_adapter=canvas_adapter)

    monkeypatch.setattr(RagEngine, "open", opening)
    monkeypatch.chdir(tmp_path)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    given = [{}, {"adapter": one}, {"canvas_adapter": one}, {"adapter": two}, {"adapter": one, "canvas_adapter": two}]
    place = {**place, "store": str(tmp_path / "kb")}  # that nobody else has opened
    components = [cls(**place, **adapters) for adapters in given]
    components = [getattr(component, "_search", component) for component in components]
    assert len({id(component.opened()) for component in components}) == len(given)
    for adapters, component in zip(given, components, strict=True):
        expected = {"adapter": None, "canvas_adapter": None, **adapters}
        assert component.opened().adapters == expected
        for twin in (copy.copy(component), copy.deepcopy(component), pickle.loads(pickle.dumps(component))):
            assert twin.opened() is component.opened()
            assert {**twin.model_dump(), **expected} == twin.model_dump() == component.model_dump()
        assert {**component.identity(), **expected} == component.identity()
    relative = cls(**place, adapter="./one")
    assert getattr(relative, "_search", relative).opened() is components[1].opened()


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever])
def test_a_dump_and_a_repr_hold_no_tensor(cls: Any, place: dict[str, str]) -> None:
    component = used(cls, place)
    dump = component.model_dump()
    assert (dump["store"], dump["k"]) == (place["store"], 2)
    assert not any(isinstance(value, (torch.Tensor, RagEngine)) for value in dump.values())
    assert "tensor" not in repr(component)
    assert "RagEngine" not in repr(component) + str(component.__dict__)


def test_a_store_object_is_read_copied_with_the_component_and_dumped_as_its_path(place: dict[str, str]) -> None:
    store = MemoryStore(kv_dtype="float32")
    with RagEngine.open(store, place["model"], chunk_len=40) as engine:
        engine.prefill([InputDocument("a", "The beta boat sails at dawn.", "a")])
    retriever = PDLLMRetriever(store=store, model=place["model"])
    (document,) = copy.deepcopy(retriever).invoke(QUESTION)
    assert document.page_content == "The beta boat sails at dawn."
    assert retriever.model_dump()["store"] == store.path


def test_a_store_is_closed_when_its_last_component_is_gone(tmp_path: Path, place: dict[str, str]) -> None:
    with RagEngine.open(tmp_path / "kb", place["model"]) as engine:
        engine.prefill([InputDocument("a", "The beta boat sails at dawn.", "a")])
    retriever = PDLLMRetriever(store=tmp_path / "kb", model=place["model"])
    retriever.invoke(QUESTION)
    opened = weakref.ref(retriever.opened())
    del retriever
    gc.collect()
    assert opened() is None
    with closing(LMDBStore.open(tmp_path / "kb", create=False)) as store:
        store.compact()  # refused while anybody else has it open


def test_a_response_cache_forgets_answers_when_the_store_changes(tmp_path: Path, place: dict[str, str]) -> None:
    with RagEngine.open(tmp_path / "kb", place["model"]) as engine:
        engine.prefill([InputDocument("a", "The beta boat sails at dawn.", "a")])
        chat = ChatPDLLM(store=tmp_path / "kb", model=place["model"], max_tokens=8, cache=InMemoryCache())
        first, second = chat.invoke(QUESTION), chat.invoke(QUESTION)
        assert first.response_metadata["timings"] == second.response_metadata["timings"]
        engine.prefill([InputDocument("b", "The gamma boat sails at noon.", "b")])
        assert chat.invoke(QUESTION).response_metadata["kv"]["hit"] == 2


@pytest.mark.parametrize("cls", [ChatPDLLM, PDLLM, PDLLMRetriever])
def test_a_subclass_may_add_fields_and_private_attributes(cls: Any, place: dict[str, str]) -> None:
    class Own(cls):  # type: ignore[misc]
        label: str = "x"
        _calls: int = PrivateAttr(default=0)

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self._calls = 5

    own = Own(**place, label="y")
    assert own.invoke(QUESTION)
    assert (own.label, own._calls, copy.deepcopy(own)._calls) == ("y", 5, 5)


def test_the_identity_names_the_store_and_its_generation(chat: ChatPDLLM, place: dict[str, str]) -> None:
    before = chat.asdict()
    chat.invoke(QUESTION)
    after = chat.asdict()
    assert before == after
    assert after["store"] == place["store"]
    assert isinstance(after["generation"], int)
    assert after["generation"] == chat.opened().store.generation
    assert chat._get_ls_params(stop=["x"]) == {
        "ls_provider": "pdllm",
        "ls_model_type": "chat",
        "ls_model_name": place["model"],
        "ls_max_tokens": 8,
        "ls_stop": ["x"],
    }


def test_the_completion_model_is_traced_and_counts_as_the_chat_model_does(
    chat: ChatPDLLM, place: dict[str, str]
) -> None:
    llm = PDLLM(**place, max_tokens=8, stop=["x"])
    params = llm._get_ls_params()
    assert params == {**chat._get_ls_params(stop=["x"]), "ls_model_type": "llm"}
    assert llm.get_num_tokens("tea") == 3
    assert llm._identifying_params == {**chat._identifying_params, "k": None, "steps": None, "stop": ["x"]}


def test_an_import_loads_neither_torch_nor_the_framework() -> None:
    code = "import sys, langchain_pdllm; print([m for m in ('torch', 'langchain_core') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- retriever -----------------------------------------------------------------------------------------------------


def test_documents_carry_chunk_ids_and_metadata(retriever: PDLLMRetriever) -> None:
    documents = retriever.invoke(QUESTION)
    engine = retriever.opened()
    known = {ref.chunk_id.hex(): ref for ref in engine.store.refs(engine.fingerprint)}
    assert len(documents) == 2
    for document in documents:
        assert document.id is not None
        ref = known[document.id]
        metadata = document.metadata
        assert (metadata["doc_id"], metadata["ordinal"], metadata["start_index"]) == (*ref[:2], ref.char_start)
        assert metadata["source"] == f"{ref.doc_id}.txt"
        assert metadata["colour"] == ref.doc_id[0]
    scores = [document.metadata["score"] for document in documents]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (3, 3), (10, 10), (50, 10)])
def test_k_of_the_constructor_or_the_call_is_honoured(place: dict[str, str], k: int, expected: int) -> None:
    assert len(PDLLMRetriever(**place, k=k).invoke(QUESTION)) == expected
    assert len(PDLLMRetriever(**place, k=2).invoke(QUESTION, k=k)) == expected


def test_a_filter_keeps_documents_by_their_metadata(retriever: PDLLMRetriever) -> None:
    documents = retriever.invoke(QUESTION, filter={"colour": "g"}, k=10)
    assert {document.metadata["doc_id"] for document in documents} == {"gamma"}


@pytest.mark.usefixtures("slow")
def test_ainvoke_of_the_retriever_is_the_same_and_leaves_the_loop_free(
    retriever: PDLLMRetriever, heartbeat: Any
) -> None:
    expected = retriever.invoke(QUESTION, k=5)
    assert asyncio.run(heartbeat(retriever.ainvoke(QUESTION, k=5))) == expected


# -- as_message ----------------------------------------------------------------------------------------------------


def test_as_message_reads_exactly_those_chunks(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    documents = retriever.invoke("Who likes tea?", k=10)[7:]
    message = chat.invoke([as_message(documents, QUESTION)])
    direct = chat.opened().answer(QUESTION, chunk_ids=[d.id for d in documents if d.id], max_new_tokens=8, steps=4)
    read = {(c["doc_id"], c["ordinal"]) for c in message.response_metadata["citations"]}
    assert read == {(d.metadata["doc_id"], d.metadata["ordinal"]) for d in documents}
    assert message.text == direct.text
    assert message.usage_metadata is not None
    stats = direct.stats
    assert message.usage_metadata["input_tokens"] == stats.prompt_tokens + stats.context_tokens
    assert "".join(chunk.text for chunk in chat.stream([as_message(documents, QUESTION)])) == direct.text


def test_as_message_keeps_the_texts_for_other_models(retriever: PDLLMRetriever) -> None:
    documents = retriever.invoke(QUESTION)
    message = as_message(documents, QUESTION)
    assert message.text == "".join([*(document.page_content for document in documents), QUESTION])


def test_as_message_without_documents_reads_nothing(chat: ChatPDLLM) -> None:
    metadata = chat.invoke([as_message([], QUESTION)]).response_metadata
    assert (metadata["supported"], metadata["nfe"], metadata["citations"]) == (False, 0, [])


def test_chunk_ids_of_a_call_win(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    first, second = retriever.invoke(QUESTION)
    message = chat.invoke([as_message([first], QUESTION)], chunk_ids=[second.id])
    (citation,) = message.response_metadata["citations"]
    assert (citation["doc_id"], citation["ordinal"]) == (second.metadata["doc_id"], second.metadata["ordinal"])
