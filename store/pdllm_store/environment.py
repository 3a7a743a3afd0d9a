"""One LMDB environment, shared by every handle of a process, with the rules that LMDB leaves to its callers.

- A transaction and whatever ends the map under it (close, resize, fork, compaction) exclude each other.
- A forked child opens an environment of its own at its first use. The inherited one is closed without harm to the
  parent because no transaction is in progress while a fork happens (see `registry`).
- Every open store holds `store.lock` shared; `compact` takes it exclusively, so it never replaces a file in use.
- Safe defaults throughout: sync on, no writemap, and read-ahead on (without it, cold reads are 20 times slower).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import lmdb

from pdllm_store import location
from pdllm_store.errors import (
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreMismatchError,
    StoreNotFoundError,
)
from pdllm_store.gate import Gate
from pdllm_store.keyed import KeyedTables, key_id
from pdllm_store.lmdb_tables import LMDBTables
from pdllm_store.manifest import Manifest, create_manifest, read_manifest
from pdllm_store.tables import TABLES, Table, Tables
from pdllm_store.types import KVDtype

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAP_SIZE = 1 << 40  # sparse: it costs address space only
_MAX_READERS = 1024
_LOCK_TIMEOUT_S = 60.0


class Access(NamedTuple):
    """How an environment is opened; the same for all handles of a process."""

    map_size: int
    key: bytes | None  # of the MACs
    read_only: bool
    locked: bool  # LMDB's reader table is used; without it nobody may write meanwhile


class Environment:
    """The `Transactions` of one store folder. Made and counted by `registry` only."""

    manifest: Manifest

    def __init__(self, path: str, access: Access, *, create_as: KVDtype | None) -> None:
        self.path = path
        self.access = access
        self.n_handles = 0
        self.gate = Gate()
        self._reopening = threading.Lock()
        self._env: Any = None
        self._use_lock: int | None = None
        self._open_files(create_as)

    @property
    def read_only(self) -> bool:
        return self.access.read_only

    @property
    def room_bytes(self) -> int:
        return int(self._live().info()["map_size"])  # of another process, if it opened the store with a larger one

    @contextmanager
    def read(self) -> Iterator[Tables]:
        try:
            with self._transaction(write=False) as tables:
                yield tables
        except lmdb.Error as error:
            raise self._translated(error, needed=0) from error

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        try:
            with self._transaction(write=True) as tables:
                return body(tables)
        except lmdb.Error as error:
            raise self._translated(error, needed=needed) from error

    def copy_to(self, descriptor: int) -> None:
        """Write a compact snapshot of the data file to an open file. Raises lmdb.Error if that cannot be written."""
        with self._transaction(write=False):
            self._live().copyfd(descriptor, compact=True)

    def file_bytes(self) -> int:
        return location.disk_bytes(self.path)

    def is_in_place(self) -> bool:
        """False if the data file was removed or replaced behind this environment's back."""
        try:
            return os.stat(os.path.join(self.path, location.DATA_FILE)).st_ino == self._data_inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Wait for the transactions in progress, then close."""
        with self.gate.exclusive():
            self._close_files()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else has the store open inside, not even this environment; it is opened again afterwards.

        Raises:
            StoreError: another handle or process has it open.
        """
        with self.gate.exclusive():
            self._live()
            if self.n_handles > 1:
                raise StoreError(f"{self.path} is open by {self.n_handles} handles of this process; close the others")
            self._close_env()  # before the lock is loose for a moment: another process could compact in it
            try:
                try:
                    assert self._use_lock is not None
                    fcntl.flock(self._use_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise StoreError(f"{self.path} is open in another process; stop that first") from error
                yield
            finally:
                self._close_files()
                self._open_files(None)

    def renew_locks(self) -> None:
        """In a forked child: locks that a thread of the parent held would never be released."""
        self.gate = Gate()
        self._reopening = threading.Lock()

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Tables]:
        while True:
            with self.gate.shared():
                env = self._live()
                if not self.is_in_place():
                    raise StoreError(
                        f"{self.path} was removed or replaced while this process had it open; close its handles and "
                        "open it again"
                    )
                try:
                    transaction = env.begin(write=write, buffers=True)
                except lmdb.ReadersFullError:
                    env.reader_check()  # slots of killed processes
                    transaction = env.begin(write=write, buffers=True)
                except lmdb.MapResizedError:
                    transaction = None
                if transaction is not None:
                    tables = LMDBTables(env, transaction, self._databases)
                    try:
                        with transaction:
                            yield self._guarded(tables)
                    finally:
                        # Its slot is free when nobody refers to the transaction, and a kept error refers to its frames.
                        transaction = None
                        tables.end()
                    return
            with self.gate.exclusive():
                # Another process opened it with a larger map and filled it: take that size over.
                self._live().set_mapsize(0)

    def tables(self, env: Any, transaction: Any, databases: dict[Table, Any]) -> Tables:
        """The tables of a transaction, behind the store's key if it has one."""
        return self._guarded(LMDBTables(env, transaction, databases))

    def _guarded(self, tables: LMDBTables) -> Tables:
        return tables if self.access.key is None else KeyedTables(tables, self.access.key)

    def _live(self) -> Any:
        if self._env is None:
            raise StoreClosedError(f"the store {self.path} was closed; open it again")
        if self._pid != os.getpid():
            with self._reopening:
                if self._pid != os.getpid():
                    self._close_files()
                    self._open_files(None)
        return self._env

    def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _close_files(self) -> None:
        self._close_env()
        descriptor, self._use_lock = self._use_lock, None
        if descriptor is not None:
            os.close(descriptor)

    def _open_files(self, create_as: KVDtype | None) -> None:
        access = self.access
        use_lock = _lock_shared(self.path, read_only=access.read_only)
        env = None
        try:
            if not access.read_only:
                # Only whoever compacts makes this folder, and the lock says that nobody does now.
                shutil.rmtree(os.path.join(self.path, location.COMPACT_FOLDER), ignore_errors=True)
            env = open_lmdb(self.path, access)
            self._databases = open_databases(env, self.path, create_as=create_as, key=access.key)
            with env.begin(buffers=True) as transaction:
                self.manifest = read_manifest(LMDBTables(env, transaction, self._databases), self.path)
            _check_key(self.path, self.manifest, access.key)
        except BaseException:
            if env is not None:
                env.close()
            if use_lock is not None:
                os.close(use_lock)
            raise
        self._env, self._use_lock = env, use_lock
        self._pid = os.getpid()
        self._data_inode = os.stat(os.path.join(self.path, location.DATA_FILE)).st_ino

    def _translated(self, error: lmdb.Error, *, needed: int) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            info, page_bytes = self._live().info(), self._live().stat()["psize"]
            return StoreFullError(
                f"{self.path} is full: {(info['last_pgno'] + 1) * page_bytes} bytes used of a map of "
                f"{info['map_size']}, {needed} more needed; nothing of it was kept. Delete documents, or open the "
                "store with a larger map_size"
            )
        no_room = any(os.strerror(code) in str(error) for code in _NO_ROOM)
        short_write = os.strerror(errno.EIO) in str(error)  # what LMDB makes of one
        if isinstance(error, lmdb.DiskError) or no_room or (short_write and location.lacks_room(self.path, needed)):
            return StoreFullError(
                f"the disk under {self.path} is full: {self.file_bytes()} bytes used by the store, "
                f"{shutil.disk_usage(self.path).free} free, {needed} more needed ({error}); nothing of it was kept"
            )
        if isinstance(error, lmdb.ReadersFullError):
            return StoreError(
                f"{self.path}: all {self._live().info()['max_readers']} reader slots are in use by running processes; "
                "nothing is wrong with the store. Try again, or stop some of them"
            )
        return StoreError(f"LMDB cannot go on with {self.path}: {error}; run `verify`, or restore a copy")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_lmdb(path: str, access: Access) -> Any:
    """An open LMDB environment of a prepared folder. Raises StoreFormatError and StoreError."""
    try:
        env = lmdb.open(
            path,
            map_size=access.map_size,
            readonly=access.read_only,
            lock=access.locked,
            max_dbs=len(TABLES),
            max_readers=_MAX_READERS,
            max_spare_txns=0,  # a cached read transaction would hold a reader slot across a fork
            mode=0o600,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise StoreFormatError(f"{path} holds no LMDB file that can be read ({error}); give another folder") from error
    except lmdb.ReadersFullError as error:
        raise StoreError(
            f"{path}: all reader slots are taken, so it cannot be opened; nothing is wrong with the store. A question "
            "to a process that has it open frees those of killed processes, as does stopping all that have it open"
        ) from error
    except lmdb.Error as error:
        raise StoreError(f"cannot open {path} with a map of {access.map_size} bytes: {error}") from error
    try:
        if access.locked:
            env.reader_check()
        _restore_length(env, path, read_only=access.read_only)
    except BaseException:
        env.close()
        raise
    return env


def open_databases(env: Any, path: str, *, create_as: KVDtype | None, key: bytes | None) -> dict[Table, Any]:
    """Handles of all tables; a new file gets them, and its manifest, if it may be created.

    Raises:
        StoreFormatError: it is an LMDB file of something else.
        StoreNotFoundError: it is new, and nothing may be created.
    """
    try:
        if env.stat()["entries"]:
            # Not inside a read transaction: py-lmdb resets those, and the handles would die with it.
            try:
                return {table: env.open_db(table.encode(), create=False) for table in TABLES}
            except lmdb.NotFoundError:
                _refuse_other_format(env, path)
                raise
    except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
        raise StoreFormatError(f"{path} is an LMDB file of something else ({error}); give another folder") from error
    except lmdb.Error as error:
        raise StoreError(f"{path} cannot be read: {error}; restore a copy, or prefill into a new store") from error
    if create_as is None:
        raise StoreNotFoundError(f"{path} holds an empty file, expected a store; prefill some documents into it")
    with env.begin(write=True, buffers=True) as transaction:
        databases: dict[Table, Any] = {table: env.open_db(table.encode(), txn=transaction) for table in TABLES}
        create_manifest(LMDBTables(env, transaction, databases), create_as, key_id(key))
    return databases


def _refuse_other_format(env: Any, path: str) -> None:
    """Raises StoreFormatError if it is a store of another format, which may have other tables."""
    database = env.open_db(b"manifest", create=False)
    with env.begin(buffers=True) as transaction:
        read_manifest(LMDBTables(env, transaction, {"manifest": database}), path)


def _check_key(path: str, manifest: Manifest, key: bytes | None) -> None:
    """Raises StoreMismatchError unless the store was made with this key."""
    if manifest.key_id == (given := key_id(key)):
        return
    made = f"a key that is called {manifest.key_id}" if manifest.key_id else "no key"
    raise StoreMismatchError(
        f"{path} was made with {made}, and {f'one called {given}' if given else 'no key'} was given; give the same "
        "(key, --key-file), or prefill into a new store"
    )


def _restore_length(env: Any, path: str, *, read_only: bool) -> None:
    """Extend a file that was cut short with a hole: reading beyond the end would kill the process (SIGBUS)."""
    data_path = os.path.join(path, location.DATA_FILE)

    def n_lacking() -> tuple[int, int]:
        expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        return expected - os.stat(data_path).st_size, expected

    if n_lacking()[0] > 0 and read_only:
        raise StoreError(f"{path} is shorter than its last page: open it once without read_only, or copy it again")
    if n_lacking()[0] > 0:
        with env.begin(write=True):  # no other process may write meanwhile
            lacking, expected = n_lacking()
            if lacking > 0:
                # LMDB itself leaves the file short where the last pages were freed before they were written.
                logger.info("%s is %d bytes shorter than its last page; run `verify` if it was copied", path, lacking)
                os.truncate(data_path, expected)


def _lock_shared(path: str, *, read_only: bool) -> int | None:
    """A descriptor that holds the store's use lock shared, None where a reader cannot have one. Raises StoreError."""
    name = os.path.join(path, location.USE_LOCK_FILE)
    try:
        descriptor = os.open(name, os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT), 0o600)
    except OSError as error:
        if read_only and error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise StoreError(f"cannot open the store {path}: {error}") from error
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StoreError(f"{path} is being compacted by another process; try again later") from error
            time.sleep(0.05)
