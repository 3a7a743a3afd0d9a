"""The retriever, and a response synthesizer that reads the retrieved nodes' chunks from the store."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from langchain_pdllm._component import SearchComponent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    QueryType,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.llms.pdllm.base import PDLLM
from llama_index_instrumentation import get_dispatcher

if TYPE_CHECKING:
    from pdllm_store import ChunkStore

    from pdllm_rag.answer import Answer

dispatcher = get_dispatcher(__name__)

_CHUNK_ID = re.compile(r"[0-9a-f]{32}")


class PDLLMRetriever(BaseRetriever):
    """Returns the chunks that the model expects to help most, best first.

    A node's id is its chunk's id. Its metadata holds the stored document's own, and doc_id, ordinal, start_index,
    score, source, and page where known; no key of it is shown to an LLM or an embedding model.

    Args:
        store: folder of a store, or a `ChunkStore`.
        model: "demo" or a checkpoint's folder.
        similarity_top_k: most chunks to return.
        candidates: chunks that are scored; None takes the engine's default.
        first_stage: what proposes them: a name, or one's own (`pdllm_rag.foreign`); None takes the engine's default.
        filter: metadata that documents must have.
    """

    def __init__(
        self,
        *,
        store: str | PathLike[str] | ChunkStore,
        model: str = "demo",
        device: str = "auto",
        similarity_top_k: int = 4,
        candidates: int | None = None,
        first_stage: Any = None,
        filter: dict[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._search = SearchComponent(
            store=store,
            model=model,
            device=device,
            k=similarity_top_k,
            candidates=candidates,
            first_stage=first_stage,
            filter=filter,
        )
        super().__init__(callback_manager=callback_manager)

    @property
    def similarity_top_k(self) -> int:
        """Most chunks to return."""
        return self._search.k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = []
        for hit in self._search.search(query_bundle.query_str, {}):
            keys = list(hit.metadata)
            node = TextNode(
                id_=hit.chunk_id,
                text=hit.text,
                metadata=hit.metadata,
                excluded_llm_metadata_keys=keys,
                excluded_embed_metadata_keys=keys,
                start_char_idx=hit.metadata["start_index"],
                end_char_idx=hit.char_end,
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=hit.metadata["doc_id"])},
            )
            nodes.append(NodeWithScore(node=node, score=hit.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class PDLLMSynthesizer(BaseSynthesizer):
    """Answers from exactly the nodes it is given, by reading their chunks' KV from the store.

    The response's metadata holds each node's, and the answer's `citations` and `stats`. Without nodes the answer is
    that the documents hold none. `RetrieverQueryEngine.from_args` wants an LLM even when a synthesizer is given: pass
    it the same `PDLLM`, or use `RetrieverQueryEngine(retriever, response_synthesizer=...)`.

    Left out: streamed responses, prompt templates and output classes.

    Args:
        llm: answers; or give `store`, `model` and other fields of `PDLLM` instead.
    """

    def __init__(
        self,
        llm: PDLLM | None = None,
        *,
        callback_manager: CallbackManager | None = None,
        **fields: Any,
    ) -> None:
        if llm is not None and fields:
            raise ValueError(f"PDLLMSynthesizer got an llm and {sorted(fields)}; expected one or the other")
        if llm is not None and not isinstance(llm, PDLLM):
            raise ValueError(f"PDLLMSynthesizer got an llm of type {type(llm).__name__}; expected a PDLLM")
        self._answering = llm or PDLLM(**fields)
        super().__init__(llm=self._answering, callback_manager=callback_manager)

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> Response:
        """Answer from these nodes.

        Raises:
            ValueError: a node that is no chunk, or an unknown option; RequestError, StoreError.
        """
        bundle = QueryBundle(query) if isinstance(query, str) else query
        arguments = self._answering.ask_options({"chunk_ids": _chunk_ids(nodes), **response_kwargs})
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            answer = self._answering.opened().answer(bundle.query_str, **arguments)
            response = _response(answer, [*nodes, *(additional_source_nodes or ())])
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
    ) -> Response:
        """As `synthesize`, in a thread; cancelling stops the decoding."""
        bundle = QueryBundle(query) if isinstance(query, str) else query
        arguments = self._answering.ask_options({"chunk_ids": _chunk_ids(nodes), **response_kwargs})
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            engine = await asyncio.to_thread(self._answering.opened)
            answer = await engine.aanswer(bundle.query_str, **arguments)
            response = _response(answer, [*nodes, *(additional_source_nodes or ())])
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Answer from texts that are encoded now and not stored; `synthesize` does not come here."""
        arguments = self._answering.ask_options(response_kwargs)
        return self._answering.opened().answer(query_str, context=list(text_chunks), **arguments).text

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """As `get_response`, in a thread."""
        arguments = self._answering.ask_options(response_kwargs)
        engine = await asyncio.to_thread(self._answering.opened)
        return (await engine.aanswer(query_str, context=list(text_chunks), **arguments)).text

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(f"PDLLMSynthesizer has no prompt templates; got {sorted(prompts)}")


def _chunk_ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    for scored in nodes:
        if not _CHUNK_ID.fullmatch(scored.node.node_id):
            raise ValueError(
                f"node {scored.node.node_id!r} is no stored chunk; expected nodes that PDLLMRetriever gave, with "
                "their ids unchanged"
            )
    return [scored.node.node_id for scored in nodes]


def _response(answer: Answer, nodes: list[NodeWithScore]) -> Response:
    found = answer.as_dict()
    by_node = {scored.node.node_id: scored.node.metadata for scored in nodes}
    metadata = {**by_node, "citations": found["citations"], "stats": found["stats"]}
    return Response(answer.text, source_nodes=nodes, metadata=metadata)
