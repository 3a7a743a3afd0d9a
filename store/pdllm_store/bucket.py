"""An object store as far stores need it: objects written once, byte ranges, conditional writes, and errors of ours.

- The credentials are those that obstore finds in the environment. Neither they nor what a service says of them reach a
  message: of an answer, its status and error code are told and nothing else.
- What may pass (5xx, 429, broken connections, timeouts of what can be asked twice) is tried again by obstore.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from pdllm_store.codec import Buffer
from pdllm_store.errors import StoreAccessError, StoreError, StoreNotFoundError, StoreUnavailableError

SCHEMES = ("s3", "gs", "az", "file", "memory")
_N_REQUESTS = 16  # at the same time: a request waits for the network, not for a processor
_ACCESS_CODES = re.compile("Expired|InvalidAccessKey|InvalidToken|SignatureDoesNotMatch|AccessDenied|TokenRefresh")
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|[Cc]redential")  # where they are looked for if there are none
_BEYOND_THE_END = re.compile(r"StartTooLarge|status code: 416")
_MAX_BACKOFF_S = 5
_WRITES = 3  # of an object that is written once: obstore does not repeat a write whose answer was lost
RETRY_S = 60.0

T = TypeVar("T")
R = TypeVar("R")


class Versioned(NamedTuple):
    """An object that is replaced, and what tells this version of it from others."""

    data: bytes
    version: dict[str, str]  # e_tag, and version where the service has one


class Entry(NamedTuple):
    """A listed object."""

    name: str
    n_bytes: int
    age_s: float  # by this machine's clock


class Swap(Protocol):
    """Replaces an object if it is still as it was known; None if it is not."""

    def __call__(self, name: str, data: bytes, known: Versioned | None, /) -> Versioned | None: ...


class Bucket:
    """The objects under one URL."""

    def __init__(self, store: Any, url: str, *, folder: str | None = None) -> None:
        import obstore

        self.url = url
        self.swap: Swap = self._swap_version if folder is None else self._swap_locked
        self._api: Any = obstore
        self._store = store
        self._folder = folder
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(_N_REQUESTS, "pdllm-store-far")

    def get(self, name: str) -> Buffer | None:
        """A whole object, None if it is absent."""
        with suppress(FileNotFoundError), self._told(f"read {name}"):
            return memoryview(self._api.get(self._store, name).bytes())
        return None

    def get_versioned(self, name: str, known: Versioned | None = None) -> Versioned | None:
        """An object that is replaced; `known` itself if it is still that, None if it is absent."""
        options = {} if known is None else {"if_none_match": known.version["e_tag"]}
        with self._told(f"read {name}"):
            try:
                found = self._api.get(self._store, name, options=options)
                version = _version(found.meta)  # before the bytes: older releases forget it with them
                return Versioned(bytes(found.bytes()), version)
            except FileNotFoundError:
                return None
            except self._api.exceptions.NotModifiedError:
                return known

    def range(self, name: str, start: int, end: int) -> memoryview | None:
        """Bytes start to end of an object; None if it is absent or ends before them."""
        with suppress(FileNotFoundError), self._told(f"read {name}"):
            try:
                # Not get_ranges: on an object that was cut short it panics, which is no Exception.
                part = memoryview(self._api.get_range(self._store, name, start=start, end=end))
            except self._api.exceptions.GenericError as error:
                if not _BEYOND_THE_END.search(str(error)):
                    raise
                return None
            return part if len(part) == end - start else None
        return None

    def create(self, name: str, data: Buffer) -> bool:
        """Write an object unless there is one of that name already; False if there is."""
        for left in reversed(range(_WRITES)):
            try:
                with self._told(f"write {name}", absent_is_told=True):
                    self._api.put(self._store, name, data, mode="create")
                return True
            except self._api.exceptions.AlreadyExistsError:
                return False
            except StoreUnavailableError:
                if not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def replace(self, name: str, data: Buffer) -> None:
        """Write an object, whatever was there."""
        with self._told(f"write {name}", absent_is_told=True):
            self._api.put(self._store, name, data, use_multipart=False)

    def head(self, name: str) -> Entry | None:
        with suppress(FileNotFoundError), self._told(f"look at {name}"):
            return _entry(self._api.head(self._store, name))
        return None

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every object whose name begins with that folder's."""
        with self._told(f"list {prefix}", absent_is_told=True):
            for page in self._api.list(self._store, prefix=prefix):
                yield from map(_entry, page)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are absent are passed over."""
        with self._told(f"delete {len(names)} objects"):
            try:
                self._api.delete(self._store, names)
            except FileNotFoundError:  # which some services say, and stop there
                for name in names:
                    with suppress(FileNotFoundError):
                        self._api.delete(self._store, name)

    def check_conditions(self) -> None:
        """Raises StoreError unless conditional writes keep their promise: some services take and ignore conditions."""
        name = f"probe-{secrets.token_hex(8)}"
        self.create(name, b"1")
        first = self.get_versioned(name)
        second = first and self.swap(name, b"2", first)
        if second is None or self.create(name, b"3") or self.swap(name, b"3", first):
            raise StoreError(
                f"{self.url} writes whether its conditions hold or not, so writers would overwrite each other; use a "
                "service that honours If-Match and If-None-Match"
            )
        self.delete([name])

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What a function of this bucket gives for each item, several requests at a time."""
        self._check_process()
        return list(self._threads.map(function, items))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _swap_version(self, name: str, data: bytes, known: Versioned | None) -> Versioned | None:
        mode: Any = "create" if known is None else known.version
        failed = self._api.exceptions
        with self._told(f"replace {name}"):
            try:
                return Versioned(data, _version(self._api.put(self._store, name, data, mode=mode)))
            except (failed.AlreadyExistsError, failed.PreconditionError, FileNotFoundError):
                return None

    def _swap_locked(self, name: str, data: bytes, known: Versioned | None) -> Versioned | None:
        """A folder knows no conditional replacing: a lock stands in for it, among all who share the file system."""
        assert self._folder is not None
        lock_name = os.path.join(self._folder, f"{name}.lock")
        with self._told(f"replace {name}", absent_is_told=True), open(lock_name, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = self.get_versioned(name)
            if (held and held.data) != (known and known.data):
                return None
            return Versioned(data, _version(self._api.put(self._store, name, data, use_multipart=False)))

    @contextmanager
    def _told(self, doing: str, *, absent_is_told: bool = False) -> Iterator[None]:
        """Errors as ours; those that callers tell apart pass as they are."""
        self._check_process()
        failed = self._api.exceptions
        try:
            yield
        except FileNotFoundError:
            if not absent_is_told:
                raise
            raise StoreNotFoundError(f"{self.url} could not {doing}: its bucket is not there; make it first") from None
        except OSError as error:
            raise StoreError(f"{self.url} could not {doing}: {error.strerror}; check its permissions") from error
        except NotImplementedError:
            raise StoreError(f"{self.url} cannot {doing}: it has no conditional writes, which a store needs") from None
        except failed.BaseError as error:  # `from None`: a service repeats tokens in its answers
            if isinstance(error, (failed.AlreadyExistsError, failed.PreconditionError, failed.NotModifiedError)):
                raise
            refused = isinstance(error, (failed.PermissionDeniedError, failed.UnauthenticatedError))
            raise _translated(self.url, doing, str(error), refused=refused) from None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # obstore's threads are the parent's, and a request would wait for ever
            raise StoreError(
                f"{self.url} was opened before this process was forked, and cannot be used here; start workers by "
                "spawn, and let each open the store"
            )


def open_bucket(url: str, *, create: bool, retry_s: float) -> Bucket:
    """The objects under a URL: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, memory://.

    Args:
        create: make the folder of a file URL.
        retry_s: a request that failed so many seconds ago is not tried again.

    Raises:
        ValueError: no such URL.
        StoreNotFoundError: the folder is not there.
        StoreError: the package obstore is not installed, or lacks a setting.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or (parts.scheme != "memory" and not (parts.netloc or parts.path)):
        raise ValueError(
            f"{parts.scheme}:// is no store; expected one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a store's URL holds a name only; credentials and settings belong into the environment")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, MemoryStore, from_url
    except ImportError as error:
        raise StoreError("stores by URL need obstore; install it with pip install 'pdllm-rag[scale]'") from error
    if parts.scheme == "memory":
        return Bucket(MemoryStore(), url)
    url = url.rstrip("/")
    if parts.scheme == "file":
        folder = unquote(parts.path)
        if parts.netloc:
            raise ValueError(f"{url} names a machine; expected file:///{parts.netloc}{parts.path}")
        if create:
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make the folder of {url}: {error.strerror}; give another place") from error
        if not os.path.isdir(folder):
            raise StoreNotFoundError(f"there is no store at {url}; prefill some documents into it, or check the path")
        return Bucket(LocalStore(folder), url, folder=folder)
    backoff = {"max_backoff": timedelta(seconds=_MAX_BACKOFF_S)}
    retry = {"retry_timeout": timedelta(seconds=retry_s), "backoff": backoff}
    try:
        store = from_url(url, retry_config=retry)
    except BaseError as error:
        reason = str(error).partition("\n")[0]
        raise StoreError(f"{url} cannot be opened: {reason}; check the URL and the environment's settings") from None
    return Bucket(store, url)


def _translated(url: str, doing: str, text: str, *, refused: bool) -> StoreError:
    """An error of ours from what obstore says, of which nothing but status and error code is repeated."""
    status, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,60})</Code>", text)
    said = " ".join(match[1] for match in (status, code) if match)
    if not said and url.startswith("file:"):
        said = text.partition("\n")[0]
    said = said or ("timed out" if "timed out" in text or "TimedOut" in text else "no connection")
    failure = f"{url} could not {doing} ({said})"
    if refused or (code and _ACCESS_CODES.search(code[1])) or _NO_CREDENTIALS.search(text):
        return StoreAccessError(
            f"{failure}; check that the environment's credentials are there, are not expired and allow this"
        )
    if status and status[1].startswith("4") and status[1] not in ("408", "429"):
        return StoreError(f"{failure}; check the URL and the environment's settings")
    return StoreUnavailableError(f"{failure}, and trying again did not help; check the network, or try again later")


def _version(meta: Any) -> dict[str, str]:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _entry(meta: Any) -> Entry:
    modified: datetime = meta["last_modified"]
    return Entry(meta["path"], meta["size"], (datetime.now(timezone.utc) - modified).total_seconds())
