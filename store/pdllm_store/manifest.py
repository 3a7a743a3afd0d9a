"""What a store says of itself: its format, its stored dtype, and the LMDB that made it."""

from __future__ import annotations

from typing import NamedTuple

import lmdb

from pdllm_store.errors import RecordDamagedError, StoreFormatError
from pdllm_store.rows import pack_map, unpack_map
from pdllm_store.tables import Tables
from pdllm_store.types import FORMAT, KV_DTYPES, KVDtype

_KEY = b"manifest"


class Manifest(NamedTuple):
    """The immutable facts of a store."""

    format: int
    kv_dtype: KVDtype
    lmdb: str  # version of the LMDB library that made the file
    key_id: str  # of the key that every value carries a MAC of, "" for none


def create_manifest(tables: Tables, kv_dtype: KVDtype, key_id: str) -> None:
    """Write the manifest of a new store; one that somebody else wrote first stays."""
    if tables.get("manifest", _KEY) is None:
        made_by = ".".join(str(part) for part in lmdb.version())
        tables.put("manifest", _KEY, pack_map(_KEY, Manifest(FORMAT, kv_dtype, made_by, key_id)._asdict()))


def read_manifest(tables: Tables, path: str) -> Manifest:
    """Raises StoreFormatError if it is absent, damaged or of another format."""
    value = tables.get("manifest", _KEY)
    if value is None:
        raise StoreFormatError(f"{path} holds an LMDB file without a manifest of ours; give another folder")
    try:
        fields = unpack_map("manifest", _KEY, value)
    except RecordDamagedError as error:
        raise StoreFormatError(f"{path}: {error}") from error
    if fields.get("format") != FORMAT:
        raise StoreFormatError(
            f"{path} is a store of format {fields.get('format')!r}, this version reads format {FORMAT}; "
            "open it with the version that wrote it, or prefill its documents into a new store (KV is never converted)"
        )
    if fields.get("kv_dtype") not in KV_DTYPES:
        raise StoreFormatError(f"{path} says to hold {fields.get('kv_dtype')!r}, expected one of {KV_DTYPES}")
    return Manifest(FORMAT, fields["kv_dtype"], str(fields.get("lmdb")), str(fields.get("key_id", "")))
