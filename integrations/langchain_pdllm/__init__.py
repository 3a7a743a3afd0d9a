"""LangChain components of pdllm-rag: a chat model that answers from a chunk-KV store, and its retriever."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_pdllm.chat_models import ChatPDLLM
    from langchain_pdllm.messages import as_message
    from langchain_pdllm.retrievers import PDLLMRetriever

__all__ = ["ChatPDLLM", "PDLLMRetriever", "as_message"]

_HOMES = {"ChatPDLLM": "chat_models", "PDLLMRetriever": "retrievers", "as_message": "messages"}


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'langchain_pdllm' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"langchain_pdllm.{_HOMES[name]}"), name)
