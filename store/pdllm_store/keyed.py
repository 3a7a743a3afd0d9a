"""Tables whose every value carries a MAC, for stores that travel: what another hand wrote is not believed.

The MAC is 16 bytes of keyed BLAKE3 over table, key and value, behind the value. A value under another key, in another
table or without the owner's key does not match; an older value of the same key does.
"""

from __future__ import annotations

import hmac
import logging
import struct
from collections.abc import Iterator

import blake3

from pdllm_store.codec import Buffer
from pdllm_store.tables import OverTables, Table, Tables

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_MAC_BYTES = 16
_ID_CONTEXT = "pdllm-store 2026 key id"


def check_key(key: bytes | None) -> None:
    """Raises ValueError."""
    if key is not None and (not isinstance(key, bytes) or len(key) != KEY_BYTES):
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"the store's key is {got}, expected {KEY_BYTES} bytes")


def key_id(key: bytes | None) -> str:
    """16 hex digits that name a key without giving it away, "" without one."""
    return "" if key is None else blake3.blake3(key, derive_key_context=_ID_CONTEXT).hexdigest(8)


class KeyedTables(OverTables):
    """`Tables` over others. A value whose MAC is wrong reads as empty, which no row and no record ever is."""

    def __init__(self, tables: Tables, key: bytes) -> None:
        super().__init__(tables)
        self._key = key

    def get(self, table: Table, key: bytes) -> Buffer | None:
        value = self._tables.get(table, key)
        return None if value is None else self._checked(table, key, value)

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        self._tables.put(table, key, b"".join((value, self._mac(table, key, value))))

    def scan(self, table: Table, prefix: bytes = b"", *, after: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        for key, value in self._tables.scan(table, prefix, after=after):
            yield key, self._checked(table, key, value)

    def _checked(self, table: Table, key: bytes, value: Buffer) -> Buffer:
        payload = memoryview(value)[:-_MAC_BYTES]
        if len(value) >= _MAC_BYTES and hmac.compare_digest(value[-_MAC_BYTES:], self._mac(table, key, payload)):
            return payload
        logger.warning("the value of table %s under %s was not written with this store's key", table, key.hex())
        return b""

    def _mac(self, table: Table, key: bytes, value: Buffer) -> bytes:
        mac = blake3.blake3(struct.pack("<16sH", table.encode(), len(key)) + key, key=self._key)
        return mac.update(value).digest(_MAC_BYTES)
