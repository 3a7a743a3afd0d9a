"""What LangChain's two kinds of models share, and documents between LangChain and the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams

from pdllm_rag.components.answering import AnswerComponent, document_part
from pdllm_rag.components.searching import Hit

if TYPE_CHECKING:
    from pdllm_rag.resolving import Part


class AnsweringModel(AnswerComponent):
    """Goes before LangChain's own base class."""

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
