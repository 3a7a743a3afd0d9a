"""Nodes into the store: a transformation for ingestion pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, MetadataMode, TextNode, TransformComponent
from llama_index.retrievers.pdllm.base import chunk_node
from pydantic import ConfigDict, PrivateAttr

from pdllm_rag.components.fields import StoreComponent
from pdllm_rag.components.searching import chunk_metadata
from pdllm_rag.components.storing import store_documents

if TYPE_CHECKING:
    from pdllm_rag.engine import RagEngine


class PrefillChunks(StoreComponent, TransformComponent):
    """Reads documents, or a splitter's nodes, into the store and returns their chunks as nodes.

    Unchanged ones cost nothing; the store is made if there is none. A chunk's node has the chunk's id, as those of
    `PDLLMRetriever` have, so that a vector store behind it gives nodes that `PDLLMSynthesizer` reads from the store. A
    node longer than a chunk becomes several. What does not go in (no text, metadata that is no JSON) is left out, and a
    warning says why.

    Give it whole documents where you can: one that changes then replaces its former self. A splitter gives its nodes
    new ids each time (unless its `id_func` does not), so that former ones go only through `PDLLMVectorStore`, as
    `vector_store` of a pipeline with a docstore.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    _creates: bool = PrivateAttr(default=True)

    @classmethod
    def class_name(cls) -> str:
        """Name for serialisation."""
        return "PrefillChunks"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Fields, and the store's generation: a pipeline's cache may skip only what the store still holds."""
        return {**super().to_dict(**kwargs), "generation": self.identity()["generation"]}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> PrefillChunks:
        """Of what `to_dict` gave."""
        return super().from_dict({key: value for key, value in data.items() if key != "generation"}, **kwargs)

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> list[TextNode]:
        """Store nodes; their chunks in order."""
        return store_nodes(self.opened(), nodes)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[TextNode]:
        """As a call, in a thread."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)


def store_nodes(engine: RagEngine, nodes: Sequence[BaseNode]) -> list[TextNode]:
    """Store nodes as documents: under their own id, behind that of their source if they have one.

    Raises:
        StoreError: the store itself failed.
    """
    documents = []
    for node in nodes:
        metadata, doc_id = dict(node.metadata), node.node_id
        if node.ref_doc_id is not None:
            doc_id = f"{node.ref_doc_id}#{node.node_id}"
            metadata["ref_doc_id"] = node.ref_doc_id
        documents.append((doc_id, node.get_content(metadata_mode=MetadataMode.NONE), metadata))
    failed = store_documents(engine, documents)
    chunks = []
    for doc_id in dict.fromkeys(doc_id for doc_id, _, _ in documents):
        if doc_id not in failed:
            document = engine.store.document(engine.fingerprint, doc_id)
            for ref in document.chunks:
                text = document.text[ref.char_start : ref.char_end]
                chunks.append(chunk_node(ref.chunk_id.hex(), text, ref.char_end, chunk_metadata(document, ref)))
    return chunks
