"""The seam between what a store means and where its bytes lie: nine ordered tables inside one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, get_args

from pdllm_store.codec import Buffer

Table = Literal["manifest", "fingerprints", "counts", "documents", "refs", "texts", "metas", "kv", "lru"]
TABLES: tuple[Table, ...] = get_args(Table)


class Space(NamedTuple):
    """Where the bytes of a file are, when the transaction began."""

    used_bytes: int  # pages in use
    free_bytes: int  # pages of the file that can be used again


class Tables(Protocol):
    """The tables as one transaction sees them. Keys are at most 511 bytes and sort as unsigned bytes.

    Values handed out are valid until the transaction ends or writes: copy what must live longer.
    """

    def get(self, table: Table, key: bytes) -> Buffer | None: ...

    def put(self, table: Table, key: bytes, value: Buffer) -> None: ...

    def delete(self, table: Table, key: bytes) -> bool:
        """False if there was no such key."""
        ...

    def scan(self, table: Table, prefix: bytes = b"", *, after: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        """Entries whose key starts with `prefix` and sorts behind `after`, in order; no writes meanwhile."""
        ...

    def keys(self, table: Table, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys that start with `prefix`, in order; no value is looked at, no writes meanwhile."""
        ...

    def space(self) -> Space: ...

    def snapshot_lag(self) -> int:
        """How many transactions behind the latest the oldest snapshot is that somebody reads now."""
        ...


class OverTables:
    """`Tables` that hand everything on to others; a subclass does otherwise where it has to."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def get(self, table: Table, key: bytes) -> Buffer | None:
        return self._tables.get(table, key)

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        self._tables.put(table, key, value)

    def delete(self, table: Table, key: bytes) -> bool:
        return self._tables.delete(table, key)

    def scan(self, table: Table, prefix: bytes = b"", *, after: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        return self._tables.scan(table, prefix, after=after)

    def keys(self, table: Table, prefix: bytes = b"") -> Iterator[bytes]:
        return self._tables.keys(table, prefix)

    def space(self) -> Space:
        return self._tables.space()

    def snapshot_lag(self) -> int:
        return self._tables.snapshot_lag()
