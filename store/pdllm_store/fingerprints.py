"""Which models a store holds documents of, and how many of each."""

from __future__ import annotations

from collections import Counter

from pdllm_store.errors import RecordDamagedError, StoreMismatchError
from pdllm_store.rows import OnDamage, pack_fingerprint, unpack_fingerprint
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, KVDtype, ModelFingerprint


def check_dtype(fingerprint: ModelFingerprint, kv_dtype: KVDtype) -> None:
    """Raises StoreMismatchError if the fingerprint's stored dtype is not the store's."""
    if fingerprint.kv_dtype != kv_dtype:
        raise StoreMismatchError(
            f"the fingerprint of {fingerprint.family!r} stores {fingerprint.kv_dtype}, this store was made for "
            f"{kv_dtype}; use another store or the same kv_dtype"
        )


def register(tables: Tables, fingerprint: ModelFingerprint) -> None:
    """Remember a fingerprint; one that is known keeps its count."""
    add_to_fingerprint(tables, fingerprint, 0)


def fingerprints(tables: Tables, on_damage: OnDamage) -> list[tuple[ModelFingerprint, int]]:
    """Every fingerprint whose row is whole, with its number of documents."""
    found = []
    for key, value in tables.scan("fingerprints"):
        try:
            found.append(unpack_fingerprint(key, value))
        except RecordDamagedError as error:
            on_damage(error)
    return found


def recount_documents(tables: Tables) -> None:
    """Count the documents of every fingerprint anew; a damaged row stays until its model adds a document."""
    n_documents = Counter(key[:ID_BYTES] for key, _ in tables.scan("documents"))
    for fingerprint, n_said in fingerprints(tables, on_damage=lambda _error: None):
        if n_said != n_documents[fingerprint.digest]:
            row = pack_fingerprint(fingerprint, n_documents[fingerprint.digest])
            tables.put("fingerprints", fingerprint.digest, row)


def add_to_fingerprint(tables: Tables, fingerprint: ModelFingerprint, change: int) -> None:
    """Change the number of documents of a fingerprint (after they were changed), remembering it first if it is new."""
    value = tables.get("fingerprints", fingerprint.digest)
    try:
        n_documents = 0 if value is None else unpack_fingerprint(fingerprint.digest, value)[1]
    except RecordDamagedError:
        value, change = None, 0
        n_documents = sum(1 for _ in tables.scan("documents", fingerprint.digest))
    if value is None or change:
        row = pack_fingerprint(fingerprint, n_documents + change)
        tables.put("fingerprints", fingerprint.digest, row)
