"""The chat model: a conversation in, an answer from the store's chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from pydantic import BeforeValidator, ConfigDict

from langchain_pdllm._answering import AnsweringModel
from langchain_pdllm.messages import answer_message, delta_message, final_message, read_messages
from pdllm_rag.components.answering import Request

if TYPE_CHECKING:
    from pdllm_rag.events import StreamEvent


class ChatPDLLM(AnsweringModel, BaseChatModel):
    """Answers the last human message from a chunk-KV store, with citations.

    What it reads: the documents of a call (`chunks=`) or of `as_message`; else the stored chunks whose text a prompt
    template has pasted into the messages, and other context that stands there (`on_unmatched`); for a bare question it
    retrieves by itself, unless `retrieve` is off; a template without context is answered from nothing. Every field from
    `k` to `timeout` can be given per call, by `bind` or as a keyword, and wins there; a call also takes `chunks`
    (documents or chunk ids), `context` (texts) and `cancel` (a `threading.Event`).

    The answer's text is `message.text`; its content is one text block with citation annotations, which
    `response_metadata["citations"]` repeats as plain dictionaries. Usage counts the context tokens that the store
    served as `cache_read` and those computed for this answer as `cache_creation`; both are part of `input_tokens`.

    `max_retries` and `api_key` are accepted, because generic code gives them to every chat model; a local model has no
    use for them. Left out: tool calling and structured output; parts of messages that are not text.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's base would ignore a mistyped option

    streaming: bool = False
    max_retries: int | None = None
    api_key: Annotated[None, BeforeValidator(lambda _: None)] = None

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChatPDLLM supports neither tool calling nor structured output; ask it for text, or use it inside a tool "
            "of another model"
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        answer = request.engine.answer(request.turns, **request.arguments)
        return ChatResult(generations=[ChatGeneration(message=answer_message(answer, request))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        request = await asyncio.to_thread(self._request, messages, stop, kwargs)
        answer = await request.engine.aanswer(request.turns, **request.arguments)
        return ChatResult(generations=[ChatGeneration(message=answer_message(answer, request))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._chunks(messages, stop, kwargs, run_manager)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return self._achunks(messages, stop, kwargs, run_manager)

    def _request(self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]) -> Request:
        reading = read_messages(messages)
        given = {name: value for name, value in given.items() if name != "stream"}  # LangChain has acted on it
        return self.request(reading.turns, reading.parts, {"stop": stop, **given})

    def _chunk(self, event: StreamEvent, request: Request) -> ChatGenerationChunk | None:
        from pdllm_rag.events import Final, TextDelta

        if isinstance(event, TextDelta):
            return ChatGenerationChunk(message=delta_message(event.text))
        return ChatGenerationChunk(message=final_message(event.answer, request)) if isinstance(event, Final) else None
