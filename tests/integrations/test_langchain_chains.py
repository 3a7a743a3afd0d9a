"""LangChain chains: pasted and explicit context, the completion model, every way to call, many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_pdllm import PDLLM, ChatPDLLM, PDLLMRetriever, as_message
from prompt_templates import ONE_MESSAGE, SYSTEM

from pdllm_rag import RagEngine
from pdllm_rag.errors import GenerationCancelled, UnmatchedContextError

QUESTION = "When does the beta boat sail?"
FOREIGN = "The zeta boat sails at noon from pier nine. Its captain likes rum."
TEMPLATE = "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n"
OPTIONS = {"max_tokens": 8, "steps": 4}


@pytest.fixture
def chat(place: dict[str, str]) -> ChatPDLLM:
    return ChatPDLLM(**place, k=2, **OPTIONS)


@pytest.fixture
def llm(place: dict[str, str]) -> PDLLM:
    return PDLLM(**place, k=2, **OPTIONS)


@pytest.fixture
def retriever(place: dict[str, str]) -> PDLLMRetriever:
    return PDLLMRetriever(**place, k=3)


def format_docs(docs: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


def read_of(message: AIMessage) -> tuple[dict[str, int], bool | None]:
    return message.response_metadata["kv"], message.response_metadata["supported"]


def chain(retriever: Any, model: Any) -> Runnable[str, Any]:
    """The chain that everybody writes."""
    is_chat = isinstance(model, ChatPDLLM)
    prompt = (ChatPromptTemplate if is_chat else PromptTemplate).from_template(TEMPLATE)
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model


# -- context in prompts --------------------------------------------------------------------------------------------


def test_an_ordinary_chain_reads_its_chunks_from_the_store(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    message = chain(retriever, chat).invoke(QUESTION)
    documents = retriever.invoke(QUESTION)
    kv = message.response_metadata["kv"]
    assert (kv["hit"], kv["recomputed"], kv["recognised"], kv["unmatched_chars"]) == (3, 0, 3, 0)
    direct = chat.opened().answer(QUESTION, chunk_ids=[d.id for d in documents if d.id], max_new_tokens=8, steps=4)
    assert message.text == direct.text
    assert message.usage_metadata["input_token_details"]["cache_creation"] == 0


def test_the_completion_model_reads_what_the_chat_model_reads(
    chat: ChatPDLLM, llm: PDLLM, retriever: PDLLMRetriever
) -> None:
    text = chain(retriever, chat).invoke(QUESTION).text
    assert chain(retriever, llm).invoke(QUESTION) == text
    assert "".join(chain(retriever, llm).stream(QUESTION)) == text
    prompt = TEMPLATE.format(context=format_docs(retriever.invoke(QUESTION)), question=QUESTION)
    (generation,), *_ = llm.generate([prompt]).generations
    assert generation.generation_info is not None
    assert generation.generation_info["kv"]["recognised"] == 3
    assert generation.generation_info["usage_metadata"]["input_token_details"]["cache_read"] > 0


def test_documents_handed_over_are_answered_as_by_the_engine(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    """Retrieval within the engine's own window, handed over with its scores, is the engine's own answer."""
    engine = chat.opened()
    direct = engine.answer(QUESTION, k=3, max_new_tokens=8, steps=4)
    window = engine.model.spec.family.score_window
    exact = RunnableParallel(docs=retriever.bind(score_window=window), question=RunnablePassthrough()) | RunnableLambda(
        lambda given: [as_message(given["docs"], given["question"])]
    )
    docs = retriever.invoke(QUESTION, score_window=window)
    messages = [
        (exact | chat).invoke(QUESTION),
        chat.invoke(QUESTION, chunks=docs),
        chat.bind(chunks=docs).invoke(QUESTION),
    ]
    for message in messages:
        assert message.text == direct.text
        assert message.response_metadata["citations"] == direct.as_dict()["citations"]
        assert message.response_metadata["kv"]["hit"] == len(docs) == direct.stats.chunks.hit
        assert message.response_metadata["kv"]["recomputed"] == 0
    assert chat.invoke(QUESTION, chunks=[doc.id for doc in docs]).text == direct.text


def test_documents_of_another_retriever_are_known_by_their_text(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    stored = [doc.page_content.strip() for doc in retriever.invoke(QUESTION, k=2)]
    foreign = [Document(id=f"{i:032x}", page_content=text, metadata={"a": 1}) for i, text in enumerate(stored)]
    message = chat.invoke([as_message([*foreign, Document(page_content=FOREIGN)], QUESTION)])
    kv = message.response_metadata["kv"]
    assert (kv["hit"], kv["recognised"], kv["unmatched_chars"]) == (2, 2, len(FOREIGN))
    assert kv["recomputed"] > 0
    plain_text = {"type": "text-plain", "text": FOREIGN, "mime_type": "text/plain"}
    block = chat.invoke([HumanMessage([plain_text, {"type": "text", "text": QUESTION}])])  # type: ignore[list-item]
    assert block.response_metadata["kv"]["unmatched_chars"] == len(FOREIGN)


def test_a_document_that_was_changed_since_is_answered_from_its_own_text(
    chat: ChatPDLLM, retriever: PDLLMRetriever
) -> None:
    (doc, *_) = retriever.invoke(QUESTION)
    doc.page_content = FOREIGN
    for kv in (
        chat.invoke([as_message([doc], QUESTION)]).response_metadata["kv"],
        chat.invoke(QUESTION, chunks=[doc]).response_metadata["kv"],
    ):
        assert (kv["hit"], kv["unmatched_chars"]) == (0, len(FOREIGN))


def test_chunks_and_texts_of_a_call_are_read_together(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    docs = retriever.invoke(QUESTION)[:2]
    kv = chat.invoke(QUESTION, chunks=docs, context=FOREIGN).response_metadata["kv"]
    assert (kv["hit"], kv["unmatched_chars"]) == (2, 0)
    assert kv["recomputed"] == chat.invoke(QUESTION, context=FOREIGN).response_metadata["kv"]["recomputed"] > 0
    both = [*docs, Document(page_content=FOREIGN)]
    assert chat.invoke(QUESTION, chunks=both, context=[]).response_metadata["kv"]["hit"] == 2
    with pytest.raises(ValueError, match="both chunks and chunk_ids"):
        chat.invoke(QUESTION, chunks=docs, chunk_ids=[docs[0].id])


def test_context_that_is_in_no_chunk_is_answered_and_reported(chat: ChatPDLLM) -> None:
    prompt = TEMPLATE.format(context=FOREIGN, question="When does the zeta boat sail?")
    message = chat.invoke(prompt)
    assert message.response_metadata["kv"]["unmatched_chars"] == len(FOREIGN)
    assert message.response_metadata["kv"]["hit"] == 0
    assert message.usage_metadata is not None
    details = message.usage_metadata["input_token_details"]
    assert details["cache_creation"] > details["cache_read"] == 0
    direct = chat.opened().answer("When does the zeta boat sail?", context=FOREIGN, max_new_tokens=8, steps=4, k=2)
    assert message.text == direct.text == chat.invoke("When does the zeta boat sail?", context=FOREIGN).text
    ignored = chat.invoke(prompt, on_unmatched="ignore").response_metadata
    assert (ignored["kv"]["unmatched_chars"], ignored["supported"]) == (len(FOREIGN), False)
    with pytest.raises(UnmatchedContextError):
        chat.bind(on_unmatched="error").invoke(prompt)


@pytest.mark.parametrize("template", [*ONE_MESSAGE.values(), "{context}\n\nQuestion: {question}", TEMPLATE])
def test_a_chain_that_found_nothing_has_nothing_to_read(llm: PDLLM, chat: ChatPDLLM, template: str) -> None:
    """The model must not look where the chain's own retriever may not."""
    prompt = template.format(context="", question=QUESTION)
    kv, supported = read_of(chat.invoke(prompt))
    assert (kv["hit"], kv["recomputed"], kv["candidates"], supported) == (0, 0, 0, False)
    assert llm.invoke(prompt) == chat.invoke([as_message([], QUESTION)]).text
    earlier = [HumanMessage(TEMPLATE.format(context=FOREIGN, question="Who?")), AIMessage("Rum.")]
    assert read_of(chat.invoke([*earlier, HumanMessage(prompt)]))[1] is False


@pytest.mark.parametrize("template", SYSTEM.values())
def test_a_system_message_for_context_that_is_empty_leaves_nothing_to_read(chat: ChatPDLLM, template: str) -> None:
    kv, supported = read_of(chat.invoke([SystemMessage(template.format(context="")), HumanMessage(QUESTION)]))
    assert (kv["hit"], kv["candidates"], supported) == (0, 0, False)


def test_a_bare_question_is_looked_for_unless_retrieval_is_off(place: dict[str, str], chat: ChatPDLLM) -> None:
    off = ChatPDLLM(**place, retrieve=False, filter={"colour": "a"}, **OPTIONS)
    earlier = [HumanMessage(TEMPLATE.format(context="", question="Who?")), AIMessage("Nobody.")]
    for question in (QUESTION, f"Question: {QUESTION}", [*earlier, HumanMessage(QUESTION)]):
        assert chat.invoke(question).response_metadata["kv"]["hit"] == 2
        kv, supported = read_of(off.invoke(question))
        assert (kv["hit"], supported) == (0, False)
        assert chat.invoke(question, retrieve=False).text == off.invoke(question).text
    assert off.invoke(QUESTION, context=FOREIGN).response_metadata["kv"]["recomputed"] > 0


def test_recognition_can_be_switched_off(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    kv = chain(retriever, chat.bind(recognise=False)).invoke(QUESTION).response_metadata["kv"]
    assert (kv["recognised"], kv["candidates"]) == (0, 8)


def test_a_filter_of_the_model_is_for_its_own_retrieval(place: dict[str, str], retriever: PDLLMRetriever) -> None:
    chat = ChatPDLLM(**place, filter={"colour": "g"}, **OPTIONS)
    (citation, *_) = chat.invoke(QUESTION).response_metadata["citations"]
    assert citation["doc_id"] == "gamma"
    assert chain(retriever, chat).invoke(QUESTION).response_metadata["kv"]["hit"] == 3


# -- all the ways to call ------------------------------------------------------------------------------------------


def forms(model: Any, given: Any, **options: Any) -> dict[str, Callable[[], str]]:
    """Every way to ask a LangChain model, as text."""

    def text(answer: Any) -> str:
        return answer if isinstance(answer, str) else answer.text

    async def streamed() -> str:
        return "".join([text(chunk) async for chunk in model.astream(given, **options)])

    return {
        "invoke": lambda: text(model.invoke(given, **options)),
        "stream": lambda: "".join(text(chunk) for chunk in model.stream(given, **options)),
        "batch": lambda: text(model.batch([given, given], **options)[1]),
        "ainvoke": lambda: text(asyncio.run(model.ainvoke(given, **options))),
        "astream": lambda: asyncio.run(streamed()),
        "abatch": lambda: text(asyncio.run(model.abatch([given, given], **options))[1]),
    }


def test_stop_strings_end_the_answer_in_every_form(chat: ChatPDLLM, llm: PDLLM, place: dict[str, str]) -> None:
    full = chat.invoke(QUESTION).text
    stop = full[2:4]
    expected = full[: full.index(stop)].rstrip()
    assert expected
    for model in (chat, llm):
        said = {name: ask() for name, ask in forms(model, QUESTION, stop=[stop]).items()}
        assert said == dict.fromkeys(said, expected)
        own = {name: ask() for name, ask in forms(type(model)(**place, k=2, stop=[stop], **OPTIONS), QUESTION).items()}
        assert own == dict.fromkeys(own, expected)


def test_every_form_gives_the_same_answer(chat: ChatPDLLM, llm: PDLLM, retriever: PDLLMRetriever) -> None:
    expected = chat.invoke(QUESTION).text
    for model in (chat, llm):
        assert {ask() for ask in forms(model, QUESTION).values()} == {expected}
    pasted = chain(retriever, chat).invoke(QUESTION).text
    whole = chain(retriever, chat) | StrOutputParser()
    assert {ask() for ask in forms(whole, QUESTION).values()} == {pasted}


def test_usage_is_the_same_in_every_form(chat: ChatPDLLM) -> None:
    expected = chat.invoke(QUESTION).usage_metadata

    async def astreamed() -> Any:
        first, *others = [chunk async for chunk in chat.astream(QUESTION)]
        return sum(others, first)

    first, *others = chat.stream(QUESTION)
    messages = [sum(others, first), asyncio.run(astreamed()), asyncio.run(chat.ainvoke(QUESTION))]
    assert [message.usage_metadata for message in messages] == [expected] * 3


@pytest.mark.parametrize("n_at_once", [1, 2, 7, 100])
@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_a_batch_keeps_order_and_limit_and_isolates_failures(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str, n_at_once: int
) -> None:
    running, most, lock = 0, 0, threading.Lock()
    stream = RagEngine.stream

    def counting(self: RagEngine, question: Any, **arguments: Any) -> Any:
        def events() -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            try:
                yield from stream(self, question, **arguments)
            finally:
                with lock:
                    running -= 1

        return events()

    monkeypatch.setattr(RagEngine, "stream", counting)
    model: Any = (ChatPDLLM if kind == "chat" else PDLLM)(**place, k=1, **OPTIONS)
    prompts = [f"When does the {name} boat sail?" for name in ("alpha", "beta", "gamma", "delta", "epsilon")]
    expected = [getattr(answer, "text", answer) for answer in (model.invoke(prompt) for prompt in prompts)]
    prompts[2:2] = ["boat " * 2000, ""]
    config = {"max_concurrency": n_at_once}
    most = 0
    for answers in (
        model.batch(prompts, config, return_exceptions=True),
        asyncio.run(model.abatch(prompts, config, return_exceptions=True)),
    ):
        assert [isinstance(answer, Exception) for answer in answers] == [False, False, True, True, False, False, False]
        assert [getattr(one, "text", one) for one in answers if not isinstance(one, Exception)] == expected
    assert 1 <= most <= n_at_once


def test_one_object_may_be_used_by_many_threads(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    questions = [f"When does the {name} boat sail?" for name in ("alpha", "beta", "gamma", "delta")] * 3
    whole = chain(retriever, chat)
    expected = [whole.invoke(question).text for question in questions]
    with ThreadPoolExecutor(6) as pool:
        assert [message.text for message in pool.map(whole.invoke, questions)] == expected


def test_the_completion_model_leaves_the_loop_free_and_stops_when_cancelled(
    llm: PDLLM, slow: dict[str, Any], heartbeat: Any, cancels: list[threading.Event]
) -> None:
    async def main() -> None:
        assert await heartbeat(llm.ainvoke(QUESTION, **slow))
        cancels.clear()
        task = asyncio.create_task(llm.ainvoke(QUESTION, **slow))
        while not cancels:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancels[0].is_set()

    asyncio.run(main())


def test_cancelling_stops_within_one_denoising_step(chat: ChatPDLLM) -> None:
    event = threading.Event()
    chunks = chat.stream(QUESTION, cancel=event, max_tokens=16, threshold=1.0, steps=16, abstain=False)
    next(chunks)
    event.set()
    with pytest.raises(GenerationCancelled, match="denoising steps"):
        next(chunks)


def test_a_timeout_ends_an_answer(chat: ChatPDLLM, slow: dict[str, Any]) -> None:
    with pytest.raises(GenerationCancelled):
        chat.invoke(QUESTION, timeout=0.01, **slow)
    assert chat.invoke(QUESTION, timeout=60.0).text
    assert ChatPDLLM(**chat.model_dump(include={"store", "model"}), timeout=60.0, **OPTIONS).invoke(QUESTION).text
    given = threading.Event()
    given.set()
    with pytest.raises(GenerationCancelled):
        chat.invoke(QUESTION, timeout=60.0, cancel=given)


# -- options and objects -------------------------------------------------------------------------------------------


def test_options_work_through_configurable_fields(chat: ChatPDLLM) -> None:
    flexible = chat.configurable_fields(k=ConfigurableField(id="k"), decoder=ConfigurableField(id="decoder"))
    assert flexible.invoke(QUESTION).response_metadata["kv"]["hit"] == 2
    configured = flexible.with_config(configurable={"k": 3, "decoder": "vanilla"})
    metadata = configured.invoke(QUESTION).response_metadata
    assert (metadata["kv"]["recomputed"], metadata["decoder"]) == (3, "vanilla")


def test_streaming_by_field_or_keyword_is_the_same_answer(chat: ChatPDLLM) -> None:
    text = chat.invoke(QUESTION).text
    assert chat.model_copy(update={"streaming": True}).invoke(QUESTION).text == text
    assert chat.invoke(QUESTION, stream=True).text == text


def test_a_copy_for_another_model_has_an_engine_of_its_own(chat: ChatPDLLM, tmp_path: Any) -> None:
    engine = chat.opened()
    other = chat.model_copy(update={"store": str(tmp_path / "none")})
    with pytest.raises(Exception, match="none"):
        other.invoke(QUESTION)
    assert chat.opened() is engine


def test_a_key_is_neither_kept_nor_shown(place: dict[str, str]) -> None:
    chat = ChatPDLLM(**place, api_key="secret-key", max_retries=2, timeout=60)
    assert "secret-key" not in repr(chat) + str(chat.model_dump()) + str(chat.__dict__)


def test_messages_of_a_system_and_history_are_answered(chat: ChatPDLLM, retriever: PDLLMRetriever) -> None:
    context = format_docs(retriever.invoke(QUESTION))
    system = SystemMessage(f"Use the following context in your response:\n\n{context}")
    message = chat.invoke([system, HumanMessage("Hello."), AIMessage("Hello."), HumanMessage(QUESTION)])
    assert message.response_metadata["kv"]["recognised"] == 3
