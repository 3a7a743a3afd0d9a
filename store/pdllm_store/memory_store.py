"""A chunk store in memory, for tests and small uses: the same rows and records as on disk, so int8 rounds alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pdllm_store.codec import Buffer
from pdllm_store.table_store import TableStore
from pdllm_store.tables import TABLES, Space, Table, Tables
from pdllm_store.types import KVDtype

T = TypeVar("T")


class MemoryStore(TableStore):
    """A `ChunkStore` whose contents end with it. Its path is ":memory:"."""

    def __init__(
        self, *, kv_dtype: KVDtype = "bfloat16", max_bytes: int | None = None, verify_reads: bool = True
    ) -> None:
        super().__init__(_Memory(), path=":memory:", kv_dtype=kv_dtype, verify_reads=verify_reads)
        self.set_max_bytes(max_bytes)


class _Memory:
    """Tables as sorted-on-demand dictionaries; one transaction at a time, undone if it raises."""

    def __init__(self) -> None:
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in TABLES}
        self._lock = threading.RLock()

    @contextmanager
    def read(self) -> Iterator[Tables]:
        with self._lock:
            yield _MemoryTables(self._tables, [])

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:  # noqa: ARG002
        undo: list[tuple[Table, bytes, bytes | None]] = []
        with self._lock:
            try:
                return body(_MemoryTables(self._tables, undo))
            except BaseException:
                for table, key, value in reversed(undo):
                    if value is None:
                        self._tables[table].pop(key, None)
                    else:
                        self._tables[table][key] = value
                raise

    @property
    def read_only(self) -> bool:
        return False

    @property
    def room_bytes(self) -> None:
        return None

    def file_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for table in self._tables.values():
            table.clear()


class _MemoryTables:
    def __init__(self, tables: dict[Table, dict[bytes, bytes]], undo: list[tuple[Table, bytes, bytes | None]]) -> None:
        self._tables = tables
        self._undo = undo

    def get(self, table: Table, key: bytes) -> Buffer | None:
        return self._tables[table].get(key)

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        self._undo.append((table, key, self._tables[table].get(key)))
        self._tables[table][key] = bytes(value)

    def delete(self, table: Table, key: bytes) -> bool:
        value = self._tables[table].pop(key, None)
        self._undo.append((table, key, value))
        return value is not None

    def scan(self, table: Table, prefix: bytes = b"", *, after: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        found = self._tables[table]
        for key in sorted(key for key in found if key.startswith(prefix) and key > after):
            yield key, found[key]

    def space(self) -> Space:
        used = sum(len(key) + len(value) for table in self._tables.values() for key, value in table.items())
        return Space(used, 0)

    def keys(self, table: Table, prefix: bytes = b"") -> Iterator[bytes]:
        return iter(sorted(key for key in self._tables[table] if key.startswith(prefix)))

    def snapshot_lag(self) -> int:
        return 0
