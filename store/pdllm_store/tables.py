"""The seam between what a store means and where its bytes lie: seven ordered tables inside one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, get_args

from pdllm_store.codec import Buffer

Table = Literal["manifest", "fingerprints", "documents", "refs", "texts", "metas", "kv"]
TABLES: tuple[Table, ...] = get_args(Table)


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
