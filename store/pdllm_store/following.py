"""Transactions over a view of what a far store has published: the view follows, and changes of documents are published.

- The view is the tables of a local LMDB environment, which keep what they have followed from one process to the next.
  A chunk that the far store holds has a row there.
- A transaction that changes documents is kept only if its outcome could be published. If another writer was faster,
  the view follows and the transaction runs again on what is now published, so that both changes hold.
- Other transactions (chunks that no document refers to yet, evictions, uses) change the view alone.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from pdllm_store import chunks, documents, eviction
from pdllm_store.bucket import Bucket
from pdllm_store.capped import CappedWrites, Transactions
from pdllm_store.codec import Buffer
from pdllm_store.counts import read_state, set_generation
from pdllm_store.errors import (
    RecordDamagedError,
    StoreConflictError,
    StoreFormatError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from pdllm_store.far_kv import plan_of
from pdllm_store.published import (
    Head,
    PublishedDocument,
    Segment,
    merged,
    publish,
    read_head,
    read_segments,
)
from pdllm_store.rows import ChunkRow, pack_chunk, pack_map, unpack_chunk, unpack_map
from pdllm_store.tables import OverTables, Table, Tables
from pdllm_store.types import ID_BYTES, ChunkId

T = TypeVar("T")
_KEY = b"followed"
_MAX_FOLLOWED = 5  # manifests that were replaced, and their segments collected, while they were read
_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0  # the first is about as long as publishing takes
_RACE_S = 120.0  # for so long, a change that another writer was faster than is tried again


class Followed(NamedTuple):
    """What a view shows: a store's identity, and the manifest whose segments were applied."""

    store_id: str = ""
    generation: int = -1
    segments: tuple[str, ...] = ()


def read_followed(tables: Tables) -> Followed:
    """Raises RecordDamagedError."""
    value = tables.get("manifest", _KEY)
    if value is None:
        return Followed()
    fields = unpack_map("followed", _KEY, value)
    return Followed(**{**fields, "segments": tuple(fields["segments"])})


class Reach(Protocol):
    """Where the KV of a view's chunks is."""

    def tables(self, tables: Tables) -> Tables:
        """The view as a store works on it."""
        ...

    def row(self, whole: ChunkRow) -> ChunkRow:
        """The row of a chunk that the far store holds and nobody has read here."""
        ...


class FollowingTransactions:
    """`Transactions` of one handle.

    Args:
        close: ends the view, and whatever else ends with this.
    """

    def __init__(
        self,
        bucket: Bucket,
        head: Head,
        view: Transactions,
        reach: Reach,
        *,
        read_only: bool,
        close: Callable[[], None],
    ) -> None:
        self._bucket = bucket
        self._head = head
        self._view = view
        self._reach = reach
        self._read_only = read_only
        self._close = close
        self._lock = threading.RLock()  # of the head; whoever needs the view's lock as well takes it second
        self._refreshed_at = -float("inf")
        with view.read() as tables:
            followed, in_use = read_followed(tables), any(True for _ in tables.keys("documents"))
        if followed.store_id not in ("", head.manifest.store_id):
            raise StoreMismatchError(
                f"the cache is that of another store than {bucket.url}; give it a folder of its own"
            )
        if in_use and not followed.store_id:
            raise StoreFormatError(f"the cache of {bucket.url} would overwrite a store; give it a folder of its own")

    @property
    def read_only(self) -> bool:
        return self._read_only

    @property
    def room_bytes(self) -> int | None:
        return self._view.room_bytes

    @contextmanager
    def read(self) -> Iterator[Tables]:
        with self._view.read() as tables:
            yield self._reach.tables(tables)

    def file_bytes(self) -> int:
        return self._view.file_bytes()

    def close(self) -> None:
        self._close()

    def refresh(self, *, max_age_s: float = 0.0) -> bool:
        """Follow what is published now, unless that was done less than so many seconds ago; whether it is new here.

        Raises:
            StoreNotFoundError: the store is gone.
            StoreError, RecordDamagedError: it cannot be read.
        """
        if not self._lock.acquire(blocking=not max_age_s):
            return False  # another thread is at it, or publishes
        try:
            now, before = time.monotonic(), self._head
            if now - self._refreshed_at >= max_age_s:
                self._head = self._latest()
                self._refreshed_at = now
            return self._head is not before
        finally:
            self._lock.release()

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        if self._read_only:
            url = self._bucket.url
            raise StoreReadOnlyError(f"{url} was opened read-only; open it without read_only to change it")
        deadline = time.monotonic() + _RACE_S
        pause_s = 0.0  # at first the view may only have been behind
        while True:
            try:
                with self._lock:
                    return self._write(body, needed)
            except _LostRaceError:
                if time.monotonic() > deadline:
                    raise StoreConflictError(
                        f"{self._bucket.url}: for {_RACE_S:.0f} s other writers published first each time, and nothing "
                        "was changed; try again, or let fewer writers publish at once"
                    ) from None
            time.sleep(random.uniform(0, pause_s))  # the more writers there are, the longer each of them waits
            pause_s = min(2 * pause_s or _PAUSE_S, _MAX_PAUSE_S)
            self.refresh()

    def _latest(self) -> Head:
        """The manifest in force, once the view shows it or a later one."""
        head: Head | None = self._head
        for _ in range(_MAX_FOLLOWED):
            head = read_head(self._bucket, head)
            if head is None:
                raise StoreNotFoundError(f"there is no store at {self._bucket.url} any more")
            if self._follow(head):
                return head
        raise RecordDamagedError(
            f"{self._bucket.url}: manifest {head and head.name} cannot be followed: its segments are gone, or it was "
            "set back to an earlier state than the cache shows; restore them, or delete the cache's folder"
        )

    def _write(self, body: Callable[[Tables], T], needed: int) -> T:
        head = self._head

        def run(tables: Tables) -> T:
            nonlocal head
            noting = _NotingTables(self._reach.tables(tables))
            result = body(noting)
            if noting.changed:
                head = self._publish(tables, noting.changed)
            return result

        result = self._view.write(run, needed=needed)
        self._head = head
        return result

    def _publish(self, tables: Tables, keys: Iterable[bytes]) -> Head:
        """Publish what a transaction has made of documents. Raises _LostRaceError."""
        head = publish(self._bucket, self._head, _segment(tables, keys), generation=read_state(tables).generation)
        if head is None:
            raise _LostRaceError
        _write_followed(tables, head)
        return head

    def _follow(self, head: Head) -> bool:
        """Bring the view to a manifest; False if it could not be, or another process has brought it to a later one."""
        with self._view.read() as tables:
            before = read_followed(tables)
        if before.generation >= head.manifest.generation:
            return before.generation == head.manifest.generation
        refs = head.manifest.segments
        n_known = 0
        while n_known < min(len(before.segments), len(refs)) and before.segments[n_known] == refs[n_known].name:
            n_known += 1
        segments = read_segments(self._bucket, refs[n_known:])
        if segments is None:
            return False

        def body(tables: Tables) -> bool:
            if read_followed(tables) != before:
                return False
            _apply(tables, merged(segments), self._reach, alone=not n_known)
            set_generation(tables, head.manifest.generation)
            _write_followed(tables, head)
            return True

        needed = eviction.written_bytes([2 * ref.n_bytes for ref in refs[n_known:]])  # trees are not full
        return CappedWrites(self._view, path=f"the cache of {self._bucket.url}").write(body, needed=needed)


class _LostRaceError(Exception):
    """Another manifest is in force than the view shows."""


class _NotingTables(OverTables):
    """Notes which documents are written or deleted."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.changed: dict[bytes, None] = {}

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        if table == "documents":
            self.changed[key] = None
        super().put(table, key, value)

    def delete(self, table: Table, key: bytes) -> bool:
        if table == "documents":
            self.changed[key] = None
        return super().delete(table, key)


def _write_followed(tables: Tables, head: Head) -> None:
    manifest = head.manifest
    shown = Followed(manifest.store_id, manifest.generation, tuple(ref.name for ref in manifest.segments))
    tables.put("manifest", _KEY, pack_map(_KEY, shown._asdict()))


def _segment(tables: Tables, keys: Iterable[bytes]) -> Segment:
    """Documents as they are now in the tables."""
    segment = Segment({}, {})
    for key in keys:
        rows = documents.stored(tables, key)
        segment.documents[key] = rows and PublishedDocument(rows, _chunk_rows(tables, key, rows.refs))
        fingerprint = tables.get("fingerprints", key[:ID_BYTES])
        if rows is not None and fingerprint is not None:
            segment.fingerprints[key[:ID_BYTES]] = bytes(fingerprint)
    return segment


def _chunk_rows(tables: Tables, key: bytes, refs: Sequence[bytes]) -> dict[ChunkId, bytes]:
    rows = {}
    for chunk_id in documents.referred(key, refs):
        row = chunks.chunk_row(tables, chunk_id)
        if row is not None:
            published = row._replace(refcount=0, pins=0, n_groups=0, group_layers=0, kv_bytes=0, used_ms=0)
            rows[chunk_id] = pack_chunk(chunk_id, published)
    return rows


def _apply(tables: Tables, change: Segment, reach: Reach, *, alone: bool) -> None:
    """Bring the tables to what a segment says.

    Args:
        alone: it is the whole store: documents that it lacks go.
    """
    for digest, fingerprint in change.fingerprints.items():
        tables.put("fingerprints", digest, fingerprint)
    if alone:
        for key in [key for key in tables.keys("documents") if change.documents.get(key) is None]:
            documents.delete_key(tables, key)
    for key, entry in change.documents.items():
        if entry is None:
            documents.delete_key(tables, key)
        elif not _shows(tables, key, entry):
            for chunk_id, sealed in entry.chunks.items():
                _admit(tables, chunk_id, sealed, reach)
            documents.replace(tables, key, entry.rows)


def _shows(tables: Tables, key: bytes, entry: PublishedDocument) -> bool:
    try:
        return documents.stored(tables, key) == entry.rows
    except RecordDamagedError:
        return False


def _admit(tables: Tables, chunk_id: ChunkId, sealed: bytes, reach: Reach) -> None:
    """Give a chunk that the far store holds a row, unless it has one that says so."""
    old = chunks.sound_row(tables, chunk_id)
    if old is not None and (old.n_groups or old.kv_bytes):
        return
    row = unpack_chunk(chunk_id, sealed)
    plan = plan_of(tables, chunk_id, row)
    whole = row._replace(
        refcount=old.refcount if old else 0,
        pins=old.pins if old else 0,
        n_groups=plan.n_groups,
        group_layers=plan.group_layers,
        kv_bytes=plan.kv_bytes,
        used_ms=eviction.now_ms(),
    )
    chunks.write_row(tables, chunk_id, reach.row(whole))
