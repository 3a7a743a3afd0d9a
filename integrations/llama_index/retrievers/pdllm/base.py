"""The retriever: the store's best chunks for a question, as nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

from pdllm_rag.components.fields import Closing
from pdllm_rag.components.searching import SearchComponent

if TYPE_CHECKING:
    from pdllm_store import ChunkStore


class PDLLMRetriever(Closing, BaseRetriever):
    """Returns the chunks that the model expects to help most, best first.

    A node's id is its chunk's id. Its metadata holds the stored document's own; source, unless that has one; doc_id,
    chunk_id, ordinal, start_index, score, margin and page where known; no key of it is shown to an LLM or an embedding
    model.

    Args:
        store: folder of a store, or a `ChunkStore`.
        model: "demo" or a checkpoint's folder.
        device: where the model computes; "auto" is the first GPU where torch sees one, else the CPU.
        similarity_top_k: most chunks to return.
        options: further fields of `pdllm_rag.components.searching.SearchComponent`: candidates, first_stage, filter,
            score_window.
    """

    def __init__(
        self,
        *,
        store: str | PathLike[str] | ChunkStore,
        model: str = "demo",
        device: str = "auto",
        similarity_top_k: int = 4,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        self._search = SearchComponent(store=store, model=model, device=device, k=similarity_top_k, **options)
        super().__init__(callback_manager=callback_manager)

    @property
    def similarity_top_k(self) -> int:
        """Most chunks to return."""
        return self._search.k

    def close(self) -> None:
        """See `Closing`."""
        self._search.close()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=chunk_node(hit.chunk_id, hit.text, hit.char_end, hit.metadata), score=hit.score)
            for hit in self._search.search(query_bundle.query_str, {})
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def chunk_node(chunk_id: str, text: str, char_end: int, metadata: Mapping[str, Any]) -> TextNode:
    """A chunk as a node. `metadata` holds doc_id and start_index; ref_doc_id, if any, is the source's id."""
    keys = list(metadata)
    source = metadata.get("ref_doc_id", metadata["doc_id"])
    return TextNode(
        id_=chunk_id,
        text=text,
        metadata=dict(metadata),
        excluded_llm_metadata_keys=keys,
        excluded_embed_metadata_keys=keys,
        start_char_idx=metadata["start_index"],
        end_char_idx=char_end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)},
    )
