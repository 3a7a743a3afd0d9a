"""The meaning of a chunk store over any transactional tables; `LMDBStore` and `MemoryStore` bring the tables."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from pdllm_store import chunks, documents, eviction, loading
from pdllm_store.capped import CappedWrites, Transactions
from pdllm_store.errors import RecordDamagedError, StoreClosedError, StoreError
from pdllm_store.fingerprints import check_dtype, fingerprints, register
from pdllm_store.recomputing import Comparison, Recomputing
from pdllm_store.statistics import read_state_or_new, read_stats
from pdllm_store.tables import Tables
from pdllm_store.types import (
    ChunkId,
    ChunkKV,
    ChunkMeta,
    ChunkRef,
    Document,
    DocumentInfo,
    Fetched,
    KVDtype,
    ModelFingerprint,
    Recompute,
    StoreStats,
)
from pdllm_store.verification import Progress, VerifyReport, verify
from pdllm_store.workers import Workers

logger = logging.getLogger(__name__)

S = TypeVar("S", bound="TableStore")
_handles: weakref.WeakSet[TableStore] = weakref.WeakSet()
_PAGE_ROWS = 512  # rows of one short read transaction


class TableStore:
    """A `ChunkStore` (see the protocol for what each method promises) over `Transactions`."""

    def __init__(self, transactions: Transactions, *, path: str, kv_dtype: KVDtype, verify_reads: bool) -> None:
        self._transactions_or_none: Transactions | None = transactions
        self._path = path
        self._kv_dtype: KVDtype = kv_dtype
        self._verify_reads = verify_reads
        self._counters: Counter[str] = Counter()
        self._counters_lock = threading.Lock()
        self._workers = Workers()
        self._recomputing = Recomputing(kv_dtype)
        self._uses_are_queued = False
        self._capped = self._local = CappedWrites(transactions, path=path)
        _handles.add(self)  # last: a fork renews the locks of all that are in it

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._transactions_or_none is None else ""
        return f"{type(self).__name__}({self._path!r}, kv_dtype={self._kv_dtype!r}{state})"

    @property
    def kv_dtype(self) -> KVDtype:
        return self._kv_dtype

    @property
    def path(self) -> str:
        return self._path

    @property
    def derived_dir(self) -> str | None:
        return None

    @property
    def read_only(self) -> bool:
        return self._transactions.read_only

    @property
    def generation(self) -> int:
        with self._transactions.read() as tables:
            return read_state_or_new(tables, self._on_damage).generation

    @property
    def max_bytes(self) -> int | None:
        """The cap of the file in bytes, remembered by the store; None for no cap."""
        with self._transactions.read() as tables:
            return self._writes.cap(tables)

    def set_max_bytes(self, max_bytes: int | None) -> None:
        """Change the cap of the file for everybody, now and later; a file beyond it shrinks in `compact` only.

        Raises:
            ValueError: the cap is below 1 MiB.
        """
        eviction.check_max_bytes(max_bytes)
        self._local_writes.write(lambda tables: eviction.write_max_bytes(tables, max_bytes))

    def register(self, fingerprint: ModelFingerprint) -> None:
        check_dtype(fingerprint, self._kv_dtype)
        with self._transactions.read() as tables:
            if fingerprint in fingerprints(tables, self._on_damage):
                return
        self._writes.write(lambda tables: register(tables, fingerprint), needed=eviction.written_bytes([1024]))

    def recompute_with(self, fingerprint: ModelFingerprint, recompute: Recompute | None) -> None:
        check_dtype(fingerprint, self._kv_dtype)
        self._recomputing.use(fingerprint, recompute)

    def fingerprints(self) -> list[ModelFingerprint]:
        with self._transactions.read() as tables:
            return fingerprints(tables, self._on_damage)

    def put(self, fingerprint: ModelFingerprint, items: Iterable[tuple[ChunkMeta, ChunkKV]]) -> int:
        check_dtype(fingerprint, self._kv_dtype)
        now_ms = eviction.now_ms()
        return self._keep(fingerprint, chunks.encode_missing(fingerprint, items, self.missing, now_ms=now_ms))

    def _keep(self, fingerprint: ModelFingerprint, encoded: Sequence[chunks.EncodedChunk]) -> int:
        def body(tables: Tables) -> int:
            register(tables, fingerprint)
            return chunks.put_chunks(tables, encoded)

        return self._writes.write(body, needed=eviction.most_written(encoded))

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        with self._transactions.read() as tables:
            return chunks.missing(tables, chunk_ids)

    def evicted(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        with self._transactions.read() as tables:
            return chunks.evicted(tables, chunk_ids)

    def load(self, chunk_id: ChunkId) -> ChunkKV:
        kv, failures = self._load([chunk_id], {})
        _raise_first(failures)
        return kv[chunk_id]

    def load_into(self, chunk_ids: Sequence[ChunkId], out: Sequence[ChunkKV], *, layers: range | None = None) -> None:
        if len(chunk_ids) != len(out) or len(set(chunk_ids)) < len(chunk_ids):
            raise ValueError(f"{len(set(chunk_ids))} distinct chunks of {len(chunk_ids)} for {len(out)} places")
        _, failures = self._load(chunk_ids, dict(zip(chunk_ids, out, strict=True)), layers=layers)
        _raise_first(failures)

    def fetch(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        chunk_ids = list(dict.fromkeys(chunk_ids))
        kv, failures = self._load(chunk_ids, {})
        if not failures:
            return Fetched(kv, frozenset())
        with self._recomputing.lock:
            faster, failures = self._load(list(failures), {}, counted=False)  # another thread's work
            found = self._recomputing.run(failures, read=self._transactions.read, put=self.put, discard=self.discard)
        self._count(recomputed=len(found))
        kv |= faster | found
        return Fetched({chunk_id: kv[chunk_id] for chunk_id in chunk_ids}, frozenset(found))

    def prefetch(self, chunk_ids: Sequence[ChunkId]) -> None:
        self._check_open()
        wanted = list(dict.fromkeys(chunk_ids))
        read, stopping = self._transactions.read, self._workers.stopping
        self._workers.later(lambda: loading.touch_pages(read, wanted, stopping))

    def touch(self, chunk_ids: Iterable[ChunkId]) -> None:
        chunk_ids = list(chunk_ids)
        chunks.check_chunk_ids(chunk_ids)
        self._note_use(chunk_ids)

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        chunk_ids = list(chunk_ids)
        chunks.check_chunk_ids(chunk_ids)
        self._writes.write(lambda tables: chunks.discard(tables, chunk_ids))

    def drop_orphans(self, chunk_ids: Iterable[ChunkId]) -> None:
        self._writes.write(functools.partial(chunks.drop_orphans, chunk_ids=list(chunk_ids)))

    def evict(self, *, n_bytes: int | None = None, unused_for_s: float = 0.0) -> int:
        """Drop the KV of chunks that were not used for the longest time, but for pinned documents.

        Args:
            n_bytes: about so many, None for all that the other limit allows.
            unused_for_s: only what was not used for so many seconds.

        Returns the number of chunks; they are computed again when they are needed.
        """
        if not 0 <= unused_for_s < 1e10:
            raise ValueError(f"unused_for_s is {unused_for_s}, expected seconds, 0 or more")
        before_ms = eviction.now_ms() - int(unused_for_s * 1000) if unused_for_s else None
        evict = functools.partial(eviction.evict, n_bytes=n_bytes, used_before_ms=before_ms, partly=True)
        return self._local_writes.write(evict) or 0

    def meta(self, chunk_id: ChunkId) -> ChunkMeta:
        with self._transactions.read() as tables:
            return chunks.meta(tables, chunk_id)

    def iter_meta(self, fingerprint: ModelFingerprint) -> Iterator[ChunkMeta]:
        """As the protocol says, in order of chunk id, a page of rows per transaction.

        Documents may change between two pages: compare `generation` before and after where that matters.
        """
        after = b""
        while True:
            with self._transactions.read() as tables:
                page = list(chunks.page_of_rows(tables, after, _PAGE_ROWS))
            if not page:
                return
            after = page[-1][0]
            for chunk_id, row in page:
                if isinstance(row, RecordDamagedError):
                    self._on_damage(row)
                elif row.refcount and row.fingerprint == fingerprint.digest:
                    yield row.meta(chunk_id)

    def add_document(self, fingerprint: ModelFingerprint, document: Document) -> bool:
        (result,) = self.add_documents(fingerprint, [document])
        if isinstance(result, Exception):
            raise result
        return result

    def add_documents(
        self, fingerprint: ModelFingerprint, added: Sequence[Document]
    ) -> list[bool | StoreError | ValueError]:
        check_dtype(fingerprint, self._kv_dtype)
        needed = eviction.written_bytes(size for document in added for size in documents.sizes(document))
        return self._writes.write(lambda tables: documents.add_all(tables, fingerprint, added), needed=needed)

    def delete_document(self, fingerprint: ModelFingerprint, doc_id: str) -> bool:
        return self._writes.write(lambda tables: documents.delete(tables, fingerprint, doc_id))

    def delete_all(self) -> int:
        """Delete every document of every model, damaged ones included; returns how many."""
        return self._writes.write(documents.delete_all)

    def set_pinned(self, fingerprint: ModelFingerprint, doc_id: str, *, pinned: bool) -> bool:
        """Keep a document's KV from eviction, or no longer; True if that changed anything.

        Raises DocumentNotFoundError.
        """
        return self._writes.write(lambda tables: documents.set_pinned(tables, fingerprint, doc_id, pinned=pinned))

    def documents(self, fingerprint: ModelFingerprint) -> list[DocumentInfo]:
        """As the protocol says; a document with a damaged row is left out, logged and counted."""
        with self._transactions.read() as tables:
            return documents.infos(tables, fingerprint, self._on_damage)

    def document(self, fingerprint: ModelFingerprint, doc_id: str) -> Document:
        try:
            with self._transactions.read() as tables:
                return documents.get(tables, fingerprint, doc_id)
        except RecordDamagedError as error:
            self._on_damage(error)
            raise

    def refs(self, fingerprint: ModelFingerprint) -> list[ChunkRef]:
        """As the protocol says; a document with a damaged row is left out, logged and counted."""
        with self._transactions.read() as tables:
            return documents.refs(tables, fingerprint, self._on_damage)

    def stats(self) -> StoreStats:
        transactions = self._transactions
        with transactions.read() as tables:
            read = read_stats(tables, self._on_damage)
            max_bytes = self._capped.cap(tables)
        with self._counters_lock:
            names = ("hits", "misses", "damaged", "recomputed", "fetched")
            counters: dict[str, Any] = {name: self._counters[name] for name in names}
        file_bytes = transactions.file_bytes()
        return StoreStats(
            path=self._path, kv_dtype=self._kv_dtype, file_bytes=file_bytes, max_bytes=max_bytes, **read, **counters
        )

    def verify(self, progress: Progress | None = None, *, recompute_share: float = 0.0, seed: int = 0) -> VerifyReport:
        """Read and check everything, with several threads.

        Args:
            progress: told (chunks done, chunks in all) between transactions.
            recompute_share: part of the sound chunks, 0 to 1, that is encoded again and compared; it needs a
                `recompute_with` for their model, and finds records that are sound but not their model's.
            seed: of the sample.

        Raises:
            ValueError: a share outside [0, 1], or one above 0 without any `recompute_with`.
        """
        self._recomputing.check_share(recompute_share)
        read = self._transactions.read

        def load(chunk_id: ChunkId) -> ChunkKV:  # neither counted nor a use
            kv, failures = loading.load(read, self._workers, [chunk_id], {}, verify=True)
            _raise_first(failures)
            return kv[chunk_id]

        def compare(sound: Sequence[ChunkId]) -> Comparison:
            return self._recomputing.compare(sound, share=recompute_share, seed=seed, read=read, load=load)

        return verify(read, self._workers, progress, compare)

    def renew_locks(self) -> None:
        """In a forked child: a lock that a thread of the parent held would never be released."""
        self._counters_lock = threading.Lock()
        self._capped.renew_lock()
        self._local.renew_lock()
        self._recomputing.lock = threading.RLock()
        self._workers.renew()
        self._uses_are_queued = False

    def close(self) -> None:
        if self._transactions_or_none is None:
            return
        self._workers.close()
        self._write_uses()
        transactions, self._transactions_or_none = self._transactions_or_none, None
        if transactions is not None:
            transactions.close()

    def _note_use(self, chunk_ids: Iterable[ChunkId]) -> None:
        if self._local_writes.note_use(chunk_ids) and not self._uses_are_queued:
            self._uses_are_queued = True
            self._workers.later(self._write_uses)  # a reader never waits for a writer, nor fails with it

    def _write_uses(self) -> None:
        self._uses_are_queued = False
        try:
            self._local_writes.write_uses()
        except StoreError as error:
            logger.warning("%s: the order of use was not written: %s", self._path, error)

    @property
    def _writes(self) -> CappedWrites:
        self._check_open()
        return self._capped

    @property
    def _local_writes(self) -> CappedWrites:
        """For what is this place's own: the order of use, the cap."""
        self._check_open()
        return self._local

    @property
    def _transactions(self) -> Transactions:
        return self._check_open()

    def _check_open(self) -> Transactions:
        if self._transactions_or_none is None:
            raise StoreClosedError(f"the store {self._path} was closed; open it again")
        return self._transactions_or_none

    def _load(
        self,
        chunk_ids: Sequence[ChunkId],
        out: Mapping[ChunkId, ChunkKV],
        *,
        layers: range | None = None,
        counted: bool = True,
    ) -> tuple[dict[ChunkId, ChunkKV], dict[ChunkId, loading.Failure]]:
        chunks.check_chunk_ids(chunk_ids)
        kv, failures = self._read_kv(chunk_ids, out, layers)
        if counted:
            damaged = [error for error in failures.values() if isinstance(error, RecordDamagedError)]
            for error in damaged:
                self._on_damage(error)
            is_first = layers is None or layers.start == 0  # who loads a chunk in parts has loaded it once
            self._count(hits=len(kv) if is_first else 0, misses=len(failures) - len(damaged))
        self._note_use(kv)
        return kv, failures

    def _read_kv(
        self, chunk_ids: Sequence[ChunkId], out: Mapping[ChunkId, ChunkKV], layers: range | None
    ) -> tuple[dict[ChunkId, ChunkKV], dict[ChunkId, loading.Failure]]:
        read = self._transactions.read
        return loading.load(read, self._workers, chunk_ids, out, layers=layers, verify=self._verify_reads)

    def _count(self, **changes: int) -> None:
        with self._counters_lock:
            self._counters.update(changes)

    def _on_damage(self, error: RecordDamagedError) -> None:
        self._count(damaged=1)
        logger.warning("%s: %s", self._path, error)


def _raise_first(failures: Mapping[ChunkId, loading.Failure]) -> None:
    for error in failures.values():
        raise error


def _renew_locks() -> None:
    for handle in list(_handles):
        handle.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)
