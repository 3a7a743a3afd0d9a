"""LangChain components of pdllm-rag: models that answer from a chunk-KV store, its retriever, and its index."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_pdllm.chat_models import ChatPDLLM
    from langchain_pdllm.indexes import PDLLMDocumentIndex, PDLLMRecordManager
    from langchain_pdllm.llms import PDLLM
    from langchain_pdllm.messages import as_message
    from langchain_pdllm.retrievers import PDLLMRetriever
    from langchain_pdllm.text_splitters import PDLLMTextSplitter

__all__ = [
    "PDLLM",
    "ChatPDLLM",
    "PDLLMDocumentIndex",
    "PDLLMRecordManager",
    "PDLLMRetriever",
    "PDLLMTextSplitter",
    "as_message",
]

_HOMES = {
    "PDLLM": "llms",
    "ChatPDLLM": "chat_models",
    "PDLLMDocumentIndex": "indexes",
    "PDLLMRecordManager": "indexes",
    "PDLLMRetriever": "retrievers",
    "PDLLMTextSplitter": "text_splitters",
    "as_message": "messages",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'langchain_pdllm' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"langchain_pdllm.{_HOMES[name]}"), name)
