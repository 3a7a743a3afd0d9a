"""The QA endpoint: HTTP routes and a web page over one engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdllm_rag.server.app import create_app
    from pdllm_rag.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

_HOMES = {"ServerSettings": "settings", "create_app": "app"}


def __getattr__(name: str) -> object:
    """Import a public name at first use, so that the process that reads files loads no web framework."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pdllm_rag.server' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"pdllm_rag.server.{_HOMES[name]}"), name)
