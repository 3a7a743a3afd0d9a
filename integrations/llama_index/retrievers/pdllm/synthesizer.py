"""The response synthesizer: it reads the retrieved nodes' chunks from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.llms.pdllm.base import PDLLM
from llama_index.retrievers.pdllm.responses import arespond, asked, respond
from llama_index_instrumentation import get_dispatcher

from pdllm_rag.components.fields import Closing

dispatcher = get_dispatcher(__name__)


class PDLLMSynthesizer(Closing, BaseSynthesizer):
    """Answers from exactly the nodes it is given, by reading their chunks' KV from the store.

    Nodes of another retriever are looked for in the store by their text (`PDLLM.on_unmatched` says what becomes of what
    is not there). The response's metadata holds each node's, and the answer's `citations`, `stats`, `usage` and `kv`;
    a streamed response has them at its end. Without nodes the answer is that the documents hold none.

    `RetrieverQueryEngine.from_args` wants an LLM even when a synthesizer is given: pass it the same `PDLLM`, or use
    `RetrieverQueryEngine(retriever, response_synthesizer=...)`. Left out: prompt templates and output classes.

    Args:
        llm: answers; or give `store`, `model` and other fields of `PDLLM` instead.
        streaming: give responses whose text is written as they are read.
    """

    def __init__(
        self,
        llm: PDLLM | None = None,
        *,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        **fields: Any,
    ) -> None:
        self._answering = answering(type(self).__name__, llm, fields)
        super().__init__(llm=self._answering, streaming=streaming, callback_manager=callback_manager)

    def close(self) -> None:
        """See `Closing`; it is the LLM that is closed."""
        self._answering.close()

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from these nodes.

        Raises:
            ValueError: an unknown option or a bad value; RequestError, StoreError.
        """
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            request = asked(self._answering, bundle, {"chunks": nodes, **response_kwargs})
            response = respond(request, [*nodes, *(additional_source_nodes or ())], streaming=self._streaming)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, in a thread; cancelling stops the decoding."""
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            request = await asyncio.to_thread(asked, self._answering, bundle, {"chunks": nodes, **response_kwargs})
            response = await arespond(request, [*nodes, *(additional_source_nodes or ())], streaming=self._streaming)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Answer from texts that are encoded now and not stored; `synthesize` does not come here."""
        request = asked(self._answering, QueryBundle(query_str), {"context": list(text_chunks), **response_kwargs})
        return request.engine.answer(request.turns, **request.arguments).text

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """As `get_response`, in a thread."""
        given = {"context": list(text_chunks), **response_kwargs}
        request = await asyncio.to_thread(asked, self._answering, QueryBundle(query_str), given)
        return (await request.engine.aanswer(request.turns, **request.arguments)).text

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(f"PDLLMSynthesizer has no prompt templates; got {sorted(prompts)}")


def answering(name: str, llm: PDLLM | None, fields: dict[str, Any]) -> PDLLM:
    """The LLM given, or one of these fields.

    Raises:
        ValueError: both were given, or another kind of LLM.
    """
    if llm is not None and fields:
        raise ValueError(f"{name} got an llm and {sorted(fields)}; expected one or the other")
    if llm is not None and not isinstance(llm, PDLLM):
        raise ValueError(f"{name} got an llm of type {type(llm).__name__}; expected a PDLLM")
    return llm or PDLLM(**fields)
