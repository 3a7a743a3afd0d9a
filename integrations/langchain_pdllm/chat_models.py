"""The chat model: a conversation in, an answer from the store's chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from pydantic import ConfigDict

from langchain_pdllm._component import ASK_OPTIONS, AskComponent
from langchain_pdllm.messages import answer_message, delta_message, final_message, read_messages

if TYPE_CHECKING:
    from pdllm_rag.events import StreamEvent


class ChatPDLLM(AskComponent, BaseChatModel):
    """Answers the last human message from a chunk-KV store, with citations.

    It retrieves by itself, unless the messages come from `as_message` or the call names `chunk_ids`: then exactly
    those chunks are read. Every field from `k` to `abstain`, and `chunk_ids`, can be given per call, by `bind` or as a
    keyword, and wins there. The answer's text is `message.text`; its content is one text block with citation
    annotations, which `response_metadata["citations"]` repeats as plain dictionaries.

    Usage counts the context tokens that the store served as `cache_read` and those computed for this answer as
    `cache_creation`; both are part of `input_tokens`.

    Left out: tool calling and structured output; parts of messages that are not text; document text pasted into a
    prompt is read as part of the question and not replaced by its stored KV.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's base would ignore a mistyped option

    @property
    def _llm_type(self) -> str:
        return "pdllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.identity(), **{name: getattr(self, name) for name in ASK_OPTIONS}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "pdllm"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of plain text in the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.opened().model.tokenizer.encode(text)

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
        turns, arguments = self._request(messages, stop, kwargs)
        answer = self.opened().answer(turns, **arguments)
        return ChatResult(generations=[ChatGeneration(message=answer_message(answer))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        turns, arguments = self._request(messages, stop, kwargs)
        engine = await asyncio.to_thread(self.opened)
        answer = await engine.aanswer(turns, **arguments)
        return ChatResult(generations=[ChatGeneration(message=answer_message(answer))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        turns, arguments = self._request(messages, stop, kwargs)
        for event in self.opened().stream(turns, **arguments):
            message = _chunk(event)
            if message is not None:
                chunk = ChatGenerationChunk(message=message)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        turns, arguments = self._request(messages, stop, kwargs)
        engine = await asyncio.to_thread(self.opened)
        stream = engine.astream(turns, **arguments)
        async with aclosing(stream) as events:  # leaving early must stop the decoding now, not at garbage collection
            async for event in events:
                message = _chunk(event)
                if message is not None:
                    chunk = ChatGenerationChunk(message=message)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Turns and arguments of `engine.answer`; chunks that the call names win over those of the messages."""
        reading = read_messages(messages)
        return reading.turns, self.ask_options({"chunk_ids": reading.chunk_ids, "stop": stop, **given})


def _chunk(event: StreamEvent) -> AIMessageChunk | None:
    from pdllm_rag.events import Final, TextDelta

    if isinstance(event, TextDelta):
        return delta_message(event.text)
    return final_message(event.answer) if isinstance(event, Final) else None
