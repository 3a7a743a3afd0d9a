"""What LangChain's two kinds of models share, and documents between LangChain and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams

from pdllm_rag.components.answering import AnswerComponent, Request, document_part
from pdllm_rag.components.searching import Hit

if TYPE_CHECKING:
    from pdllm_rag.events import StreamEvent
    from pdllm_rag.resolving import Part


class AnsweringModel(AnswerComponent):
    """Goes before LangChain's own base class, whose kind of input and chunk `_request` and `_chunk` know."""

    def _request(self, given: Any, stop: list[str] | None, options: dict[str, Any], /) -> Request:
        """What is to be asked, of a prompt or messages."""
        raise NotImplementedError  # each kind has its own

    def _chunk(self, event: StreamEvent, request: Request, /) -> Any:
        """The chunk that tells of an event, or None."""
        raise NotImplementedError  # each kind has its own

    def _chunks(
        self, given: Any, stop: list[str] | None, options: dict[str, Any], manager: CallbackManagerForLLMRun | None
    ) -> Iterator[Any]:
        """The chunks of a stream."""
        request = self._request(given, stop, options)
        for event in request.engine.stream(request.turns, **request.arguments):
            chunk = self._chunk(event, request)
            if chunk is not None:
                if manager is not None:
                    manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _achunks(
        self, given: Any, stop: list[str] | None, options: dict[str, Any], manager: AsyncCallbackManagerForLLMRun | None
    ) -> AsyncIterator[Any]:
        """As `_chunks`, off the event loop."""
        request = await asyncio.to_thread(self._request, given, stop, options)
        stream = request.engine.astream(request.turns, **request.arguments)
        async with aclosing(stream) as events:  # leaving early must stop the decoding now, not at garbage collection
            async for event in events:
                chunk = self._chunk(event, request)
                if chunk is not None:
                    if manager is not None:
                        await manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    @property
    def _llm_type(self) -> str:
        return "pdllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identifying_params()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(stop=stop or self.stop, **kwargs)  # type: ignore[misc]
        params["ls_provider"] = "pdllm"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of plain text in the model's own tokenizer."""
        own = getattr(self, "custom_get_token_ids", None)
        return own(text) if own is not None else self.opened().model.tokenizer.encode(text)

    def part(self, chunk: Any) -> Part:
        """A document, or a chunk's id."""
        if isinstance(chunk, Document):
            return document_part(chunk.id, chunk.page_content, chunk.metadata)
        return super().part(chunk)


def as_document(hit: Hit) -> Document:
    """A retrieved chunk."""
    return Document(id=hit.chunk_id, page_content=hit.text, metadata=hit.metadata)
