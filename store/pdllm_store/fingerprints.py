"""Which models a store holds documents of."""

from __future__ import annotations

from pdllm_store.errors import RecordDamagedError, StoreMismatchError
from pdllm_store.rows import OnDamage, pack_fingerprint, unpack_fingerprint
from pdllm_store.tables import Tables
from pdllm_store.types import KVDtype, ModelFingerprint


def check_dtype(fingerprint: ModelFingerprint, kv_dtype: KVDtype) -> None:
    """Raises StoreMismatchError if the fingerprint's stored dtype is not the store's."""
    if fingerprint.kv_dtype != kv_dtype:
        raise StoreMismatchError(
            f"the fingerprint of {fingerprint.family!r} stores {fingerprint.kv_dtype}, this store was made for "
            f"{kv_dtype}; use another store or the same kv_dtype"
        )


def register(tables: Tables, fingerprint: ModelFingerprint) -> None:
    """Remember a fingerprint; a damaged row of it is mended."""
    row = pack_fingerprint(fingerprint)
    value = tables.get("fingerprints", fingerprint.digest)
    if value is None or bytes(value) != row:
        tables.put("fingerprints", fingerprint.digest, row)


def fingerprints(tables: Tables, on_damage: OnDamage) -> list[ModelFingerprint]:
    """Every fingerprint whose row is whole."""
    found = []
    for key, value in tables.scan("fingerprints"):
        try:
            found.append(unpack_fingerprint(key, value))
        except RecordDamagedError as error:
            on_damage(error)
    return found
