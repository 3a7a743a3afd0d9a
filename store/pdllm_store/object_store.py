"""The chunk store that several machines share: KV and documents as objects under one URL."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from pdllm_store import chunks, loading
from pdllm_store.bucket import RETRY_S, Bucket, open_bucket
from pdllm_store.errors import (
    ChunkNotFoundError,
    RecordDamagedError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from pdllm_store.far_kv import FarTables, FetchedTables, Records, far_plan, fetch_records
from pdllm_store.following import FollowingTransactions, Reach
from pdllm_store.garbage import GRACE_S, RENEW_S, Garbage, collect
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.published import Head, Manifest, chunk_name, publish_manifest, read_head
from pdllm_store.rows import ChunkRow
from pdllm_store.table_store import TableStore
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, KV_DTYPES, ChunkId, ChunkKV, Document, DocumentInfo, KVDtype, ModelFingerprint

S = TypeVar("S", bound="ObjectChunkStore")
Loaded = tuple[dict[ChunkId, ChunkKV], dict[ChunkId, loading.Failure]]

FRESH_S = 1.0  # what other machines publish is seen after so long


class ObjectChunkStore(TableStore):
    """A `ChunkStore` under a URL; make one with `ObjectChunkStore.open`.

    Any number of machines may read and write it. KV is fetched when it is asked for, in ranges of the layers asked for,
    and kept nowhere; what is known of documents and chunks lies in a temporary folder. What others publish is seen a
    second later, by `generation` and `documents`. A handle does not work in a forked child, and pickles as its URL and
    options.
    """

    def __init__(
        self, bucket: Bucket, head: Head, near: LMDBStore, options: Mapping[str, Any], resources: ExitStack
    ) -> None:
        self._bucket = bucket
        self._near = near
        self._options = dict(options)
        self._uploaded: dict[ChunkId, float] = {}  # when by this handle, for documents that are still to come
        self._following = FollowingTransactions(
            bucket, head, near._transactions, self._reach(), read_only=options["read_only"], close=resources.close
        )
        super().__init__(
            self._following, path=bucket.url, kv_dtype=head.manifest.kv_dtype, verify_reads=options["verify_reads"]
        )
        self._local = near._capped
        self._following.refresh()

    @classmethod
    def open(
        cls,
        url: str,
        *,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        read_only: bool = False,
        verify_reads: bool = True,
        retry_s: float = RETRY_S,
    ) -> ObjectChunkStore:
        """Open the store under a URL, or make one there.

        Args:
            url: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, or memory:// (empty,
                and gone when it is closed). Credentials and endpoints come from the environment, as obstore reads it.
            kv_dtype, create, verify_reads: as of `LMDBStore.open`.
            read_only: change nothing under the URL.
            retry_s: what may pass (timeouts, 5xx) is tried again for so many seconds.

        Raises:
            StoreNotFoundError: nothing is there and `create` is False.
            StoreFormatError: something else is there, or a store of another format.
            StoreMismatchError: the store was made with another `kv_dtype`.
            StoreAccessError, StoreUnavailableError, StoreError: it cannot be reached, or obstore is not installed.
            ValueError: an argument is none that exists.
        """
        options = {"read_only": read_only, "verify_reads": verify_reads, "retry_s": retry_s}
        return cls._open(url, _scratch, options, kv_dtype=kv_dtype, create=create)

    @classmethod
    def _open(
        cls: type[S],
        url: str,
        open_near: Callable[[KVDtype, ExitStack], LMDBStore],
        options: Mapping[str, Any],
        *,
        kv_dtype: KVDtype | None,
        create: bool,
    ) -> S:
        create = create and not options["read_only"]
        resources = ExitStack()
        try:
            bucket = open_bucket(url, create=create, retry_s=options["retry_s"])
            resources.callback(bucket.close)
            head = _open_head(bucket, kv_dtype, create=create)
            near = resources.enter_context(open_near(head.manifest.kv_dtype, resources))
            return cls(bucket, head, near, options, resources)
        except BaseException:
            resources.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self._path, self._options)

    @property
    def derived_dir(self) -> str | None:
        return self._near.derived_dir

    @property
    def generation(self) -> int:
        self._refresh(FRESH_S)
        return super().generation

    @property
    def max_bytes(self) -> int | None:
        """None: an object store has no cap."""
        return None

    def refresh(self) -> None:
        """See what others have published until now. Raises StoreError."""
        self._refresh(0.0)

    def documents(self, fingerprint: ModelFingerprint) -> list[DocumentInfo]:
        self._refresh(FRESH_S)
        return super().documents(fingerprint)

    def add_documents(
        self, fingerprint: ModelFingerprint, added: Sequence[Document]
    ) -> list[bool | StoreError | ValueError]:
        """As the protocol says; all of them become visible at once, and on every machine, before this returns.

        Raises:
            StoreConflictError: other writers published first each time.
        """
        results = super().add_documents(fingerprint, added)
        failed = [index for index, result in enumerate(results) if isinstance(result, Exception)]
        if failed and self._following.refresh():  # it may be about what is not so any more
            for index, result in zip(
                failed, super().add_documents(fingerprint, [added[index] for index in failed]), strict=True
            ):
                results[index] = result
        for chunk_id in {ref.chunk_id for document in added for ref in document.chunks}:
            self._uploaded.pop(chunk_id, None)
        return results

    def delete_document(self, fingerprint: ModelFingerprint, doc_id: str) -> bool:
        self._refresh(0.0)
        return super().delete_document(fingerprint, doc_id)

    def delete_all(self) -> int:
        self._refresh(0.0)
        return super().delete_all()

    def set_pinned(self, fingerprint: ModelFingerprint, doc_id: str, *, pinned: bool) -> bool:
        self._refresh(0.0)
        return super().set_pinned(fingerprint, doc_id, pinned=pinned)

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        chunk_ids = list(dict.fromkeys(chunk_ids))
        super().discard(chunk_ids)

        def forget(tables: Tables) -> None:
            for chunk_id, row in ((chunk_id, chunks.sound_row(tables, chunk_id)) for chunk_id in chunk_ids):
                if row is not None and row.is_evicted:
                    chunks.write_row(tables, chunk_id, row._replace(kv_bytes=0) if row.refcount else None)

        self._writes.write(forget)
        self._bucket.delete([chunk_name(chunk_id) for chunk_id in chunk_ids])

    def prefetch(self, chunk_ids: Sequence[ChunkId]) -> None:  # noqa: ARG002  (nothing is kept that could be ready)
        self._check_open()

    def evict(self, *, n_bytes: int | None = None, unused_for_s: float = 0.0) -> int:  # noqa: ARG002
        raise self._refusal("keeps no order of use")

    def set_max_bytes(self, max_bytes: int | None) -> None:  # noqa: ARG002
        raise self._refusal("has no cap")

    def collect_garbage(self, *, grace_s: float = GRACE_S, dry_run: bool = False) -> Garbage:
        """Delete the objects that nothing refers to any more, and rewrite segments that hold deleted documents.

        Args:
            grace_s: leave objects that are younger; it must be longer than any prefill takes from writing a chunk to
                publishing its document, and than `RENEW_S`, unless nobody writes.
            dry_run: only count them.

        Raises:
            ValueError: a negative grace; StoreError.
        """
        if not grace_s >= 0:
            raise ValueError(f"the grace is {grace_s}, expected seconds, 0 or more")
        if not dry_run:
            self._check_writable()
        garbage = collect(self._bucket, grace_s=grace_s, dry_run=dry_run)
        self._refresh(0.0)
        return garbage

    def _reach(self) -> Reach:
        return _ReadThrough(self._bucket)

    def _keep(self, fingerprint: ModelFingerprint, encoded: Sequence[chunks.EncodedChunk]) -> int:
        self._check_writable()
        self._upload(encoded)
        return super()._keep(fingerprint, encoded)

    def _upload(self, encoded: Sequence[chunks.EncodedChunk]) -> None:
        """Write chunks that are not there yet, and those anew that are old or of another length."""

        def upload(chunk: chunks.EncodedChunk) -> None:
            name, data = chunk_name(chunk.chunk_id), b"".join(chunk.records)
            if not self._bucket.create(name, data):
                held = self._bucket.head(name)
                if held is None or held.age_s > RENEW_S or held.n_bytes != len(data):
                    self._bucket.replace(name, data)
            self._uploaded[chunk.chunk_id] = time.monotonic()

        self._bucket.map(upload, encoded)

    def _read_kv(self, chunk_ids: Sequence[ChunkId], out: Mapping[ChunkId, ChunkKV], layers: range | None) -> Loaded:
        plans, failures = self._plans(chunk_ids)
        records = fetch_records(self._bucket, plans.values(), layers)
        self._count(fetched=len({key[:ID_BYTES] for key in records}))
        return self._decode(chunk_ids, plans, failures, records, out, layers)

    def _plans(
        self, chunk_ids: Iterable[ChunkId]
    ) -> tuple[dict[ChunkId, loading.Plan], dict[ChunkId, loading.Failure]]:
        plans: dict[ChunkId, loading.Plan] = {}
        failures: dict[ChunkId, loading.Failure] = {}
        with self._transactions.read() as tables:
            for chunk_id in chunk_ids:
                try:
                    plans[chunk_id] = far_plan(tables, chunk_id)
                except (ChunkNotFoundError, RecordDamagedError) as error:
                    failures[chunk_id] = error
        return plans, failures

    def _decode(
        self,
        chunk_ids: Sequence[ChunkId],
        plans: Mapping[ChunkId, loading.Plan],
        failures: Mapping[ChunkId, loading.Failure],
        records: Records,
        out: Mapping[ChunkId, ChunkKV],
        layers: range | None,
    ) -> Loaded:
        """KV out of records that were fetched."""

        @contextmanager
        def read() -> Iterator[Tables]:
            with self._transactions.read() as tables:
                yield FetchedTables(tables, records)

        def plan(_tables: Tables, chunk_id: ChunkId) -> loading.Plan:
            if chunk_id in failures:
                raise failures[chunk_id]
            return plans[chunk_id]

        verify = self._verify_reads
        return loading.load(read, self._workers, chunk_ids, out, layers=layers, verify=verify, plan=plan)

    def _refresh(self, max_age_s: float) -> None:
        self._check_open()
        self._following.refresh(max_age_s=max_age_s)

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise StoreReadOnlyError(f"{self._path} was opened read-only; open it without read_only to change it")

    def _refusal(self, reason: str) -> StoreError:
        return StoreError(f"{self._path} is an object store and {reason}; a cache in front of it (--cache) does")


class _ReadThrough:
    """`Reach` of a view whose records stay where they are."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def tables(self, tables: Tables) -> Tables:
        return FarTables(tables, self._bucket)

    def row(self, whole: ChunkRow) -> ChunkRow:
        return whole


def _scratch(kv_dtype: KVDtype, resources: ExitStack) -> LMDBStore:
    """A view that ends with its handle."""
    folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="pdllm-far-", ignore_cleanup_errors=True))
    return LMDBStore.open(folder, kv_dtype=kv_dtype)


def _open_head(bucket: Bucket, kv_dtype: KVDtype | None, *, create: bool) -> Head:
    """What is in force under a URL, or a new store's."""
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype is {kv_dtype!r}, expected one of {KV_DTYPES}")
    head = read_head(bucket)
    if head is None and create:
        bucket.check_conditions()
        manifest = Manifest(kv_dtype or "bfloat16", secrets.token_hex(8), 0, ())
        head = publish_manifest(bucket, None, manifest, {}) or read_head(bucket)  # somebody else was faster
    if head is None:
        raise StoreNotFoundError(f"there is no store at {bucket.url}; prefill some documents into it, or check the URL")
    held = head.manifest.kv_dtype
    if kv_dtype not in (None, held):
        raise StoreMismatchError(
            f"{bucket.url} was made to hold {held}, {kv_dtype} was asked for; open it as {held}, or prefill into a new "
            "store"
        )
    return head


def _reopen(store: type[ObjectChunkStore], url: str, options: dict[str, Any]) -> ObjectChunkStore:
    return store.open(url, create=False, **options)
