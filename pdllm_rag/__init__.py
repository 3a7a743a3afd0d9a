"""Retrieval-augmented generation with masked-diffusion language models over a persistent chunk-KV store."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer, AnswerStats, Citation
    from pdllm_rag.config import AskOptions
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.events import CanvasUpdate, Final, StreamEvent, TextDelta
    from pdllm_rag.models.loader import LoadedModel, load_model
    from pdllm_rag.prefill import InputDocument, PrefillReport
    from pdllm_rag.reading import Retrieved
    from pdllm_rag.scoring import ScoringOptions

__all__ = [
    "Answer",
    "AnswerStats",
    "AskOptions",
    "CanvasUpdate",
    "Citation",
    "Final",
    "InputDocument",
    "LoadedModel",
    "PrefillReport",
    "RagEngine",
    "Retrieved",
    "ScoringOptions",
    "StreamEvent",
    "TextDelta",
    "load_model",
]

_HOMES = {
    "Answer": "answer",
    "AnswerStats": "answer",
    "AskOptions": "config",
    "CanvasUpdate": "events",
    "Citation": "answer",
    "Final": "events",
    "InputDocument": "prefill",
    "LoadedModel": "models.loader",
    "PrefillReport": "prefill",
    "RagEngine": "engine",
    "Retrieved": "reading",
    "ScoringOptions": "scoring",
    "StreamEvent": "events",
    "TextDelta": "events",
    "load_model": "models.loader",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use, so that `pdllm --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pdllm_rag' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"pdllm_rag.{_HOMES[name]}"), name)
