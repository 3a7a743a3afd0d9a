"""The LLM: a prompt or conversation in, an answer from the store's chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from langchain_pdllm._component import AskComponent, Usage
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from pydantic import PrivateAttr

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer
    from pdllm_rag.events import StreamEvent
    from pdllm_rag.models.spec import ModelSpec

_ROLES = {MessageRole.SYSTEM: "system", MessageRole.USER: "user", MessageRole.ASSISTANT: "assistant"}


class _Part(NamedTuple):
    """A moment of a streamed answer: the text so far, what is new, and the answer at the end."""

    text: str
    delta: str
    answer: Answer | None


class PDLLM(AskComponent, CustomLLM):
    """Answers from a chunk-KV store.

    It retrieves by itself, by the prompt's or the last message's text, unless the call names `chunk_ids`. Every field
    from `k` to `abstain` can be given per call and wins there. `raw` holds the answer with citations and statistics,
    and `usage`. In a query engine use `PDLLMSynthesizer`, which reads the retrieved nodes' stored chunks.

    Left out: function calling; message blocks that are not text; document text pasted into a prompt (as the standard
    synthesizers do) is read as part of the question and not replaced by its stored KV.
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
        """Answer a prompt."""
        return _completion(self.opened().answer(self._prompt(prompt, formatted), **self.ask_options(kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, as it is written; the last response carries `raw`."""
        parts = self._parts(self._prompt(prompt, formatted), self.ask_options(kwargs))
        return (_completion_part(part) for part in parts)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last message."""
        return _chat(_completion(self.opened().answer(_turns(messages), **self.ask_options(kwargs))))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, as it is written; the last response carries `raw`."""
        parts = self._parts(_turns(messages), self.ask_options(kwargs))
        return (_chat(_completion_part(part)) for part in parts)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread; cancelling stops the decoding."""
        return _completion(await self._aanswer(self._prompt(prompt, formatted), self.ask_options(kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, in a thread; leaving the loop stops the decoding."""
        parts = self._aparts(self._prompt(prompt, formatted), self.ask_options(kwargs))

        async def responses() -> CompletionResponseAsyncGen:
            async with aclosing(parts):
                async for part in parts:
                    yield _completion_part(part)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, in a thread; cancelling stops the decoding."""
        return _chat(_completion(await self._aanswer(_turns(messages), self.ask_options(kwargs))))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, in a thread; leaving the loop stops the decoding."""
        parts = self._aparts(_turns(messages), self.ask_options(kwargs))

        async def responses() -> ChatResponseAsyncGen:
            async with aclosing(parts):
                async for part in parts:
                    yield _chat(_completion_part(part))

        return responses()

    def _prompt(self, prompt: str, formatted: bool) -> str:
        convert = self.completion_to_prompt
        return prompt if formatted or convert is None else convert(prompt)

    async def _aanswer(self, question: str | list[dict[str, str]], arguments: dict[str, Any]) -> Answer:
        engine = await asyncio.to_thread(self.opened)
        return await engine.aanswer(question, **arguments)

    def _parts(self, question: str | list[dict[str, str]], arguments: dict[str, Any]) -> Iterator[_Part]:
        text = ""
        for event in self.opened().stream(question, **arguments):
            part = _part(event, text)
            if part is not None:
                text = part.text
                yield part

    async def _aparts(self, question: str | list[dict[str, str]], arguments: dict[str, Any]) -> AsyncGenerator[_Part]:
        engine = await asyncio.to_thread(self.opened)
        text = ""
        stream = cast("AsyncGenerator[StreamEvent]", engine.astream(question, **arguments))
        async with aclosing(stream) as events:
            async for event in events:
                part = _part(event, text)
                if part is not None:
                    text = part.text
                    yield part


def _part(event: StreamEvent, so_far: str) -> _Part | None:
    from pdllm_rag.events import Final, TextDelta

    if isinstance(event, TextDelta):
        return _Part(so_far + event.text, event.text, None)
    return _Part(event.answer.text, "", event.answer) if isinstance(event, Final) else None


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    turns = []
    for message in messages:
        if message.role not in _ROLES:
            raise ValueError(f"PDLLM got a message of role {message.role.value!r}; expected system, user or assistant")
        texts = []
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise ValueError(f"PDLLM got a message block of type {block.block_type!r}; expected text blocks only")
            texts.append(block.text)
        turns.append({"role": _ROLES[message.role], "content": "\n".join(texts)})
    return turns


def _completion(answer: Answer) -> CompletionResponse:
    return _completion_part(_Part(answer.text, "", answer)).model_copy(update={"delta": None})


def _completion_part(part: _Part) -> CompletionResponse:
    if part.answer is None:
        return CompletionResponse(text=part.text, delta=part.delta)
    usage = Usage.of(part.answer.stats)
    counts = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "cached_tokens": usage.stored_tokens,
    }
    raw = {**part.answer.as_dict(), "usage": counts}
    return CompletionResponse(text=part.text, delta=part.delta, raw=raw, additional_kwargs=counts)


def _chat(completion: CompletionResponse) -> ChatResponse:
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=completion.text),
        delta=completion.delta,
        raw=completion.raw,
        additional_kwargs=completion.additional_kwargs,
    )
