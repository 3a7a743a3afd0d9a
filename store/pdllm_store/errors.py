"""Errors a caller can handle. Every message says what happened, what was got, what was expected, what to do.

PdllmError
|-- StoreError
|   |-- StoreNotFoundError        the path holds no store
|   |-- StoreFormatError          written by another version, or no store of ours
|   |-- StoreMismatchError        made with another stored dtype, or holds documents of another model only
|   |-- StoreFullError            the byte cap or the disk is reached
|   |-- StoreClosedError          used after close()
|   |-- StoreReadOnlyError        opened read-only
|   |-- StoreUnavailableError     a far store did not answer, or answered that it cannot now
|   |-- StoreAccessError          a far store refused the credentials
|   |-- StoreConflictError        others kept publishing to a far store first
|   |-- RecordDamagedError        a record failed its checksum or does not parse
|   |-- ChunkDiffersError         a chunk is not what its model computes
|   |-- ChunkNotFoundError        a chunk has no stored KV
|   |-- DocumentNotFoundError     no such document
|   `-- DocumentConflictError     the document id is already held by another source, or with another content
|-- ModelError                    (pdllm_rag.errors)
|-- DocumentError                 (pdllm_rag.errors)
`-- RequestError                  (pdllm_rag.errors)
"""


class PdllmError(Exception):
    """Base of every error that this project raises for its callers."""


class StoreError(PdllmError):
    """Base of the store's errors."""


class StoreNotFoundError(StoreError):
    """The path holds no store, and none was to be created."""


class StoreFormatError(StoreError):
    """The folder is no store of ours, or was written by an incompatible version."""


class StoreMismatchError(StoreError):
    """The store was made for another stored dtype or holds documents of another model only."""


class StoreFullError(StoreError):
    """The byte cap or the disk is full; nothing of the refused record was kept."""


class StoreClosedError(StoreError):
    """The store was used after `close()`."""


class StoreReadOnlyError(StoreError):
    """A store that was opened read-only was to be changed."""


class StoreUnavailableError(StoreError):
    """A far store did not answer in time or said that it cannot now, and trying again did not help."""


class StoreAccessError(StoreError):
    """A far store refused the credentials: there are none, they are expired, or may not do this."""


class StoreConflictError(StoreError):
    """A change of documents could not be published, because other writers were faster each time; it was not made."""


class RecordDamagedError(StoreError):
    """A record or row failed its checksum or does not parse; `chunk_ids` names the chunks whose rows did."""

    def __init__(self, message: str, chunk_ids: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.chunk_ids = chunk_ids


class ChunkDiffersError(StoreError):
    """A stored chunk is not what its model computes; `deviation` is the largest relative L2 distance of a layer."""

    def __init__(self, message: str, chunk_id: bytes = b"", deviation: float = 0.0) -> None:
        super().__init__(message)
        self.chunk_id = chunk_id
        self.deviation = deviation


class ChunkNotFoundError(StoreError):
    """A chunk that was asked for has no (whole) stored KV."""

    def __init__(self, message: str, chunk_ids: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.chunk_ids = chunk_ids


class DocumentNotFoundError(StoreError):
    """No document of that id."""


class DocumentConflictError(StoreError):
    """The document id is already held by another source, or, of stores to be merged, with another content."""
