"""The vector store: it keeps KV instead of vectors, and is searched by the question's text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.retrievers.pdllm.base import chunk_node
from llama_index.retrievers.pdllm.ingestion import store_nodes
from pydantic import ConfigDict, PrivateAttr

from pdllm_rag.components.searching import SearchComponent
from pdllm_rag.components.storing import own_documents


class PDLLMVectorStore(SearchComponent, BasePydanticVectorStore):
    """A chunk-KV store where LlamaIndex expects a vector store.

    As `vector_store` of an `IngestionPipeline` whose transformations hold `PrefillChunks`, it deletes what the
    pipeline's upserts and deletes leave over. Embeddings are ignored; filters may ask for equality only, and only for
    all of several.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    stores_text: bool = True
    is_embedding_query: bool = False

    _creates: bool = PrivateAttr(default=True)

    @classmethod
    def class_name(cls) -> str:
        """Name for serialisation."""
        return "PDLLMVectorStore"

    @property
    def client(self) -> Any:
        """The engine."""
        return self.opened()

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Store nodes (see `PrefillChunks`); the ids of their chunks."""
        return [node.node_id for node in store_nodes(self.opened(), nodes)]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Delete a document, or all nodes of a source, with their chunks and KV."""
        engine = self.opened()
        parts = [info.doc_id for info in own_documents(engine) if info.metadata.get("ref_doc_id") == ref_doc_id]
        engine.delete_all([ref_doc_id, *parts])

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        """The best chunks for `query.query_str`. Its filters are for what the store's own `filter` admits.

        Filters that want two values of one key find nothing.

        Raises:
            ValueError: the query has no text, a filter that is no equality, ids or another mode than the default.
        """
        if not query.query_str:
            raise ValueError("PDLLMVectorStore got a query without text; it is not searched by embeddings")
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise ValueError(f"PDLLMVectorStore got a query of mode {query.mode!r}; expected the default")
        for name, ids in (("doc_ids", query.doc_ids), ("node_ids", query.node_ids)):
            if ids:
                raise ValueError(f"PDLLMVectorStore got a query with {name}; expected filters on metadata instead")
        equal = [*(self.filter or {}).items(), *_equalities(query.filters)]
        wanted = dict(equal)
        is_possible = all(wanted[key] == value for key, value in equal)
        given = {"k": query.similarity_top_k, "filter": wanted or None}
        hits = self.search(query.query_str, given) if is_possible else []
        nodes = [chunk_node(hit.chunk_id, hit.text, hit.char_end, hit.metadata) for hit in hits]
        scores = [hit.score for hit in hits if hit.score is not None]
        similarities = scores if len(scores) == len(hits) else None  # nothing was scored
        return VectorStoreQueryResult(nodes=nodes, similarities=similarities, ids=[node.node_id for node in nodes])

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As `add`, in a thread."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **kwargs: Any) -> None:
        """As `delete`, in a thread."""
        await asyncio.to_thread(self.delete, ref_doc_id, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`, in a thread."""
        return await asyncio.to_thread(self.query, query, **kwargs)


def _equalities(filters: MetadataFilters | None) -> list[tuple[str, Any]]:
    if filters is None:
        return []
    equal = [
        (f.key, f.value) for f in filters.filters if isinstance(f, MetadataFilter) and f.operator == FilterOperator.EQ
    ]
    is_joined = filters.condition == FilterCondition.AND or (
        filters.condition == FilterCondition.OR and len(equal) == 1
    )
    if len(equal) < len(filters.filters) or not is_joined:
        raise ValueError("PDLLMVectorStore got a filter that it cannot apply; expected equalities joined by 'and'")
    return equal
