"""The chunk store on disk: one folder, one LMDB environment, any number of handles, threads and processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pdllm_store import registry
from pdllm_store.compaction import compact
from pdllm_store.environment import Environment
from pdllm_store.errors import StoreMismatchError
from pdllm_store.location import DERIVED_FOLDER, refuse_network_file_system
from pdllm_store.table_store import TableStore
from pdllm_store.tables import Tables
from pdllm_store.types import KV_DTYPES, KVDtype

T = TypeVar("T")


class LMDBStore(TableStore):
    """A `ChunkStore` on disk; make one with `LMDBStore.open`.

    Handles on one folder, by whatever path, share one environment; closing one leaves the others working. A handle
    works in a forked child, and pickles as its path and options. Loaded KV is copied out: nothing that is handed out
    refers to the map. No transaction outlives the call that began it.
    """

    def __init__(self, environment: Environment, *, verify_reads: bool, map_size: int | None, force: bool) -> None:
        super().__init__(
            _Handle(environment),
            path=environment.path,
            kv_dtype=environment.manifest.kv_dtype,
            verify_reads=verify_reads,
        )
        self._environment = environment
        self._options = {"verify_reads": verify_reads, "map_size": map_size, "force": force}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        map_size: int | None = None,
        verify_reads: bool = True,
        force: bool = False,
    ) -> LMDBStore:
        """Open the store in a folder, or make one there.

        Args:
            kv_dtype: dtype that keys and values are stored in, fixed when the store is made (then None means
                bfloat16); later None takes what is there.
            create: make the store if nothing is there.
            map_size: cap of the file in bytes; None means 1 TiB, or that of a handle that is open already.
            verify_reads: compare each record's checksum when it is read.
            force: open it on a network file system too.

        Raises:
            StoreNotFoundError: nothing is there and `create` is False.
            StoreFormatError: something else is there, or a store of another format.
            StoreMismatchError: the store was made with another `kv_dtype`.
            StoreError: a network file system, no permission, or another cap than the store is open with.
            ValueError: `kv_dtype` or `map_size` is none that exists.
        """
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {kv_dtype!r}, expected one of {KV_DTYPES}")
        if map_size is not None and map_size <= 0:
            raise ValueError(f"map_size is {map_size} bytes, expected a positive number")
        real = os.path.realpath(path)
        if not force:
            refuse_network_file_system(real)
        environment = registry.acquire(real, create_as=(kv_dtype or "bfloat16") if create else None, map_size=map_size)
        held = environment.manifest.kv_dtype
        if kv_dtype not in (None, held):
            registry.release(environment)
            raise StoreMismatchError(
                f"{real} was made to hold {held}, {kv_dtype} was asked for; open it as {held}, or prefill into a new "
                "store"
            )
        return cls(environment, verify_reads=verify_reads, map_size=map_size, force=force)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._path, self._kv_dtype, self._options)

    @property
    def derived_dir(self) -> str | None:
        folder = os.path.join(self._path, DERIVED_FOLDER)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        return folder

    def compact(self) -> int:
        """Drop what no document refers to and rewrite the file without its free pages; returns the bytes given back.

        Raises:
            StoreError: another handle or process has the store open.
            StoreFullError: the disk has no room for the second copy; nothing was changed but orphans dropped.
        """
        self._check_open()
        return compact(self._environment)


class _Handle:
    """One counted use of an environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def read(self) -> AbstractContextManager[Tables]:
        return self._environment.read()

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        return self._environment.write(body, needed=needed)

    def shrink(self, body: Callable[[Tables], T]) -> T:
        return self._environment.shrink(body)

    def file_bytes(self) -> int:
        return self._environment.file_bytes()

    def close(self) -> None:
        registry.release(self._environment)


def _reopen(path: str, kv_dtype: KVDtype, options: dict[str, Any]) -> LMDBStore:
    return LMDBStore.open(path, kv_dtype=kv_dtype, create=False, **options)
