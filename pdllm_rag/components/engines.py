"""Engines opened in this process, so that components that name the same store and model share one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdllm_store import ChunkStore

    from pdllm_rag.engine import RagEngine

EngineKey = tuple[str | int, str, str]

_lock = threading.Lock()
_opened: weakref.WeakValueDictionary[EngineKey, RagEngine] = weakref.WeakValueDictionary()


def engine_key(store: str | ChunkStore, model: str, device: str) -> EngineKey:
    """What tells engines apart: the store's real location or its object, the model's, and the device."""
    from pdllm_store import real_location

    from pdllm_rag.models.hub import BUNDLED

    place = real_location(store) if isinstance(store, str) else id(store)
    return place, model if model in BUNDLED else os.path.realpath(os.path.expanduser(model)), device


def shared_engine(store: str | ChunkStore, model: str, device: str, *, create: bool = False) -> RagEngine:
    """The engine over that store and model, opened once per process while any component holds it.

    Args:
        store: folder or URL of a store, or a store.
        create: make the store if there is none.

    Raises:
        StoreError, ModelError.
    """
    from pdllm_rag.engine import RagEngine

    key = engine_key(store, model, device)
    with _lock:
        engine = _opened.get(key)
        if engine is None:
            engine = RagEngine.open(store, model, create=create, device=device)
            if isinstance(store, str):
                weakref.finalize(engine, engine.store.close)
            _opened[key] = engine
        return engine


def store_generation(store: str | ChunkStore) -> int | None:
    """The store's generation, read without loading a model; None if there is no store."""
    if not isinstance(store, str):
        return store.generation
    from pdllm_store import StoreNotFoundError, open_store

    try:
        opened = open_store(store, create=False)
    except StoreNotFoundError:
        return None
    try:
        return opened.generation
    finally:
        opened.close()
