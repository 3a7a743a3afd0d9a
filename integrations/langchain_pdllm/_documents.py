"""Between LangChain's documents and the engine's chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from pdllm_rag.components.answering import document_part
from pdllm_rag.components.searching import Hit

if TYPE_CHECKING:
    from pdllm_rag.resolving import Part


def as_document(hit: Hit) -> Document:
    """A retrieved chunk."""
    return Document(id=hit.chunk_id, page_content=hit.text, metadata=hit.metadata)


def as_part(chunk: Any) -> Part | None:
    """A document that is to be read; None for anything else."""
    return document_part(chunk.id, chunk.page_content, chunk.metadata) if isinstance(chunk, Document) else None
