"""The `pdllm` command."""

from pdllm_rag.cli.main import main

__all__ = ["main"]
