"""LlamaIndex retriever and response synthesizer of pdllm-rag."""

from llama_index.retrievers.pdllm.base import PDLLMRetriever, PDLLMSynthesizer

__all__ = ["PDLLMRetriever", "PDLLMSynthesizer"]
