"""One door to every kind of store: a folder, or a URL, with or without a local cache in front."""

from __future__ import annotations

import os
import re
from typing import Any

from pdllm_store.errors import StoreFormatError
from pdllm_store.following import read_followed
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.object_store import ObjectChunkStore
from pdllm_store.tiered_store import TieredChunkStore
from pdllm_store.types import KVDtype

_FOLDER_ONLY = ("max_bytes", "key", "map_size", "force")


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a store's location is a URL rather than a folder."""
    return isinstance(location, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None


def real_location(location: str) -> str:
    """The same text for the same store: a URL as it is, or a folder's real path."""
    return location.rstrip("/") if is_url(location) else os.path.realpath(location)


def open_store(
    location: str | os.PathLike[str],
    *,
    kv_dtype: KVDtype | None = None,
    create: bool = True,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    **options: Any,
) -> LMDBStore | ObjectChunkStore:
    """Open the store in a folder or under a URL, or make one there.

    Args:
        location: a folder (`LMDBStore.open`), or a URL (`ObjectChunkStore.open`).
        cache, cache_bytes: of a URL: a local folder that keeps what was read and written, and its cap in bytes
            (`TieredChunkStore.open`).
        options: of the store's own `open`.

    Raises:
        StoreError: as that `open`, and StoreFormatError for the folder of a cache that is not to be read only.
        ValueError: an option that this kind of store does not have.
    """
    if not is_url(location):
        if cache is not None or cache_bytes is not None:
            raise ValueError(f"a cache stands in front of a store given by URL, and {location} is a folder")
        opened = LMDBStore.open(location, kv_dtype=kv_dtype, create=create, **options)
        with opened._transactions.read() as tables:
            store_id = read_followed(tables).store_id
        if store_id and not opened.read_only:
            opened.close()
            raise StoreFormatError(
                f"{location} is the cache of a store given by URL; open that one with this cache, or this read-only"
            )
        return opened
    url = str(location)
    for name in _FOLDER_ONLY:
        if options.pop(name, None):
            raise ValueError(f"{name} is of stores in a folder, and {url} is a URL (cache_bytes caps its cache)")
    if cache is not None:
        return TieredChunkStore.open(
            url, cache=cache, cache_bytes=cache_bytes, kv_dtype=kv_dtype, create=create, **options
        )
    if cache_bytes is not None:
        raise ValueError(f"cache_bytes is {cache_bytes} without a cache; give its folder as well")
    return ObjectChunkStore.open(url, kv_dtype=kv_dtype, create=create, **options)
