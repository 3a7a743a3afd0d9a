"""A persistent store of chunk keys and values, and of the documents that refer to them."""

from pdllm_store import posix  # noqa: F401
from pdllm_store.backup import export_store, import_store
from pdllm_store.errors import (
    ChunkDiffersError,
    ChunkNotFoundError,
    DocumentConflictError,
    DocumentNotFoundError,
    PdllmError,
    RecordDamagedError,
    StoreAccessError,
    StoreClosedError,
    StoreConflictError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from pdllm_store.garbage import Garbage
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.memory_store import MemoryStore
from pdllm_store.merging import MergeReport, merge
from pdllm_store.object_store import ObjectChunkStore
from pdllm_store.opening import is_url, open_store, real_location
from pdllm_store.protocol import ChunkStore
from pdllm_store.tiered_store import TieredChunkStore
from pdllm_store.types import (
    FORMAT,
    ID_BYTES,
    KV_DTYPES,
    RECORD_FORMAT,
    ChunkId,
    ChunkKV,
    ChunkMeta,
    ChunkRef,
    Document,
    DocumentInfo,
    Fetched,
    KVDtype,
    ModelFingerprint,
    ModelStats,
    Recompute,
    StoreStats,
)
from pdllm_store.verification import VerifyReport

__all__ = [
    "FORMAT",
    "ID_BYTES",
    "KV_DTYPES",
    "RECORD_FORMAT",
    "ChunkDiffersError",
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
    "Fetched",
    "Garbage",
    "KVDtype",
    "LMDBStore",
    "MemoryStore",
    "MergeReport",
    "ModelFingerprint",
    "ModelStats",
    "ObjectChunkStore",
    "PdllmError",
    "Recompute",
    "RecordDamagedError",
    "StoreAccessError",
    "StoreClosedError",
    "StoreConflictError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "StoreReadOnlyError",
    "StoreStats",
    "StoreUnavailableError",
    "TieredChunkStore",
    "VerifyReport",
    "export_store",
    "import_store",
    "is_url",
    "merge",
    "open_store",
    "real_location",
]
