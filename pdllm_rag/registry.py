"""Models loaded in this process, so that components that name the same one share its weights."""

from __future__ import annotations

import os
import threading
import weakref

import torch

from pdllm_rag.models.loader import LoadedModel, load_model, locate, one_device
from pdllm_rag.models.precision import fastest_dtype

_lock = threading.Lock()
_loaded: weakref.WeakValueDictionary[tuple[str, str, torch.dtype], LoadedModel] = weakref.WeakValueDictionary()


def shared_model(name: str, device: str, dtype: torch.dtype | None) -> LoadedModel:
    """The model of that name, loaded once per process while anybody holds it."""
    target = one_device(device, None)
    key = (os.path.realpath(locate(name)), str(target), dtype or fastest_dtype(target))
    with _lock:
        model = _loaded.get(key)
        if model is None:
            model = _loaded[key] = load_model(name, device=str(target), dtype=dtype)
        return model
