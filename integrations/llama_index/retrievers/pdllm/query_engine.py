"""The query engine of one call: retrieval and answer together, as `pdllm ask` gives them."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.schema import QueryBundle
from llama_index.llms.pdllm.base import PDLLM
from llama_index.retrievers.pdllm.responses import arespond, asked, respond
from llama_index.retrievers.pdllm.synthesizer import answering

from pdllm_rag.components.fields import Closing


class PDLLMQueryEngine(Closing, BaseQueryEngine):
    """Retrieves and answers in one go; the source nodes are the chunks that the answer cites.

    Args:
        llm: answers; or give `store`, `model` and other fields of `PDLLM` instead.
        streaming: give responses whose text is written as they are read; their source nodes are there at the end.
    """

    def __init__(
        self,
        llm: PDLLM | None = None,
        *,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        **fields: Any,
    ) -> None:
        self._llm = answering(type(self).__name__, llm, fields)
        self._streaming = streaming
        super().__init__(callback_manager=callback_manager or self._llm.callback_manager)

    def close(self) -> None:
        """See `Closing`; it is the LLM that is closed."""
        self._llm.close()

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            response = respond(asked(self._llm, query_bundle, {}), None, streaming=self._streaming)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            request = await asyncio.to_thread(asked, self._llm, query_bundle, {})
            response = await arespond(request, None, streaming=self._streaming)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response
