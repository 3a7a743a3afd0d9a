"""A store as one file, and back: a snapshot of its data file behind a header that says what its bytes must be.

The header is 64 bytes: the magic, its version (uint32), 4 zero bytes, the length of the data (uint64), 8 zero bytes,
and the data's BLAKE3. It is written last, so that an export that broke off is known as one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile

import blake3
import lmdb

from pdllm_store.errors import StoreError, StoreFormatError, StoreNotFoundError
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.location import DATA_FILE, LOCK_FILE, check_file_system, prepare_folder, sync
from pdllm_store.merging import MergeReport, merge

_HEADER = struct.Struct("<8sI4xQ8x32s")
_MAGIC, _VERSION = b"PDLLMKV\n", 1
_BYTES_AT_ONCE = 4 << 20


def export_store(store: LMDBStore, file: str | os.PathLike[str]) -> int:
    """Write a store into a new file (mode 0600), as it is at this moment; others may write to it meanwhile.

    It is compact, and holds what the store holds: documents of every model, pins, the cap, evicted chunks as such.
    Returns the file's bytes.

    Raises:
        StoreError: the file is there already or cannot be written, or the store was closed or replaced.
    """
    file = os.path.abspath(file)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StoreError(f"{file} is there already; give another name, or remove it") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "r+b") as out:
            out.write(bytes(_HEADER.size))
            out.flush()
            store._environment.copy_to(descriptor)
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
                digest = blake3.blake3(memoryview(content)[_HEADER.size :]).digest()
                n_bytes = len(content)
            out.seek(0)
            out.write(_HEADER.pack(_MAGIC, _VERSION, n_bytes - _HEADER.size, digest))
            out.flush()
            os.fsync(descriptor)
        sync(os.path.dirname(file))
    except BaseException as error:
        os.unlink(file)
        if isinstance(error, (lmdb.Error, OSError)):
            raise StoreError(f"{store.path} could not be written to {file}: {error}; nothing was exported") from error
        raise
    return n_bytes


def import_store(
    file: str | os.PathLike[str], path: str | os.PathLike[str], *, key: bytes | None = None
) -> MergeReport:
    """Make the store of an export again, or bring the documents that it lacks into a store that is there (`merge`).

    Args:
        path: of a folder. Where there is none, or an empty one, it becomes the store that was exported; in a store that
            is there, what it holds stays as it is, pins and cap too.
        key: of a keyed store.

    Raises:
        StoreFormatError: the file is no export, cut short or damaged, or something else is at the path.
        StoreMismatchError, DocumentConflictError, ChunkNotFoundError: as `merge`.
        StoreError: the file cannot be read, or the disk not written. In all of these cases nothing was changed.
        StoreFullError: the store that is there is full; what went in before stays.
    """
    real = os.path.realpath(path)
    try:
        prepare_folder(real, create=False)
        is_there = True
    except StoreNotFoundError:
        is_there = False
    parent = os.path.dirname(real)
    try:
        os.makedirs(parent, exist_ok=True)
        check_file_system(parent, forced_read_only=False)
        folder = tempfile.mkdtemp(prefix=f".{os.path.basename(real)}-", dir=parent)
    except OSError as error:
        raise StoreError(f"cannot make the folder {real} for a store: {error}") from error
    try:
        _unpack(os.fspath(file), os.path.join(folder, DATA_FILE))
        with LMDBStore.open(folder, create=False, key=key) as found:
            if is_there:
                with LMDBStore.open(real, create=False, key=key) as dest:
                    return _merged(dest, found)
            stats = found.stats()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, LOCK_FILE))
        os.rename(folder, real)  # fails if something has come there meanwhile
        sync(parent)
        return MergeReport(stats.documents, 0, stats.chunks, 0, stats.kv_bytes)
    except OSError as error:
        raise StoreError(f"{file} could not be imported into {real}: {error}; nothing was changed") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merged(dest: LMDBStore, found: LMDBStore) -> MergeReport:
    model = next((f for f in found.fingerprints() if found.documents(f)), None)
    return MergeReport(0, 0, 0, 0, 0) if model is None else merge(dest, [found], model)


def _unpack(file: str, target: str) -> None:
    """Copy the data of an export. Raises StoreFormatError if it is not what the header says, and OSError."""
    with open(file, "rb") as source, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        header = source.read(_HEADER.size)
        if header == bytes(_HEADER.size):
            raise StoreFormatError(f"{file} is an export that broke off; export the store again")
        magic, version, n_bytes, digest = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC:
            raise StoreFormatError(f"{file} is no export of a store; expected a file of `pdllm store export`")
        if version != _VERSION:
            raise StoreFormatError(f"{file} is an export of version {version}, expected {_VERSION}; export it again")
        held = os.fstat(source.fileno()).st_size - _HEADER.size
        if held != n_bytes:
            raise StoreFormatError(f"{file} holds {held} bytes of a store, expected {n_bytes}; copy it again")
        hasher = blake3.blake3()
        while block := source.read(_BYTES_AT_ONCE):
            hasher.update(block)
            out.write(block)
        if hasher.digest() != digest:
            raise StoreFormatError(f"{file} is damaged: its bytes are not those that were exported; copy it again")
        out.flush()
        os.fsync(out.fileno())
