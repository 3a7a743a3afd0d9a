"""LlamaIndex LLM of pdllm-rag."""

from llama_index.llms.pdllm.base import PDLLM

__all__ = ["PDLLM"]
