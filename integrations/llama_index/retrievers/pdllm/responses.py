"""From a request to LlamaIndex's response, whole or streamed, with its source nodes and metadata."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.pdllm.base import PDLLM, raw
from llama_index.retrievers.pdllm.base import chunk_node
from pdllm_store import DocumentNotFoundError

from pdllm_rag.components.answering import Request
from pdllm_rag.components.searching import chunk_metadata

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer


def asked(llm: PDLLM, query: QueryBundle, given: Mapping[str, Any]) -> Request:
    """The request of a query. Raises what `PDLLM.complete` raises for it."""
    return llm.request([{"role": "user", "content": query.query_str}], None, {"recognise": False, **given})


def respond(request: Request, nodes: list[NodeWithScore] | None, *, streaming: bool) -> Response | StreamingResponse:
    """Answer a request.

    Args:
        nodes: the response's source nodes; None makes them of the chunks that are cited.
    """
    response = _empty(nodes)
    if streaming:
        return StreamingResponse(_texts(request, response), response.source_nodes, response.metadata)
    for text in _texts(request, response):
        response.response = (response.response or "") + text
    return response


async def arespond(
    request: Request, nodes: list[NodeWithScore] | None, *, streaming: bool
) -> Response | AsyncStreamingResponse:
    """As `respond`, in a thread; cancelling, or leaving the stream, stops the decoding."""
    response = _empty(nodes)
    if streaming:
        return AsyncStreamingResponse(_atexts(request, response), response.source_nodes, response.metadata)
    async with aclosing(_atexts(request, response)) as texts:
        async for text in texts:
            response.response = (response.response or "") + text
    return response


def _empty(nodes: list[NodeWithScore] | None) -> Response:
    metadata = {scored.node.node_id: scored.node.metadata for scored in nodes or ()}
    return Response("", source_nodes=[] if nodes is None else nodes, metadata=metadata)


def _texts(request: Request, response: Response) -> Generator[str, None, None]:
    from pdllm_rag.events import Final, TextDelta

    for event in request.engine.stream(request.turns, **request.arguments):
        if isinstance(event, TextDelta):
            yield event.text
        elif isinstance(event, Final):
            _complete(response, event.answer, request)


async def _atexts(request: Request, response: Response) -> AsyncGenerator[str, None]:
    from pdllm_rag.events import Final, TextDelta

    async with aclosing(request.engine.astream(request.turns, **request.arguments)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                yield event.text
            elif isinstance(event, Final):
                _complete(response, event.answer, request)


def _complete(response: Response, answer: Answer, request: Request) -> None:
    """Fill in what is known at the end: metadata, and source nodes where none were given."""
    assert response.metadata is not None
    if not response.source_nodes:
        response.source_nodes += _cited(answer, request)
        response.metadata |= {scored.node.node_id: scored.node.metadata for scored in response.source_nodes}
    data = raw(answer, request)
    response.metadata |= {key: data[key] for key in ("citations", "stats", "usage", "kv")}


def _cited(answer: Answer, request: Request) -> list[NodeWithScore]:
    """The stored chunks that an answer cites; one whose document is gone meanwhile is left out."""
    engine = request.engine
    nodes = []
    for citation in answer.citations:
        try:
            document = engine.store.document(engine.fingerprint, citation.doc_id)
            ref = document.chunks[citation.ordinal]
        except (DocumentNotFoundError, IndexError):
            continue
        metadata = chunk_metadata(document, ref, score=citation.score)
        text = document.text[ref.char_start : ref.char_end]
        nodes.append(
            NodeWithScore(node=chunk_node(ref.chunk_id.hex(), text, ref.char_end, metadata), score=citation.score)
        )
    return nodes
