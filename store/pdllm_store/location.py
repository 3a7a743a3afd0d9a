"""Where a store may lie: what a folder must hold, and which file systems LMDB cannot work on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import tempfile
from pathlib import Path

from pdllm_store.errors import StoreError, StoreFormatError, StoreNotFoundError

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"  # LMDB's own; never open it: closing any descriptor of it would drop LMDB's locks
USE_LOCK_FILE = "store.lock"  # held shared by every open store, exclusively by `compact`
COMPACT_FOLDER = "compact.tmp"
DERIVED_FOLDER = "derived"  # indexes and other files that can be made again

_ALMOST_FULL = 1 << 20

# Memory maps and byte-range locks are not coherent between the machines of these.
_NETWORK_TYPES = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "ocfs2"}
_NETWORK_PREFIXES = ("nfs", "smb", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse")


def prepare_folder(path: str, *, create: bool) -> None:
    """Check that a path may be opened as a store, and make its folder (mode 0700) if it may be created.

    Raises:
        StoreNotFoundError: nothing is there and nothing may be created.
        StoreFormatError: something else is there.
    """
    if os.path.isdir(path):
        names = set(os.listdir(path))
        if DATA_FILE in names:
            return
        if others := sorted(names - {LOCK_FILE, USE_LOCK_FILE, COMPACT_FOLDER}):
            raise StoreFormatError(
                f"{path} is a folder of something else (it holds {others[0]!r} and no {DATA_FILE}); "
                "give an empty or a new folder"
            )
        if not create:
            raise StoreNotFoundError(f"{path} is an empty folder, expected a store; prefill some documents into it")
    elif os.path.lexists(path):
        raise StoreFormatError(f"{path} is no folder, and a store is one; give an empty or a new folder")
    elif not create:
        raise StoreNotFoundError(f"there is no store at {path}; prefill some documents into it, or check the path")
    else:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileExistsError):  # somebody else was faster
                os.mkdir(path, mode=0o700)
        except OSError as error:
            raise StoreError(f"cannot make the folder {path} for a store: {error}") from error


def check_file_system(path: str, *, forced_read_only: bool, mounts: str = "/proc/mounts") -> bool:
    """Whether LMDB's locks work at a path: not on a network file system (known on Linux only).

    Raises:
        StoreError: it is one, and the store is not to be read only there by force.
    """
    kind = file_system_type(path, mounts=mounts)
    if kind is None or not (kind in _NETWORK_TYPES or kind.startswith(_NETWORK_PREFIXES)):
        return True
    if not forced_read_only:
        raise StoreError(
            f"{path} lies on a network file system ({kind}), where LMDB's memory map and locks are not reliable; "
            "use a local disk, or open it with read_only=True and force=True if nobody writes to it meanwhile"
        )
    return False


def may_lock(path: str) -> bool:
    """Whether a reader may write to the lock file of the store in a folder, or make it."""
    name = os.path.join(path, LOCK_FILE)
    return os.access(name if os.path.exists(name) else path, os.W_OK)


def file_system_type(path: str, *, mounts: str = "/proc/mounts") -> str | None:
    """The type of the file system that holds a path, None where the system does not say."""
    try:
        lines = Path(mounts).read_bytes().splitlines()
    except OSError:
        return None
    real = os.fsencode(os.path.realpath(path))
    best, kind = b"", None
    for line in lines:
        fields = line.split(b" ")
        if len(fields) < 3:
            continue
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), fields[1])  # \040 is a blank
        inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):  # the later mount of one point hides the earlier
            best, kind = point, os.fsdecode(fields[2])
    return kind


def lacks_room(path: str, needed: int) -> bool:
    """Whether the store in a folder cannot grow by so many bytes, because of the disk, a quota or a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    wanted = needed + _ALMOST_FULL
    if limit != resource.RLIM_INFINITY and os.stat(os.path.join(path, DATA_FILE)).st_size + wanted > limit:
        return True
    try:
        with tempfile.TemporaryFile(dir=path) as probe:
            os.posix_fallocate(probe.fileno(), 0, wanted)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return False


def sync(path: str | os.PathLike[str]) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_bytes(path: str) -> int:
    """Bytes that the files of a store really occupy; sparse holes count for nothing."""
    total = 0
    for name in (DATA_FILE, LOCK_FILE):
        try:
            total += os.stat(os.path.join(path, name)).st_blocks * 512
        except FileNotFoundError:
            continue
    return total
