"""The tables of one LMDB transaction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import lmdb

from pdllm_store.codec import Buffer
from pdllm_store.tables import Space, Table

_OTHER_PAGES = 4  # two meta pages, the tree of the tables, and the list of free pages or the start of it
_READER = re.compile(r"\s*\d+\s+\w+\s+\d+\s*")  # pid, thread, transaction; a free slot has a dash there


class LMDBTables:
    """`Tables` over one LMDB transaction with `buffers=True`."""

    def __init__(self, env: Any, transaction: Any, databases: dict[Table, Any]) -> None:
        self._env = env
        self._transaction = transaction
        self._databases = databases

    def end(self) -> None:
        """Let go of the transaction, which has ended."""
        self._transaction = None

    def get(self, table: Table, key: bytes) -> Buffer | None:
        value: Buffer | None = self._transaction.get(key, db=self._databases[table])
        return value

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        self._transaction.put(key, value, db=self._databases[table])

    def delete(self, table: Table, key: bytes) -> bool:
        return bool(self._transaction.delete(key, db=self._databases[table]))

    def scan(self, table: Table, prefix: bytes = b"", *, after: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        # Nothing sorts between a key and the key with a zero byte behind it.
        for key, cursor in self._walk(table, prefix, max(prefix, after + b"\0" if after else b"")):
            yield key, cursor.value()

    def keys(self, table: Table, prefix: bytes = b"") -> Iterator[bytes]:
        for key, _ in self._walk(table, prefix, prefix):
            yield key

    def _walk(self, table: Table, prefix: bytes, start: bytes) -> Iterator[tuple[bytes, Any]]:
        """Keys with `prefix` from `start` on, and the cursor that stands on each."""
        with self._transaction.cursor(db=self._databases[table]) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return
            last = b""
            for view in cursor.iternext(keys=True, values=False):
                key = bytes(view)
                last = _in_order(table, key, last or start, is_first=not last)
                if not key.startswith(prefix):
                    return
                yield key, cursor

    def space(self) -> Space:
        statistics = [self._transaction.stat(database) for database in self._databases.values()]
        page_bytes = statistics[0]["psize"]
        n_used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in statistics) + _OTHER_PAGES
        n_pages = self._env.info()["last_pgno"] + 1
        return Space(n_used * page_bytes, max(0, n_pages - n_used) * page_bytes)

    def snapshot_lag(self) -> int:
        latest = int(self._env.info()["last_txnid"])
        held = [int(line.split()[2]) for line in self._env.readers().splitlines() if _READER.fullmatch(line)]
        return max([0, *(latest - transaction for transaction in held)])


def _in_order(table: Table, key: bytes, last: bytes, *, is_first: bool) -> bytes:
    """The key. Raises lmdb.CorruptedError if it sorts wrongly: whoever reads page by page would never end."""
    if key < last or (key == last and not is_first):
        raise lmdb.CorruptedError(f"table {table}: key {key.hex()} is out of order")
    return key
