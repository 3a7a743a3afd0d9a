"""The meaning of a chunk store over any transactional tables; `LMDBStore` and `MemoryStore` bring the tables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from pdllm_store import chunks, documents
from pdllm_store.counts import read_counts
from pdllm_store.errors import ChunkNotFoundError, RecordDamagedError, StoreClosedError
from pdllm_store.fingerprints import check_dtype, fingerprints, register
from pdllm_store.tables import Tables
from pdllm_store.types import (
    ChunkId,
    ChunkKV,
    ChunkMeta,
    ChunkRef,
    Document,
    DocumentInfo,
    KVDtype,
    ModelFingerprint,
    StoreStats,
)
from pdllm_store.verification import Progress, VerifyReport, verify

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound="TableStore")
_PAGE_ROWS = 512  # rows of one short read transaction


class Transactions(Protocol):
    """All-or-nothing access to the tables; safe to use from several threads."""

    def read(self) -> AbstractContextManager[Tables]:
        """One snapshot of all tables. No other transaction of this thread may begin inside."""
        ...

    def write(self, body: Callable[[Tables], T], *, needed: int = 0) -> T:
        """Run `body` in a write transaction, kept whole if it returns and dropped whole if it raises.

        `needed` is the number of bytes that it writes, for the message of StoreFullError.
        """
        ...

    def shrink(self, body: Callable[[Tables], T]) -> T:
        """As `write`, for a body that frees more than it takes: it may go beyond the cap for a moment."""
        ...

    def file_bytes(self) -> int: ...

    def close(self) -> None: ...


class TableStore:
    """A `ChunkStore` (see the protocol for what each method promises) over `Transactions`."""

    def __init__(self, transactions: Transactions, *, path: str, kv_dtype: KVDtype, verify_reads: bool) -> None:
        self._transactions_or_none: Transactions | None = transactions
        self._path = path
        self._kv_dtype: KVDtype = kv_dtype
        self._verify_reads = verify_reads
        self._counters_lock = threading.Lock()
        self._hits = self._misses = self._damaged = 0

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
    def generation(self) -> int:
        with self._transactions.read() as tables:
            return read_counts(tables).generation

    def register(self, fingerprint: ModelFingerprint) -> None:
        check_dtype(fingerprint, self._kv_dtype)
        self._transactions.write(lambda tables: register(tables, fingerprint))

    def fingerprints(self) -> list[ModelFingerprint]:
        with self._transactions.read() as tables:
            return [fingerprint for fingerprint, _ in fingerprints(tables, self._on_damage)]

    def put(self, fingerprint: ModelFingerprint, items: Iterable[tuple[ChunkMeta, ChunkKV]]) -> int:
        check_dtype(fingerprint, self._kv_dtype)
        encoded: dict[ChunkId, chunks.EncodedChunk] = {}
        for meta, kv in items:
            chunks.check_chunk(fingerprint, meta, kv)
            if meta.chunk_id not in encoded and self.missing([meta.chunk_id]):
                encoded[meta.chunk_id] = chunks.encode_chunk(fingerprint, meta, kv)

        def body(tables: Tables) -> int:
            register(tables, fingerprint)
            return chunks.put_chunks(tables, list(encoded.values()))

        return self._transactions.write(body, needed=sum(chunk.row.kv_bytes for chunk in encoded.values()))

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        with self._transactions.read() as tables:
            return chunks.missing(tables, chunk_ids)

    def load(self, chunk_id: ChunkId) -> ChunkKV:
        return self._counted(lambda tables: chunks.load(tables, chunk_id, verify=self._verify_reads))

    def load_into(self, chunk_id: ChunkId, k: torch.Tensor, v: torch.Tensor) -> None:
        kv = ChunkKV(k, v)
        self._counted(lambda tables: chunks.load_into(tables, chunk_id, kv, verify=self._verify_reads))

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        chunk_ids = list(chunk_ids)
        self._transactions.shrink(lambda tables: chunks.discard(tables, chunk_ids))

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
        check_dtype(fingerprint, self._kv_dtype)
        documents.check_document(document)
        return self._transactions.write(lambda tables: documents.add(tables, fingerprint, document))

    def delete_document(self, fingerprint: ModelFingerprint, doc_id: str) -> bool:
        return self._transactions.shrink(lambda tables: documents.delete(tables, fingerprint, doc_id))

    def set_pinned(self, fingerprint: ModelFingerprint, doc_id: str, *, pinned: bool) -> None:
        """Mark a document as one to keep. Raises DocumentNotFoundError."""
        self._transactions.write(lambda tables: documents.set_pinned(tables, fingerprint, doc_id, pinned=pinned))

    def documents(self, fingerprint: ModelFingerprint) -> list[DocumentInfo]:
        """As the protocol says; a document with a damaged row is left out, logged and counted."""
        with self._transactions.read() as tables:
            return documents.infos(tables, fingerprint, self._on_damage)

    def document(self, fingerprint: ModelFingerprint, doc_id: str) -> Document:
        with self._transactions.read() as tables:
            return documents.get(tables, fingerprint, doc_id)

    def refs(self, fingerprint: ModelFingerprint) -> list[ChunkRef]:
        """As the protocol says; a document with a damaged row is left out, logged and counted."""
        with self._transactions.read() as tables:
            return documents.refs(tables, fingerprint, self._on_damage)

    def stats(self) -> StoreStats:
        transactions = self._transactions
        with transactions.read() as tables:
            counts = read_counts(tables)
            by_model = {model.digest.hex(): n for model, n in fingerprints(tables, self._on_damage)}
        with self._counters_lock:
            hits, misses, damaged = self._hits, self._misses, self._damaged
        return StoreStats(
            path=self._path,
            kv_dtype=self._kv_dtype,
            documents=counts.documents,
            chunks=counts.chunks,
            orphans=counts.orphans,
            tokens=counts.tokens,
            kv_bytes=counts.kv_bytes,
            file_bytes=transactions.file_bytes(),
            fingerprints=by_model,
            generation=counts.generation,
            hits=hits,
            misses=misses,
            damaged=damaged,
        )

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check everything; `progress` is told (chunks done, chunks in all) between transactions."""
        return verify(self._transactions, progress)

    def close(self) -> None:
        transactions, self._transactions_or_none = self._transactions_or_none, None
        if transactions is not None:
            transactions.close()

    @property
    def _transactions(self) -> Transactions:
        return self._check_open()

    def _check_open(self) -> Transactions:
        if self._transactions_or_none is None:
            raise StoreClosedError(f"the store {self._path} was closed; open it again")
        return self._transactions_or_none

    def _counted(self, body: Callable[[Tables], T]) -> T:
        try:
            with self._transactions.read() as tables:
                result = body(tables)
        except ChunkNotFoundError:
            with self._counters_lock:
                self._misses += 1
            raise
        except RecordDamagedError as error:
            self._on_damage(error)
            raise
        with self._counters_lock:
            self._hits += 1
        return result

    def _on_damage(self, error: RecordDamagedError) -> None:
        with self._counters_lock:
            self._damaged += 1
        logger.warning("%s: %s", self._path, error)
