"""Give back what deleted documents and interrupted prefills left behind."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Any

import lmdb

from pdllm_store import chunks
from pdllm_store.counts import recount, write_counts
from pdllm_store.environment import Environment, open_databases, open_lmdb
from pdllm_store.errors import RecordDamagedError, StoreError, StoreFullError
from pdllm_store.fingerprints import recount_documents
from pdllm_store.lmdb_tables import LMDBTables
from pdllm_store.location import COMPACT_FOLDER, DATA_FILE
from pdllm_store.rows import unpack_ref
from pdllm_store.tables import TABLES, Table, Tables
from pdllm_store.types import ID_BYTES, ChunkId

_ROOM = 64 << 20  # bytes that dropping orphans may take before it frees any


def compact(environment: Environment) -> int:
    """Drop orphans, write a compact copy and put it in the place of the file; returns the bytes given back.

    A crash leaves either the old file or the new one, whole.

    Raises:
        StoreError: another handle or process has the store open.
        StoreFullError: the disk has no room for the copy.
    """
    path = environment.path
    before = environment.file_bytes()
    with environment.alone():
        folder = os.path.join(path, COMPACT_FOLDER)
        try:
            _copy(path, folder, map_size=environment.map_size + _ROOM)
            _replace(os.path.join(folder, DATA_FILE), os.path.join(path, DATA_FILE))
        except lmdb.Error as error:
            raise StoreError(f"{path} could not be compacted: {error}; it stays as it was") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return before - environment.file_bytes()


def drop_unreferred(tables: Tables) -> None:
    """Count references and documents anew; delete chunks without references, and what has lost its owner."""
    for key in [key for key, _ in tables.scan("refs") if tables.get("documents", key[: 2 * ID_BYTES]) is None]:
        tables.delete("refs", key)
    refcounts: Counter[ChunkId] = Counter()
    for key, value in tables.scan("refs"):
        try:
            refcounts[unpack_ref(key, value, "").chunk_id] += 1
        except RecordDamagedError:
            continue
    rows = list(_rows(tables))
    for chunk_id, refcount in rows:
        if not refcounts[chunk_id]:
            chunks.delete(tables, chunk_id)
        elif refcount not in (None, refcounts[chunk_id]):
            row = chunks.chunk_row(tables, chunk_id)
            assert row is not None
            chunks.write_row(tables, chunk_id, row._replace(refcount=refcounts[chunk_id]))
    known = {chunk_id for chunk_id, _ in rows}
    for key in [key for key, _ in tables.scan("kv") if key[:ID_BYTES] not in known]:
        tables.delete("kv", key)
    recount_documents(tables)
    write_counts(tables, recount(tables))


def _rows(tables: Tables) -> list[tuple[ChunkId, int | None]]:
    """Chunk ids with their reference counts, None where the row is damaged."""
    found: list[tuple[ChunkId, int | None]] = []
    for chunk_id, row in chunks.page_of_rows(tables, b"", -1):
        found.append((chunk_id, None if isinstance(row, RecordDamagedError) else row.refcount))
    return found


def _copy(path: str, folder: str, *, map_size: int) -> None:
    env = open_lmdb(path, map_size=map_size)
    try:
        databases = open_databases(env, path, create_as=None)
        with env.begin(write=True, buffers=True) as transaction:
            drop_unreferred(LMDBTables(transaction, databases))
        needed = _live_bytes(env, databases)
        if (free := shutil.disk_usage(path).free) < needed:
            raise StoreFullError(f"compacting {path} needs {needed} bytes for a second copy, the disk has {free} free")
        os.mkdir(folder, mode=0o700)
        env.copy(folder, compact=True)
    finally:
        env.close()


def _live_bytes(env: Any, databases: dict[Table, Any]) -> int:
    with env.begin() as transaction:
        statistics = [transaction.stat(databases[table]) for table in TABLES]
    n_pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in statistics)
    return int((n_pages + 16) * statistics[0]["psize"])


def _replace(new: str, old: str) -> None:
    os.chmod(new, 0o600)
    _sync(new)
    os.replace(new, old)
    _sync(os.path.dirname(old))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
