"""The retriever: the store's best chunks for a question, as documents."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from langchain_pdllm._answering import as_document
from pdllm_rag.components.searching import SearchComponent


class PDLLMRetriever(SearchComponent, BaseRetriever):
    """Returns the chunks that the model expects to help most, best first; no answer is written.

    `invoke(question, k=2)` and every other field from `k` to `score_window` work per call and win there. A document's
    id is its chunk's id, so that `as_message` can refer to it. Its metadata holds the stored document's own; source,
    unless that has one; doc_id, chunk_id, ordinal, start_index; score (mean log-likelihood, None when there was nothing
    to choose from) and margin (how far the best candidate stands out, if scored); and page where known.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's base would ignore a mistyped option

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
        **options: Any,
    ) -> list[Document]:
        return [as_document(hit) for hit in self.search(query, options)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return await asyncio.to_thread(
            self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **options
        )
