"""The chunk store on disk: one folder, one LMDB environment, any number of handles, threads and processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pdllm_store import documents, registry
from pdllm_store.compaction import compact
from pdllm_store.environment import Environment
from pdllm_store.errors import DocumentNotFoundError, StoreMismatchError, StoreReadOnlyError
from pdllm_store.eviction import check_max_bytes
from pdllm_store.keyed import check_key
from pdllm_store.location import DERIVED_FOLDER, check_file_system, may_lock
from pdllm_store.table_store import TableStore
from pdllm_store.tables import Tables
from pdllm_store.types import KV_DTYPES, KVDtype, ModelFingerprint

T = TypeVar("T")


class LMDBStore(TableStore):
    """A `ChunkStore` on disk; make one with `LMDBStore.open`.

    Handles on one folder, by whatever path, share one environment; closing one leaves the others working. A handle
    works in a forked child, and pickles as its path and options. Loaded KV is copied out: nothing that is handed out
    refers to the map. No transaction outlives the call that began it.
    """

    def __init__(self, environment: Environment, options: dict[str, Any]) -> None:
        super().__init__(
            _Handle(environment, read_only=options["read_only"]),
            path=environment.path,
            kv_dtype=environment.manifest.kv_dtype,
            verify_reads=options["verify_reads"],
        )
        self._environment = environment
        self._options = options

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        max_bytes: int | None = None,
        key: bytes | None = None,
        read_only: bool = False,
        verify_reads: bool = True,
        map_size: int | None = None,
        force: bool = False,
    ) -> LMDBStore:
        """Open the store in a folder, or make one there.

        Args:
            kv_dtype: dtype that keys and values are stored in, fixed when the store is made (then None means
                bfloat16); later None takes what is there.
            create: make the store if nothing is there.
            max_bytes: cap of the file, at least 1 MiB; the store remembers it, and None leaves it as it is.
            key: 32 bytes, fixed when the store is made. Every value then carries a MAC under it, so that what another
                hand has written is refused (a plain store trusts whoever can write the folder).
            read_only: refuse to change anything, not even the order of use. Where its lock file cannot be written,
                nobody may write to the store meanwhile.
            verify_reads: compare each record's checksum when it is read.
            map_size: address space in bytes that the file can grow into; None means 1 TiB, or that of a handle that
                is open already. Give less where address space is limited.
            force: read it on a network file system too (with read_only).

        Raises:
            StoreNotFoundError: nothing is there and `create` is False.
            StoreFormatError: something else is there, or a store of another format.
            StoreMismatchError: the store was made with another `kv_dtype` or `key`.
            StoreError: a network file system, no permission, or another map than the store is open with.
            ValueError: an argument is none that exists, or `max_bytes` was given with `read_only`.
        """
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {kv_dtype!r}, expected one of {KV_DTYPES}")
        if map_size is not None and map_size <= 0:
            raise ValueError(f"map_size is {map_size} bytes, expected a positive number")
        check_key(key)
        check_max_bytes(max_bytes)
        if read_only and max_bytes is not None:
            raise ValueError(f"max_bytes is {max_bytes}, and a store that is opened read-only keeps its cap")
        real = os.path.realpath(path)
        locked = check_file_system(real, forced_read_only=force and read_only)
        environment = registry.acquire(
            real,
            create_as=(kv_dtype or "bfloat16") if create and not read_only else None,
            map_size=map_size,
            key=key,
            read_only=read_only,
            locked=locked and not (read_only and not may_lock(real)),
        )
        held = environment.manifest.kv_dtype
        if kv_dtype not in (None, held):
            registry.release(environment)
            raise StoreMismatchError(
                f"{real} was made to hold {held}, {kv_dtype} was asked for; open it as {held}, or prefill into a new "
                "store"
            )
        options = {
            "key": key,
            "read_only": read_only,
            "verify_reads": verify_reads,
            "map_size": map_size,
            "force": force,
        }
        store = cls(environment, options)
        try:
            if max_bytes is not None:
                store.set_max_bytes(max_bytes)
        except BaseException:
            store.close()
            raise
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        if self._options["key"] is not None:
            raise TypeError("a keyed store does not pickle, because its key would be in the pickle; open it there")
        return _reopen, (self._path, self._kv_dtype, self._options)

    @property
    def derived_dir(self) -> str | None:
        if self._options["key"] is not None:
            return None  # files there would carry no MAC
        folder = os.path.join(self._path, DERIVED_FOLDER)
        if not self._options["read_only"]:
            with contextlib.suppress(OSError):
                os.mkdir(folder, mode=0o700)
        return folder if os.path.isdir(folder) else None

    def compact(self) -> int:
        """Drop what no document refers to and rewrite the file without its free pages; returns the bytes given back.

        Raises:
            StoreError: another handle or process has the store open.
            StoreFullError: the disk has no room for the second copy; nothing was changed but orphans dropped.
        """
        self._check_alone("compact")
        return compact(self._environment)

    def purge(self, wanted: Collection[tuple[ModelFingerprint, str]] | None) -> int:
        """Delete documents so that nothing of them is left in the store's files; returns the bytes given back.

        As `delete_document` and `compact` in one step, and the old file is overwritten before it is unlinked, which
        goes for everything that was deleted before as well. What the file system, snapshots and backups keep is beyond
        the store.

        Args:
            wanted: models and ids; None for every document, damaged ones included.

        Raises:
            DocumentNotFoundError, StoreError, StoreFullError: as `compact`; nothing was deleted.
        """
        self._check_alone("purge")

        def delete(tables: Tables) -> None:
            if wanted is None:
                documents.delete_all(tables)
            for fingerprint, doc_id in wanted or ():
                if not documents.delete(tables, fingerprint, doc_id):
                    raise DocumentNotFoundError(f"{self._path} holds no document {doc_id!r}; nothing was deleted")

        return compact(self._environment, delete)

    def _check_alone(self, action: str) -> None:
        self._check_open()
        if self._options["read_only"]:
            raise StoreReadOnlyError(f"{self._path} was opened read-only; open it without read_only to {action} it")


class _Handle:
    """One counted use of an environment."""

    def __init__(self, environment: Environment, *, read_only: bool) -> None:
        self._environment = environment
        self._read_only = read_only

    @property
    def read_only(self) -> bool:
        return self._read_only

    @property
    def room_bytes(self) -> int:
        return self._environment.room_bytes

    def read(self) -> AbstractContextManager[Tables]:
        return self._environment.read()

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        if self._read_only:
            path = self._environment.path
            raise StoreReadOnlyError(f"{path} was opened read-only; open it without read_only to change it")
        return self._environment.write(body, needed=needed)

    def file_bytes(self) -> int:
        return self._environment.file_bytes()

    def close(self) -> None:
        registry.release(self._environment)


def _reopen(path: str, kv_dtype: KVDtype, options: dict[str, Any]) -> LMDBStore:
    return LMDBStore.open(path, kv_dtype=kv_dtype, create=False, **options)
