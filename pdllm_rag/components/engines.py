"""Engines opened in this process, so that components that name the same store and model share one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdllm_store import ChunkStore

    from pdllm_rag.engine import RagEngine

EngineKey = tuple[str | int, str, str, str | None, str | None]

_lock = threading.Lock()
_opened: weakref.WeakValueDictionary[EngineKey, RagEngine] = weakref.WeakValueDictionary()


def engine_key(
    store: str | ChunkStore, model: str, device: str, adapter: str | None = None, canvas_adapter: str | None = None
) -> EngineKey:
    """What tells engines apart: the store's real location or its object, the model's and adapters', and the device."""
    from pdllm_store import real_location

    from pdllm_rag.models.hub import BUNDLED

    place = real_location(store) if isinstance(store, str) else id(store)
    name = model if model in BUNDLED else _real(model)
    return place, name, device, adapter and _real(adapter), canvas_adapter and _real(canvas_adapter)


def shared_engine(
    store: str | ChunkStore,
    model: str,
    device: str,
    adapter: str | None = None,
    canvas_adapter: str | None = None,
    *,
    create: bool = False,
) -> RagEngine:
    """The engine over that store and model, opened once per process while any component holds it.

    Args:
        store: folder or URL of a store, or a store.
        adapter, canvas_adapter: of the model, see `load_model`.
        create: make the store if there is none.

    Raises:
        StoreError, ModelError.
    """
    from pdllm_rag.engine import RagEngine

    key = engine_key(store, model, device, adapter, canvas_adapter)
    with _lock:
        engine = _opened.get(key)
        if engine is None:
            engine = RagEngine.open(
                store, model, create=create, device=device, adapter=adapter, canvas_adapter=canvas_adapter
            )
            if isinstance(store, str):
                weakref.finalize(engine, engine.store.close)
            _opened[key] = engine
        return engine


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


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
