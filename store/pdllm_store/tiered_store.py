"""A far store with a local one in front: what was read or written here is read from the local disk from then on.

Writing goes through: a chunk is an object before `put` returns, and a document is visible everywhere before
`add_documents` returns. So nothing is lost with this machine, and the local folder may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

from pdllm_store import chunks, eviction, loading, record
from pdllm_store.bucket import RETRY_S, Bucket
from pdllm_store.errors import RecordDamagedError, StoreError, StoreFullError
from pdllm_store.far_kv import Records, fetch_records
from pdllm_store.following import Reach
from pdllm_store.garbage import RENEW_S
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.loading import Plan
from pdllm_store.object_store import Loaded, ObjectChunkStore
from pdllm_store.published import Head
from pdllm_store.rows import ChunkRow, kv_key
from pdllm_store.table_store import TableStore
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ChunkId, ChunkKV, Document, KVDtype, ModelFingerprint
from pdllm_store.verification import Progress, VerifyReport

logger = logging.getLogger(__name__)

_ROW_BYTES = 8192  # of a chunk's row without its tokens, at most


class TieredChunkStore(ObjectChunkStore):
    """A `ChunkStore` under a URL, with a folder of this machine as its cache; make one with `TieredChunkStore.open`.

    The cache is an LMDB store that several processes may share. Its cap evicts as any store's does, but what is evicted
    is fetched again and not computed, and so is KV that is damaged here.
    """

    def __init__(
        self, bucket: Bucket, head: Head, near: LMDBStore, options: Mapping[str, Any], resources: ExitStack
    ) -> None:
        super().__init__(bucket, head, near, options, resources)
        self._flights = Flights()

    @classmethod
    def open(  # type: ignore[override]
        cls,
        url: str,
        *,
        cache: str | os.PathLike[str],
        cache_bytes: int | None = None,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        read_only: bool = False,
        verify_reads: bool = True,
        retry_s: float = RETRY_S,
    ) -> TieredChunkStore:
        """Open the store under a URL with a cache in front, and make either if need be.

        Args:
            cache: a local folder, of this store alone.
            cache_bytes: cap of the cache's file, at least 1 MiB; the cache remembers it, and None leaves it as it is.
            read_only: change nothing under the URL; the cache is filled all the same.

        The others, and what is raised, are as of `ObjectChunkStore.open`; in addition:

        Raises:
            StoreMismatchError, StoreFormatError: the folder is the cache of another store, or something else.
            ValueError: a URL of memory, which has nothing to cache.
        """
        if url.startswith("memory:"):
            raise ValueError(f"{url} lies in memory, so a cache on disk is of no use; open it without one")
        options = {
            "read_only": read_only,
            "verify_reads": verify_reads,
            "retry_s": retry_s,
            "cache": os.fspath(cache),
            "cache_bytes": cache_bytes,
        }

        def near(kv_dtype: KVDtype, _resources: ExitStack) -> LMDBStore:
            return LMDBStore.open(cache, kv_dtype=kv_dtype)

        eviction.check_max_bytes(cache_bytes)
        store = cls._open(url, near, options, kv_dtype=kv_dtype, create=create)
        if cache_bytes is not None:
            store.set_max_bytes(cache_bytes)
        return store

    evict = TableStore.evict
    set_max_bytes = TableStore.set_max_bytes

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        with self._transactions.read() as tables:
            return [chunk_id for chunk_id in chunks.missing(tables, chunk_ids) if not self._is_far(tables, chunk_id)]

    def evicted(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:  # noqa: ARG002
        """None: what the cache has evicted is still held."""
        self._check_open()
        return []

    def add_documents(
        self, fingerprint: ModelFingerprint, added: Sequence[Document]
    ) -> list[bool | StoreError | ValueError]:
        self._renew({ref.chunk_id for document in added for ref in document.chunks})
        return super().add_documents(fingerprint, added)

    def prefetch(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Begin to bring the KV of chunks into the cache and into memory, and return at once."""
        self._check_open()
        self._workers.later(partial(self._bring, list(dict.fromkeys(chunk_ids))))

    def verify(self, progress: Progress | None = None, *, recompute_share: float = 0.0, seed: int = 0) -> VerifyReport:
        """Check what is under the URL, as `ObjectChunkStore.verify` does; what is damaged in the cache mends itself."""
        self._recomputing.check_share(recompute_share)
        far_options = {name: self._options[name] for name in ("verify_reads", "retry_s")}
        with ObjectChunkStore.open(self._path, read_only=True, **far_options) as far:
            far._recomputing = self._recomputing
            return far.verify(progress, recompute_share=recompute_share, seed=seed)

    def _reach(self) -> Reach:
        return _Cached()

    def _keep(self, fingerprint: ModelFingerprint, encoded: Sequence[chunks.EncodedChunk]) -> int:
        try:
            return super()._keep(fingerprint, encoded)
        except StoreFullError as error:
            logger.info("%d chunks were written to %s and not to its cache: %s", len(encoded), self._path, error)
            without_kv = [chunk._replace(row=_evicted(chunk.row), records=[]) for chunk in encoded]
            TableStore._keep(self, fingerprint, without_kv)
            return sum(chunk.row.kv_bytes for chunk in encoded)

    def _read_kv(self, chunk_ids: Sequence[ChunkId], out: Mapping[ChunkId, ChunkKV], layers: range | None) -> Loaded:
        kv, lacking = TableStore._read_kv(self, chunk_ids, out, layers)
        if not lacking:
            return kv, lacking
        damaged = {chunk_id: error for chunk_id, error in lacking.items() if isinstance(error, RecordDamagedError)}
        for error in damaged.values():
            self._on_damage(error)
        plans, failures = self._plans(lacking)
        records = self._flights.fetch(plans, partial(self._fetch, damaged=damaged))
        found, failed = self._decode(list(lacking), plans, failures, records, out, layers)
        return kv | found, failed

    def _bring(self, chunk_ids: Sequence[ChunkId]) -> None:
        with self._transactions.read() as tables:
            absent = [chunk_id for chunk_id in chunk_ids if self._is_far(tables, chunk_id)]
        self._flights.fetch(self._plans(absent)[0], partial(self._fetch, damaged=frozenset()))
        loading.touch_pages(self._near._transactions.read, chunk_ids, self._workers.stopping)

    def _fetch(self, plans: Mapping[ChunkId, Plan], *, damaged: Iterable[ChunkId]) -> Records:
        """Records of chunks, whole; those that another thread has brought meanwhile from the cache."""
        records: Records = {}
        absent = dict(plans)
        with self._near._transactions.read() as tables:
            for chunk_id in plans.keys() - set(damaged):
                if not chunks.missing(tables, [chunk_id]):
                    records |= {key: memoryview(bytes(value)) for key, value in tables.scan("kv", chunk_id)}
                    del absent[chunk_id]
        fetched = fetch_records(self._bucket, absent.values())
        self._count(fetched=len({key[:ID_BYTES] for key in fetched}))
        self._cache([plan for plan in absent.values() if _is_sound(plan, fetched)], fetched)
        return records | fetched

    def _cache(self, plans: Sequence[Plan], records: Records) -> None:
        now_ms = eviction.now_ms()

        def body(tables: Tables) -> None:
            for plan in plans:
                row = chunks.sound_row(tables, plan.chunk_id)
                if row is None:
                    continue  # deleted meanwhile
                if row.n_groups:  # what is there is damaged
                    chunks.evict(tables, plan.chunk_id, row)
                whole = row._replace(
                    n_groups=plan.n_groups, group_layers=plan.group_layers, kv_bytes=plan.kv_bytes, used_ms=now_ms
                )
                groups = [records[kv_key(plan.chunk_id, group)] for group in range(plan.n_groups)]
                chunks.put_chunks(tables, [chunks.EncodedChunk(plan.chunk_id, whole, groups)])

        sizes = [len(data) for data in records.values()] + [_ROW_BYTES + 4 * plan.header.n_tokens for plan in plans]
        try:
            self._local_writes.write(body, needed=eviction.written_bytes(sizes))
        except StoreError as error:
            logger.warning("%d chunks of %s were not kept in the cache: %s", len(plans), self._path, error)

    def _is_far(self, tables: Tables, chunk_id: ChunkId) -> bool:
        """Whether a chunk that is not here is under the URL: not for certain, if no document needs it."""
        row = chunks.sound_row(tables, chunk_id)
        return row is not None and row.is_evicted and (row.refcount > 0 or self._is_new(chunk_id))

    def _is_new(self, chunk_id: ChunkId) -> bool:
        return time.monotonic() - self._uploaded.get(chunk_id, -RENEW_S) < RENEW_S

    def _renew(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Write chunks of a prefill that was interrupted to the far store again, which may have collected them."""
        encoded = []
        with self._transactions.read() as tables:
            for chunk_id in chunk_ids:
                row = chunks.sound_row(tables, chunk_id)
                if row is not None and row.n_groups and not row.refcount and not self._is_new(chunk_id):
                    records = [bytearray(value) for _, value in tables.scan("kv", chunk_id)]
                    encoded.append(chunks.EncodedChunk(chunk_id, row, records))
        self._upload(encoded)


class Flights:
    """Fetches each chunk once at a time: who asks for one that is on its way waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[ChunkId, Future[Records]] = {}

    def fetch(self, plans: Mapping[ChunkId, Plan], fetch: Callable[[Mapping[ChunkId, Plan]], Records]) -> Records:
        """Records of all these chunks; `fetch` gets those that nobody is fetching.

        Raises what `fetch` raises, of another thread too.
        """
        flight: Future[Records] = Future()
        with self._lock:
            others = {self._flying[chunk_id] for chunk_id in plans if chunk_id in self._flying}
            own = {chunk_id: plan for chunk_id, plan in plans.items() if chunk_id not in self._flying}
            self._flying.update(dict.fromkeys(own, flight))
        try:
            records = fetch(own) if own else {}
            flight.set_result(records)
        except BaseException as error:
            flight.set_exception(error)
            raise
        finally:
            with self._lock:
                for chunk_id in own:
                    del self._flying[chunk_id]
        for other in others:
            records = records | other.result()
        return records


class _Cached:
    """`Reach` of a view that holds records itself."""

    def tables(self, tables: Tables) -> Tables:
        return tables

    def row(self, whole: ChunkRow) -> ChunkRow:
        return _evicted(whole)


def _evicted(row: ChunkRow) -> ChunkRow:
    return row._replace(n_groups=0, group_layers=0)


def _is_sound(plan: Plan, records: Records) -> bool:
    """Whether every record of a chunk is there and right, so that it may be kept."""
    try:
        for group in range(plan.n_groups):
            record.parse_expected(records[kv_key(plan.chunk_id, group)], plan.group_header(group)).check()
    except (KeyError, RecordDamagedError):
        return False
    return True
