"""Give back what deleted documents and interrupted prefills left behind."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable

import lmdb

from pdllm_store import chunks
from pdllm_store.counts import write_recount
from pdllm_store.environment import Environment, open_databases, open_lmdb
from pdllm_store.errors import RecordDamagedError, StoreError, StoreFullError
from pdllm_store.location import COMPACT_FOLDER, DATA_FILE, DERIVED_FOLDER, sync
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES

_ROOM = 64 << 20  # bytes that dropping orphans may take before it frees any


def compact(environment: Environment, change: Callable[[Tables], None] | None = None) -> int:
    """Drop orphans, write a compact copy and put it in the place of the file; returns the bytes given back.

    A crash leaves either the old file or the new one, whole.

    Args:
        change: done before anything else, while nobody has the store open; then the old file, and what was derived
            from it, is overwritten with zeros before it is given back.

    Raises:
        StoreError: another handle or process has the store open.
        StoreFullError: the disk has no room for the copy.
    """
    path = environment.path
    before = environment.file_bytes()
    with environment.alone():
        folder = os.path.join(path, COMPACT_FOLDER)
        try:
            _copy(environment, folder, change)
            _replace(os.path.join(folder, DATA_FILE), os.path.join(path, DATA_FILE), wipe=change is not None)
            if change is not None:
                _wipe_folder(os.path.join(path, DERIVED_FOLDER))
        except lmdb.Error as error:
            purged = " What was to be purged is deleted, and its bytes are still in the file." if change else ""
            raise StoreError(f"{path} could not be compacted: {error}.{purged} Compact it again") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return before - environment.file_bytes()


def drop_unreferred(tables: Tables) -> None:
    """Count references and documents anew; delete chunks without references, and what has lost its owner."""
    for key in [key for key in tables.keys("refs") if tables.get("documents", key[: 2 * ID_BYTES]) is None]:
        tables.delete("refs", key)
    references = chunks.count_references(tables)
    held = list(chunks.page_of_rows(tables, b"", -1))
    for key in list(tables.keys("lru")):
        tables.delete("lru", key)
    for chunk_id, row in held:
        refcount, pins = references.get(chunk_id, (0, 0))
        if not refcount:
            chunks.delete(tables, chunk_id)
        elif not isinstance(row, RecordDamagedError):
            mended = row._replace(refcount=refcount, pins=pins)
            if mended != row:
                chunks.write_row(tables, chunk_id, mended)
            if entry := chunks.lru_entry(chunk_id, mended):
                tables.put("lru", entry, b"")
    known = {chunk_id for chunk_id, _ in held}
    for key in [key for key in tables.keys("kv") if key[:ID_BYTES] not in known]:
        tables.delete("kv", key)
    write_recount(tables)


def _copy(environment: Environment, folder: str, change: Callable[[Tables], None] | None) -> None:
    path, access = environment.path, environment.access
    env = open_lmdb(path, access._replace(map_size=access.map_size + _ROOM))
    try:
        databases = open_databases(env, path, create_as=None, key=access.key)
        with env.begin(write=True, buffers=True) as transaction:
            tables = environment.tables(env, transaction, databases)
            if change is not None:
                change(tables)
            drop_unreferred(tables)
            needed = tables.space().used_bytes
            if (free := shutil.disk_usage(path).free) < needed:  # raised here, it undoes the changes as well
                raise StoreFullError(
                    f"compacting {path} needs {needed} bytes for a second copy, the disk has {free} free; nothing was "
                    "changed"
                )
        os.mkdir(folder, mode=0o700)
        env.copy(folder, compact=True)
    finally:
        env.close()


def _replace(new: str, old: str, *, wipe: bool) -> None:
    os.chmod(new, 0o600)
    sync(new)
    descriptor = os.open(old, os.O_WRONLY)
    try:
        os.replace(new, old)
        sync(os.path.dirname(old))
        if wipe:
            _overwrite(descriptor)
    finally:
        os.close(descriptor)


def _wipe_folder(folder: str) -> None:
    if os.path.islink(folder):
        raise StoreError(f"{folder} is a link, so what it leads to is not the store's; remove it")
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                descriptor = os.open(os.path.join(parent, name), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # gone by now, a link or a pipe: nothing of ours
                continue
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    _overwrite(descriptor)
            finally:
                os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)


def _overwrite(descriptor: int) -> None:
    zeros = bytes(1 << 20)
    size = os.fstat(descriptor).st_size
    for start in range(0, size, len(zeros)):
        os.pwrite(descriptor, zeros[: size - start], start)
    os.fsync(descriptor)
