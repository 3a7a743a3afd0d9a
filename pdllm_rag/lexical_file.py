"""The lexical index in a file that threads and processes share, follow together, and make again when it is damaged.

- Nothing stays open between two calls: a fork, a replaced file or a lost one does no harm, and opening costs 0.1 ms.
- `<file>.lock` is held shared while the file is read and alone while it is changed or replaced: SQLite's own locks
  would not see that somebody unlinks a file which another has open, or that his journal belongs to the former file.
- A change is one transaction. If it deleted anything, the file is copied afterwards and the copy put in its place:
  SQLite's `secure_delete` leaves old bytes behind in pages that were balanced, a copy has live rows only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar
from urllib.parse import quote

from pdllm_store.location import sync

from pdllm_rag.lexical_tables import LexicalError, LexicalTables, OldLayoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOCK_TIMEOUT_S = 60.0  # another process may be building the index of a large store
_POLL_S = 0.005
_BUSY_TIMEOUT_S = 10.0  # of SQLite's locks, which only a stranger (a backup, a shell) can hold against us
_CACHE_KIB = 65536


class FileUnusableError(Exception):
    """The folder cannot be written, the disk is full, or somebody holds the lock for too long."""


class LexicalFile:
    """One model's lexical index in a folder; with `read_only` it is used as it is, or not at all."""

    def __init__(self, folder: str, fingerprint: bytes, *, read_only: bool = False) -> None:
        self._read_only = read_only
        self.path = os.path.join(folder, f"lexical-{fingerprint.hex()}.sqlite")
        self._copy_path = f"{self.path}.new"
        self._fingerprint = fingerprint

    def ask(
        self,
        is_current: Callable[[LexicalTables], bool],
        follow: Callable[[LexicalTables], None],
        read: Callable[[LexicalTables], T],
    ) -> T:
        """What `read` finds, in one snapshot, after `follow` has brought the tables in step if they are not current.

        A file that is damaged or of something else is deleted and made again. What the callables raise, except for
        LexicalError, passes through and undoes what `follow` did.

        Raises:
            FileUnusableError: the file can neither be read as it is nor be written.
        """
        damage: LexicalError | None = None
        with self._locked(fcntl.LOCK_SH) as writable:
            stamp = self._stamp()
            try:
                if stamp is not None:
                    with _opened(self.path, "rw" if writable else "ro") as tables, tables.transaction("DEFERRED"):
                        if not tables.are_new():
                            tables.check(self._fingerprint)
                            if is_current(tables) and not (writable and tables.are_unclean()):
                                return read(tables)
            except LexicalError as error:
                damage = error
        with self._locked(fcntl.LOCK_EX):
            if damage is not None and stamp == self._stamp():  # else somebody has replaced or changed it since
                self._discard(damage)
            try:
                return self._change(follow, read)
            except LexicalError as error:
                self._discard(error)
            try:
                return self._change(follow, read)
            except LexicalError as error:
                self._discard(error)
                raise FileUnusableError(f"{self.path} cannot be made: {error}") from error

    def _change(self, follow: Callable[[LexicalTables], None], read: Callable[[LexicalTables], T]) -> T:
        """Follow, then read. The lock is held alone."""
        try:
            _unlink(self._copy_path)  # of a rewrite that did not come to its end
            _make_file(self.path)
        except OSError as error:
            raise FileUnusableError(f"{self.path} cannot be made: {error}") from error
        with _opened(self.path, "rw") as tables:
            tables.run(f"PRAGMA cache_size = -{_CACHE_KIB}")
            with tables.transaction("IMMEDIATE"):
                if tables.are_new():
                    tables.create(self._fingerprint)
                tables.check(self._fingerprint)
                follow(tables)
                unclean = tables.are_unclean()
                if unclean:
                    tables.merge_words()
        if unclean:
            self._rewrite()
        with _opened(self.path, "rw") as tables, tables.transaction("DEFERRED"):
            return read(tables)

    def _rewrite(self) -> None:
        """Put a copy of the live rows in the place of the file; a crash leaves the old one, marked as unclean."""
        try:
            _make_file(self._copy_path)
            with _opened(self.path, "rw") as tables:
                tables.run("VACUUM INTO ?", (_uri(self._copy_path),))
            with _opened(self._copy_path, "rw") as tables:
                tables.set_clean()
            sync(self._copy_path)
            os.replace(self._copy_path, self.path)
        except OSError as error:
            raise LexicalError(f"it cannot be copied: {error}") from error

    def _discard(self, error: LexicalError) -> None:
        """Delete the file for an error. The lock is held alone."""
        try:
            _unlink(self._copy_path)
            _unlink(self.path)
        except OSError as refused:
            raise FileUnusableError(f"{self.path} ({error}) cannot be deleted: {refused}") from error
        level = logging.INFO if isinstance(error, OldLayoutError) else logging.WARNING
        logger.log(level, "the lexical index %s could not be used and was deleted: %s", self.path, error)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @contextmanager
    def _locked(self, kind: int) -> Iterator[bool]:
        """Hold the lock, shared or alone. Where it cannot be made, a reader goes without and is told False.

        Without writing, such a reader can at worst take the file for a damaged one.
        """
        if self._read_only and kind == fcntl.LOCK_EX:
            raise FileUnusableError(f"{self.path} is not current, and the store was opened read-only")
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        try:
            descriptor = os.open(f"{self.path}.lock", flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if kind == fcntl.LOCK_EX:
                raise FileUnusableError(f"{self.path} cannot be written: {error}") from error
            descriptor = None
        if descriptor is None:
            yield False
            return
        try:
            self._lock(descriptor, kind)
            try:
                yield not self._read_only
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, kind: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise FileUnusableError(f"{self.path} was in use for {LOCK_TIMEOUT_S:.0f} s") from error
            except OSError as error:
                raise FileUnusableError(f"{self.path} cannot be locked: {error}") from error
            time.sleep(_POLL_S)


@contextmanager
def _opened(path: str, mode: Literal["ro", "rw"]) -> Iterator[LexicalTables]:
    try:
        uri = f"{_uri(path)}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
    except sqlite3.Error as error:
        raise LexicalError(str(error)) from error
    try:
        yield LexicalTables(connection)
    finally:
        connection.close()


def _uri(path: str) -> str:
    return f"file:{quote(os.fsencode(path))}"


def _make_file(path: str) -> None:
    """An empty file that only its owner may read, unless there is one. Raises OSError.

    Nobody may have it open: closing any descriptor of a file drops the locks that SQLite holds on it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _unlink(path: str) -> None:
    """Delete a database, then its journals: one that is left over from a crash is dropped with a new file."""
    for ending in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ending)
