"""LangChain components of pdllm-rag."""
