"""Writing below the cap: room is made before anything is written, and the order of use is kept on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from pdllm_store import chunks, eviction
from pdllm_store.errors import RecordDamagedError, StoreFullError
from pdllm_store.tables import Space, Tables
from pdllm_store.types import ChunkId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_USES_AT_ONCE = 1024
_USES_S = 60.0  # a reader's uses are on disk after so many seconds, or are lost if it is killed before
_MAX_PASSES = 100  # of making room while others take it
_MOST_LAG = 16  # transactions: what was freed since a snapshot that is read now cannot be used again
_SNAPSHOT_S, _POLL_S = 5.0, 0.02  # how long a write near the cap waits for old snapshots to end


class Transactions(Protocol):
    """All-or-nothing access to the tables; safe to use from several threads."""

    @property
    def read_only(self) -> bool: ...

    @property
    def room_bytes(self) -> int | None:
        """Size that the file can have at most, whatever the cap; None for any."""
        ...

    def read(self) -> AbstractContextManager[Tables]:
        """One snapshot of all tables. No other transaction of this thread may begin inside."""
        ...

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        """Run `body` in a write transaction, kept whole if it returns and dropped whole if it raises.

        `needed` is the number of bytes that it writes, for the message of StoreFullError.
        """
        ...

    def file_bytes(self) -> int: ...

    def close(self) -> None: ...


class CappedWrites:
    """Write transactions that respect the store's cap, and what was used since the last one."""

    def __init__(self, transactions: Transactions, *, path: str) -> None:
        self._transactions = transactions
        self._path = path
        self._lock = threading.Lock()
        self._used_ms: dict[ChunkId, int] = {}  # not written yet
        self._written_at = time.monotonic()

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        """Run `body`, which frees more than it takes or at most takes `needed` bytes, when there is room for it.

        Raises:
            StoreFullError: there is no room, and no more may be evicted; nothing was changed.
        """
        deadline = time.monotonic() + _SNAPSHOT_S
        n_passes = 0
        while n_passes < _MAX_PASSES:
            uses = self._uses()

            def checked(tables: Tables, uses: dict[ChunkId, int] = uses) -> T:
                chunks.touch(tables, uses)
                if needed:
                    self._check_room(tables, needed)
                return body(tables)

            try:
                result = self._transactions.write(checked, needed=needed)
            except _NoRoomError as full:
                n_passes += 1
                self._make_room(full, needed)
            except _OldSnapshotError as old:
                if time.monotonic() > deadline:
                    raise StoreFullError(
                        f"{self._path} has reached its cap, and its free pages cannot be used: somebody has been "
                        f"reading a snapshot {old.lag} transactions old for {_SNAPSHOT_S:.0f} s (`verify`, a stopped "
                        f"reader); {needed} more bytes needed, and nothing of it was kept. Try again later"
                    ) from None
                time.sleep(_POLL_S)
            else:
                self._forget(uses)
                return result
        raise StoreFullError(f"{self._path} is filled by others faster than room is made for {needed} bytes; try again")

    def note_use(self, chunk_ids: Iterable[ChunkId]) -> bool:
        """Remember that chunks were used now; True if it is time to write that, which may wait for another writer."""
        if self._transactions.read_only:
            return False
        now_ms = eviction.now_ms()
        with self._lock:
            self._used_ms.update(dict.fromkeys(chunk_ids, now_ms))
            due = len(self._used_ms) > _USES_AT_ONCE or time.monotonic() - self._written_at > _USES_S
            if due:
                self._written_at = time.monotonic()  # not again at once, if it cannot be written
        return due

    def write_uses(self) -> None:
        """Write what is remembered; it stays remembered if that fails."""
        if self._uses():
            self.write(lambda _tables: None)

    def renew_lock(self) -> None:
        """In a forked child: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def cap(self, tables: Tables) -> int | None:
        """The cap that the store remembers; a damaged one is logged and holds no more."""
        try:
            return eviction.read_max_bytes(tables)
        except RecordDamagedError as error:
            logger.warning("%s has no cap until it is set again: %s", self._path, error)
            return None

    def _check_room(self, tables: Tables, needed: int) -> None:
        cap, room = self.cap(tables), self._transactions.room_bytes
        limits = [limit for limit in (cap, room) if limit is not None]
        if not limits:
            return
        space, limit = tables.space(), min(limits)
        if (too_many := eviction.bytes_too_many(space, needed, limit)) > 0:
            raise _NoRoomError(too_many, limit, space, may_evict=cap is not None)
        is_near = space.used_bytes + space.free_bytes + needed > limit
        if is_near and (lag := tables.snapshot_lag()) > _MOST_LAG:
            raise _OldSnapshotError(lag)

    def _make_room(self, full: _NoRoomError, needed: int) -> None:
        ahead = full.too_many + eviction.bytes_ahead(full.limit)
        possible = full.may_evict and needed <= eviction.could_ever_hold(full.limit)
        done = self._transactions.write(lambda tables: eviction.evict(tables, ahead)) if possible else None
        if possible and done is None:
            done = self._transactions.write(lambda tables: eviction.evict(tables, full.too_many))
        if done is None:
            raise self._full(full, needed)
        logger.info("%s: %d chunks evicted to make room for %d bytes", self._path, done, needed)
        # What a transaction frees can be used two transactions later.
        self._transactions.write(eviction.mark)

    def _full(self, full: _NoRoomError, needed: int) -> StoreFullError:
        if not full.may_evict:
            limit = "map"
            rest = "without a cap, nothing is evicted). Delete documents, or open it with a larger map_size"
        elif needed > eviction.could_ever_hold(full.limit):
            limit, rest = "cap", "that is more than fits at once). Raise the cap, or ask for less at once"
        else:
            limit = "cap"
            rest = "what is left is pinned, unfinished or no KV). Delete or unpin documents, or raise the cap"
        return StoreFullError(
            f"{self._path} is full: {full.space.used_bytes} bytes used (and {full.space.free_bytes} free in the file) "
            f"of a {limit} of {full.limit}, of which a part is kept free; {needed} more needed, and nothing of it was "
            f"kept ({rest}"
        )

    def _uses(self) -> dict[ChunkId, int]:
        with self._lock:
            return dict(self._used_ms)

    def _forget(self, written: dict[ChunkId, int]) -> None:
        with self._lock:
            self._written_at = time.monotonic()
            for chunk_id, used_ms in written.items():
                if self._used_ms.get(chunk_id) == used_ms:
                    del self._used_ms[chunk_id]


class _NoRoomError(Exception):
    """A write has to wait until room is made."""

    def __init__(self, too_many: int, limit: int, space: Space, *, may_evict: bool) -> None:
        super().__init__(f"{too_many} bytes too many")
        self.too_many = too_many
        self.limit = limit
        self.space = space
        self.may_evict = may_evict


class _OldSnapshotError(Exception):
    """Pages that were freed cannot be used yet, and the file must not grow."""

    def __init__(self, lag: int) -> None:
        super().__init__(f"a snapshot is {lag} transactions old")
        self.lag = lag
