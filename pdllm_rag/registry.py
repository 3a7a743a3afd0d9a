"""Models loaded in this process, so that components that name the same one share its weights."""

from __future__ import annotations

import os
import threading
import weakref

import torch

from pdllm_rag.models.loader import BUNDLED, LoadedModel, load_model

_lock = threading.Lock()
_loaded: weakref.WeakValueDictionary[tuple[str, str, torch.dtype | None], LoadedModel] = weakref.WeakValueDictionary()


def shared_model(name: str, device: str, dtype: torch.dtype | None) -> LoadedModel:
    """The model of that name, loaded once per process while anybody holds it."""
    key = (name if name in BUNDLED else os.path.realpath(name), device, dtype)
    with _lock:
        model = _loaded.get(key)
        if model is None:
            model = _loaded[key] = load_model(name, device=device, dtype=dtype)
        return model
