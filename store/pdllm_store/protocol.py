"""What a chunk store is: the seam between the engine and any place that keeps KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from pdllm_store.errors import StoreError
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


@runtime_checkable
class ChunkStore(Protocol):
    """Chunk KV under content ids, and documents that refer to them.

    A document becomes visible only when every chunk it refers to is held: with whole KV, or with KV that was evicted
    and can be computed again from the token ids. Deleting a document deletes the chunks that nobody else refers to.
    All methods may be called from several threads.
    """

    @property
    def kv_dtype(self) -> KVDtype:
        """The dtype that keys and values are stored in, the same for all of the store."""
        ...

    @property
    def path(self) -> str:
        """Folder or URL, in messages and statistics; ":memory:" for one that ends with its process."""
        ...

    @property
    def derived_dir(self) -> str | None:
        """An existing folder for what can be made again from the store (an index), None if it keeps no files.

        Whoever uses it must expect that its contents are old, damaged or gone, and that others use it as well.
        """
        ...

    @property
    def read_only(self) -> bool:
        """Whether this handle refuses to change the store; then nothing in `derived_dir` is to be changed either."""
        ...

    @property
    def generation(self) -> int:
        """A number that every change of documents raises, read from the store itself (other processes count).

        Equal numbers mean equal documents, in copies of the store too.
        """
        ...

    @property
    def max_bytes(self) -> int | None:
        """The cap of what the store occupies, in bytes, None for none. At the cap, the KV that was not used for the
        longest time is evicted; a fifth of the cap, or half of it where space is fragmented, is kept free."""
        ...

    def register(self, fingerprint: ModelFingerprint) -> None:
        """Remember a fingerprint, so that a store can name the models that it holds documents of.

        Raises:
            StoreMismatchError: the fingerprint's stored dtype is not the store's.
        """
        ...

    def recompute_with(self, fingerprint: ModelFingerprint, recompute: Recompute | None) -> None:
        """Let this handle compute chunks of a model again (see `fetch`); None ends that.

        Raises:
            StoreMismatchError: the fingerprint's stored dtype is not the store's.
        """
        ...

    def fingerprints(self) -> list[ModelFingerprint]:
        """Those that were registered, whether or not the store holds documents of them."""
        ...

    def put(self, fingerprint: ModelFingerprint, items: Iterable[tuple[ChunkMeta, ChunkKV]]) -> int:
        """Write chunks, each all or nothing and all in one transaction; a chunk already held is left as it is.

        Returns the bytes written.

        Raises:
            StoreFullError: nothing of this call was kept.
        """
        ...

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        """The distinct ids without whole KV, in the order given."""
        ...

    def evicted(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Those of the missing ids whose KV gave way to others, in the order given."""
        ...

    def load(self, chunk_id: ChunkId) -> ChunkKV:
        """One chunk's KV, decoded, [Y, T, G, D] each (bfloat16 for int8 stores).

        Raises:
            ChunkNotFoundError: not held.
            RecordDamagedError: held, but its checksum or form is wrong; it is counted and stays until discarded.
        """
        ...

    def load_into(self, chunk_ids: Sequence[ChunkId], out: Sequence[ChunkKV], *, layers: range | None = None) -> None:
        """As `load`, but distinct chunks into given tensors, with several threads where that is faster.

        Args:
            out: tensors [Y, T, G, D] (with `layers` [len(layers), T, G, D]) of any float dtype, stride and device,
                converted on the way. What an error leaves in them is undefined.
            layers: consecutive layers to load; only their records are read.

        Raises:
            ChunkNotFoundError, RecordDamagedError: as `load`, for one of the chunks.
            ValueError: a tensor has another shape, or the layers are none of the model.
        """
        ...

    def fetch(self, chunk_ids: Sequence[ChunkId]) -> Fetched:
        """KV of chunks, as `load` gives it; what is evicted, lost or damaged is computed again and written back.

        Raises:
            ChunkNotFoundError, RecordDamagedError: a chunk can be neither read nor computed again, because nobody put
                it, its row is damaged, or its model has no `recompute_with` here.
        """
        ...

    def prefetch(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Begin to bring the KV of chunks into memory, and return at once."""
        ...

    def touch(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Count chunks as used now, as reading them does."""
        ...

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Drop the KV of chunks, but keep the metas that documents refer to: they count as missing from now on."""
        ...

    def drop_orphans(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Delete those of the chunks that no document refers to, after a prefill that was given up."""
        ...

    def meta(self, chunk_id: ChunkId) -> ChunkMeta:
        """Token ids and sketch of a chunk, whether or not its KV is held.

        Raises:
            ChunkNotFoundError: the chunk was never put.
        """
        ...

    def iter_meta(self, fingerprint: ModelFingerprint) -> Iterator[ChunkMeta]:
        """Metas of every chunk that a visible document refers to, once each."""
        ...

    def add_document(self, fingerprint: ModelFingerprint, document: Document) -> bool:
        """Make a document visible, replacing an earlier one of the same id; True if one was replaced.

        Raises:
            ChunkNotFoundError: a chunk of it is missing and not evicted (the ids are in `.chunk_ids`); nothing was
                changed.
            DocumentConflictError: the id is held by a document of another source; nothing was changed.
        """
        ...

    def add_documents(
        self, fingerprint: ModelFingerprint, added: Sequence[Document]
    ) -> list[bool | StoreError | ValueError]:
        """As `add_document` for each, all in one transaction; what it would return or raise for each of them.

        Raises what is wrong with the store rather than with one document; then none was added.
        """
        ...

    def delete_document(self, fingerprint: ModelFingerprint, doc_id: str) -> bool:
        """Delete a document and the chunks that only it refers to; False if there is none of that id."""
        ...

    def documents(self, fingerprint: ModelFingerprint) -> list[DocumentInfo]:
        """The visible documents of a model, without their texts, in order of doc_id."""
        ...

    def document(self, fingerprint: ModelFingerprint, doc_id: str) -> Document:
        """A document with its text and chunks.

        Raises:
            DocumentNotFoundError: there is none of that id.
        """
        ...

    def refs(self, fingerprint: ModelFingerprint) -> list[ChunkRef]:
        """Every chunk of every visible document, in document order (doc_id, ordinal)."""
        ...

    def stats(self) -> StoreStats:
        """What the store holds and occupies, and what this handle has done."""
        ...

    def close(self) -> None:
        """Give the handle up; later calls raise StoreClosedError."""
        ...
