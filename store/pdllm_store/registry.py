"""The environments of this process: LMDB allows each file to be open once, so handles on one store share it."""

from __future__ import annotations

import os
import threading

from pdllm_store import location
from pdllm_store.environment import MAP_SIZE, Access, Environment
from pdllm_store.errors import StoreError, StoreMismatchError
from pdllm_store.types import KVDtype

_environments: dict[tuple[int, int], Environment] = {}  # by device and inode of the folder
_lock = threading.Lock()
_watches_forks = False


def acquire(
    path: str, *, create_as: KVDtype | None, map_size: int | None, key: bytes | None, read_only: bool, locked: bool
) -> Environment:
    """The environment of a folder, opened or shared; every call needs one `release`.

    Args:
        create_as: stored dtype of a store that may be created, None if none may.
        map_size: size of the map in bytes; None takes what is open, or 1 TiB.
        read_only: an environment that others opened for writing will do as well.
        locked: use LMDB's reader table.

    Raises:
        StoreNotFoundError, StoreFormatError, StoreError.
    """
    global _watches_forks
    with _lock:
        location.prepare_folder(path, create=create_as is not None)
        folder = _folder_key(path)
        environment = _environments.get(folder)
        if environment is None:
            if not _watches_forks:
                os.register_at_fork(
                    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
                )
                _watches_forks = True
            access = Access(map_size or MAP_SIZE, key, read_only, locked)
            environment = Environment(path, access, create_as=create_as)
            _environments[folder] = environment
        elif not environment.is_in_place():
            raise StoreError(f"{path} was removed or replaced while this process had it open; close its handles first")
        elif map_size not in (None, environment.access.map_size):
            raise StoreError(
                f"{path} is open in this process with a map of {environment.access.map_size} bytes, not {map_size}; "
                "close it first, or ask for the same"
            )
        elif key != environment.access.key:
            raise StoreMismatchError(f"{path} is open in this process with another key; open it with the same")
        elif environment.read_only and not read_only:
            raise StoreError(f"{path} is open read-only in this process; close it first, or open it read-only too")
        environment.n_handles += 1
        return environment


def release(environment: Environment) -> None:
    """Give an environment back; the last one closes it."""
    with _lock:
        environment.n_handles -= 1
        if environment.n_handles == 0:
            for folder in [folder for folder, value in _environments.items() if value is environment]:
                del _environments[folder]
            environment.close()


def _folder_key(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _before_fork() -> None:
    _lock.acquire()
    for environment in _environments.values():
        environment.gate.shut()


def _after_in_parent() -> None:
    for environment in _environments.values():
        environment.gate.open()
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for environment in _environments.values():
        environment.renew_locks()
