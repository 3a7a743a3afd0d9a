"""Models loaded in this process, so that components that name the same one share its weights."""

from __future__ import annotations

import os
import threading
import weakref

import torch

from pdllm_rag.models.loader import LoadedModel, load_model, locate, one_device
from pdllm_rag.models.precision import fastest_dtype

_lock = threading.Lock()
Key = tuple[str, str, torch.dtype, str, str]
_loaded: weakref.WeakValueDictionary[Key, LoadedModel] = weakref.WeakValueDictionary()


def shared_model(
    name: str, device: str, dtype: torch.dtype | None, adapter: str | None, canvas_adapter: str | None
) -> LoadedModel:
    """The model of that name with these adapters, loaded once per process while anybody holds it."""
    target = one_device(device, None)
    folders = ["" if one is None else os.path.realpath(locate(one)) for one in (name, adapter, canvas_adapter)]
    key = (folders[0], str(target), dtype or fastest_dtype(target), folders[1], folders[2])
    with _lock:
        model = _loaded.get(key)
        if model is None:
            model = _loaded[key] = load_model(
                name, device=str(target), dtype=dtype, adapter=adapter, canvas_adapter=canvas_adapter
            )
        return model
