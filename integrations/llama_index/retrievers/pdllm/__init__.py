"""LlamaIndex retriever, response synthesizer, query engine and transformation of pdllm-rag."""

from llama_index.retrievers.pdllm.base import PDLLMRetriever
from llama_index.retrievers.pdllm.ingestion import PrefillChunks
from llama_index.retrievers.pdllm.query_engine import PDLLMQueryEngine
from llama_index.retrievers.pdllm.synthesizer import PDLLMSynthesizer

__all__ = ["PDLLMQueryEngine", "PDLLMRetriever", "PDLLMSynthesizer", "PrefillChunks"]
