"""A persistent store of chunk keys and values, and of the documents that refer to them."""

from pdllm_store.errors import (
    ChunkNotFoundError,
    DocumentConflictError,
    DocumentNotFoundError,
    PdllmError,
    RecordDamagedError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreMismatchError,
    StoreNotFoundError,
)
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.memory_store import MemoryStore
from pdllm_store.protocol import ChunkStore
from pdllm_store.types import (
    FORMAT,
    ID_BYTES,
    KV_DTYPES,
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
from pdllm_store.verification import VerifyReport

__all__ = [
    "FORMAT",
    "ID_BYTES",
    "KV_DTYPES",
    "ChunkId",
    "ChunkKV",
    "ChunkMeta",
    "ChunkNotFoundError",
    "ChunkRef",
    "ChunkStore",
    "Document",
    "DocumentConflictError",
    "DocumentInfo",
    "DocumentNotFoundError",
    "KVDtype",
    "LMDBStore",
    "MemoryStore",
    "ModelFingerprint",
    "PdllmError",
    "RecordDamagedError",
    "StoreClosedError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "StoreStats",
    "VerifyReport",
]
