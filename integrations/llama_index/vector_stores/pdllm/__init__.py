"""The chunk-KV store of pdllm-rag as a LlamaIndex vector store."""

from llama_index.vector_stores.pdllm.base import PDLLMVectorStore

__all__ = ["PDLLMVectorStore"]
