"""A text splitter that cuts where the store cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document


class PDLLMTextSplitter(BaseDocumentTransformer):
    """Cuts texts into the chunks that a prefill of the whole text stores, joined again the text itself.

    It needs the model's tokenizer and no weights. Prefilling whole documents is better than prefilling the pieces: then
    a citation points into the document.

    Args:
        model: "demo" or a checkpoint's folder.
        chunk_len: tokens of a chunk, BOS included; None takes the family's.

    Raises:
        ModelError; ValueError: a bad `chunk_len`, at the first text.
    """

    def __init__(self, model: str = "demo", *, chunk_len: int | None = None) -> None:
        from pdllm_rag.models.loader import read_spec

        spec, self._tokenizer, _ = read_spec(model)
        self._chunk_len = spec.family.chunk_len if chunk_len is None else chunk_len

    def split_text(self, text: str) -> list[str]:
        """The chunks of a text; none if there is nothing to see in it."""
        return [piece for piece, _ in self._pieces(text)]

    def create_documents(
        self, texts: Sequence[str], metadatas: Sequence[dict[str, Any]] | None = None
    ) -> list[Document]:
        """The chunks of texts, each with its text's metadata and its start there as "start_index"."""
        return [
            Document(page_content=piece, metadata={**metadata, "start_index": start})
            for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True)
            for piece, start in self._pieces(text)
        ]

    def split_documents(self, documents: Iterable[Document]) -> list[Document]:
        """The chunks of documents, as `create_documents` gives them."""
        documents = list(documents)
        return self.create_documents([doc.page_content for doc in documents], [doc.metadata for doc in documents])

    def transform_documents(self, documents: Sequence[Document], **_: Any) -> list[Document]:
        """As `split_documents`."""
        return self.split_documents(documents)

    def _pieces(self, text: str) -> list[tuple[str, int]]:
        from pdllm_rag.chunking import split

        spans = split(text, self._tokenizer.encode_with_offsets, chunk_len=self._chunk_len).spans
        return [(text[span.char_start : span.char_end], span.char_start) for span in spans]
