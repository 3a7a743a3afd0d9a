"""A conformance suite that any chunk store can run, and small made-up models, chunks and documents.

Subclass `ChunkStoreConformance` in a test module, and give it a fixture `make_store` that returns a function
`(kv_dtype) -> ChunkStore` making a new, empty store at each call. Needs pytest.
"""

from pdllm_store.testing.fakes import (
    MakeStore,
    add_chunks,
    bits,
    make_document,
    random_chunk,
    tiny_fingerprint,
)
from pdllm_store.testing.store_conformance import ChunkStoreConformance

__all__ = [
    "ChunkStoreConformance",
    "MakeStore",
    "add_chunks",
    "bits",
    "make_document",
    "random_chunk",
    "tiny_fingerprint",
]
