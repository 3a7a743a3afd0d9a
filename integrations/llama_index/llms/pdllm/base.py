"""The LLM: a prompt or conversation in, an answer from the store's chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from pydantic import PrivateAttr

from pdllm_rag.components.answering import AnswerComponent, Request, Usage, counted, document_part

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer, Citation
    from pdllm_rag.events import StreamEvent
    from pdllm_rag.models.spec import ModelSpec
    from pdllm_rag.resolving import Part

_ROLES = {MessageRole.SYSTEM: "system", MessageRole.USER: "user", MessageRole.ASSISTANT: "assistant"}


class _Said(NamedTuple):
    """A moment of an answer: the text so far, what is new if it is streamed, and at its end the answer."""

    text: str
    delta: str | None
    answer: Answer | None
    request: Request


class PDLLM(AnswerComponent, CustomLLM):
    """Answers from a chunk-KV store.

    What it reads: the chunks of a call (`chunks=`: nodes or chunk ids), or the citable blocks of the messages; else the
    stored chunks whose text a query engine has pasted into the prompt, and other context that stands there
    (`on_unmatched`); for a bare question it retrieves by itself, unless `retrieve` is off; a template without context
    is answered from nothing. Every field from `k` to `timeout` can be given per call and wins there; a call also takes
    `context` (texts) and `cancel` (a `threading.Event`).

    A chat's message holds the text and a citation block for each chunk read; `raw` holds the answer with its citations
    and statistics, `usage` and `kv`. `PDLLMSynthesizer` keeps all that in a query engine's response; LlamaIndex's own
    synthesizers keep the text and the source nodes.

    Left out: function calling and structured output; message blocks that are not text.
    """

    _spec: ModelSpec | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """Name for serialisation."""
        return "PDLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's window and the answer's length, in tokens; read without loading weights."""
        from pdllm_rag.config import AskOptions
        from pdllm_rag.models.loader import read_spec

        if self._spec is None:
            self._spec = read_spec(self.model)[0]
        return LLMMetadata(
            context_window=self._spec.family.window,
            num_output=self.max_tokens or AskOptions.max_new_tokens,
            is_chat_model=True,
            model_name=self.model,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        Raises:
            ValueError: an unknown option or a bad value.
            RequestError, StoreError, ModelError: as the engine raises them.
        """
        return _completion(self._answered(self._prompted(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, as it is written; the last response carries `raw`."""
        return (_completion(said) for said in _said(self._prompted(prompt, formatted, kwargs)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last message. Raises what `complete` raises."""
        return _chat(self._answered(self._asked(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, as it is written; the last response carries `raw`."""
        return (_chat(said) for said in _said(self._asked(messages, kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread; cancelling stops the decoding."""
        return _completion(await self._aanswered(self._prompted, prompt, formatted, kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, in a thread; leaving the loop stops the decoding."""
        stream = _asaid(self._prompted, prompt, formatted, kwargs)

        async def responses() -> CompletionResponseAsyncGen:
            async with aclosing(stream):
                async for said in stream:
                    yield _completion(said)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, in a thread; cancelling stops the decoding."""
        return _chat(await self._aanswered(self._asked, messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, in a thread; leaving the loop stops the decoding."""
        stream = _asaid(self._asked, messages, kwargs)

        async def responses() -> ChatResponseAsyncGen:
            async with aclosing(stream):
                async for said in stream:
                    yield _chat(said)

        return responses()

    def as_structured_llm(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported. Raises NotImplementedError."""
        raise NotImplementedError(
            "PDLLM supports neither function calling nor structured output; ask it for text, or use its query engine "
            "as a tool of another model"
        )

    structured_predict = stream_structured_predict = as_structured_llm

    async def astructured_predict(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported. Raises NotImplementedError."""
        self.as_structured_llm()

    astream_structured_predict = astructured_predict

    def part(self, chunk: Any) -> Part:
        """A node, or a chunk's id."""
        node = chunk.node if isinstance(chunk, NodeWithScore) else chunk
        if not isinstance(node, BaseNode):
            return super().part(chunk)
        return document_part(node.node_id, node.get_content(metadata_mode=MetadataMode.NONE), node.metadata)

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        if isinstance(texts := prompt_args.get("context_str"), list):  # simple_summarize would print the list
            prompt_args["context_str"] = "\n\n".join(texts)
        return super()._get_messages(prompt, **prompt_args)

    def _prompted(self, prompt: str, formatted: bool, given: dict[str, Any]) -> Request:
        convert = self.completion_to_prompt
        content = prompt if formatted or convert is None else convert(prompt)
        return self.request([{"role": "user", "content": content}], None, given)

    def _asked(self, messages: Sequence[ChatMessage], given: dict[str, Any]) -> Request:
        turns, parts = _read(messages)
        return self.request(turns, parts, given)

    def _answered(self, request: Request) -> _Said:
        answer = request.engine.answer(request.turns, **request.arguments)
        return _Said(answer.text, None, answer, request)

    async def _aanswered(self, ask: Callable[..., Request], *arguments: Any) -> _Said:
        request = await asyncio.to_thread(ask, *arguments)
        answer = await request.engine.aanswer(request.turns, **request.arguments)
        return _Said(answer.text, None, answer, request)


def _said(request: Request) -> Iterator[_Said]:
    text = ""
    for event in request.engine.stream(request.turns, **request.arguments):
        said = _next(event, text, request)
        if said is not None:
            text = said.text
            yield said


async def _asaid(ask: Callable[..., Request], *arguments: Any) -> AsyncGenerator[_Said]:
    request = await asyncio.to_thread(ask, *arguments)
    text = ""
    async with aclosing(request.engine.astream(request.turns, **request.arguments)) as events:
        async for event in events:
            said = _next(event, text, request)
            if said is not None:
                text = said.text
                yield said


def _next(event: StreamEvent, so_far: str, request: Request) -> _Said | None:
    from pdllm_rag.events import Final, TextDelta

    if isinstance(event, TextDelta):
        return _Said(so_far + event.text, event.text, None, request)
    return _Said(event.answer.text, "", event.answer, request) if isinstance(event, Final) else None


def _read(messages: Sequence[ChatMessage]) -> tuple[list[dict[str, str]], list[Part] | None]:
    """Turns, and the documents of citable blocks that count (`counted`)."""
    from pdllm_rag.resolving import Part

    turns = []
    brought: list[list[Part] | None] = []  # by message
    for message in messages:
        if message.role not in _ROLES:
            raise ValueError(f"PDLLM got a message of role {message.role.value!r}; expected system, user or assistant")
        texts: list[str] = []
        parts: list[Part] = []
        for block in message.blocks:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            content = block.content if isinstance(block, CitableBlock) else ()
            documents = [Part(one.text, None) for one in content if isinstance(one, TextBlock)]
            is_empty = isinstance(block, (CachePoint, CitationBlock))  # these two add nothing to read
            if len(documents) < len(content) or not (documents or is_empty):
                raise ValueError(f"PDLLM got a message block of type {block.block_type!r}; expected text blocks only")
            parts += documents
        turns.append({"role": _ROLES[message.role], "content": "\n".join(texts)})
        brought.append(parts or None)
    return turns, counted(turns, brought)


def raw(answer: Answer, request: Request) -> dict[str, Any]:
    """An answer with citations and statistics, usage in tokens, where its chunks came from (`kv`), and `history`."""
    usage = Usage.of(answer.stats)
    counts = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "cached_tokens": usage.stored_tokens,
    }
    return {**answer.as_dict(), "usage": counts, "kv": request.kv(answer.stats), "history": request.history()}


def _completion(said: _Said) -> CompletionResponse:
    if said.answer is None:
        return CompletionResponse(text=said.text, delta=said.delta)
    data = raw(said.answer, said.request)
    return CompletionResponse(text=said.text, delta=said.delta, raw=data, additional_kwargs=data["usage"])


def _chat(said: _Said) -> ChatResponse:
    completion = _completion(said)
    citations = said.answer.citations if said.answer is not None else ()
    return ChatResponse(
        message=ChatMessage(
            role=MessageRole.ASSISTANT, blocks=[TextBlock(text=said.text), *map(_citation_block, citations)]
        ),
        delta=completion.delta,
        raw=completion.raw,
        additional_kwargs=completion.additional_kwargs,
    )


def _citation_block(citation: Citation) -> CitationBlock:
    place = citation.as_dict()
    quote, doc_id = place.pop("quote"), place.pop("doc_id")
    del place["score"]
    return CitationBlock(
        cited_content=TextBlock(text=quote),
        source=doc_id,
        title=doc_id,
        additional_location_info=place,
    )
