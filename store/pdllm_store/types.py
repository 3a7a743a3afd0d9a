"""The store's nouns. Axes: Y layers, T tokens of a chunk (BOS included), G key/value heads, D head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import blake3
import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

ChunkId = bytes  # 16 bytes of BLAKE3
KVDtype = Literal["bfloat16", "float32", "int8"]  # as stored; int8 with one float32 scale per (token, head)
KV_DTYPES: tuple[KVDtype, ...] = ("bfloat16", "float32", "int8")  # all of them
FORMAT = 2  # of the store: raised whenever a table changes
RECORD_FORMAT = 1  # of KV records, and part of every chunk id: raised whenever a byte of one changes its meaning

ID_BYTES = 16  # of chunk ids, text ids and fingerprints


@dataclass(frozen=True)
class ModelFingerprint:
    """Everything that changes what a chunk's keys and values mean; two equal fingerprints may share KV.

    Compute dtype, device, thread count and batch shape are left out on purpose: they change rounding, not meaning.
    """

    family: str
    weights_digest: str  # hex BLAKE3 of the weight files
    adapter_digest: str  # hex BLAKE3 of an adapter that acts on chunk rows, "" without one
    tokenizer_digest: str  # hex BLAKE3
    n_layers: int
    n_kv_heads: int
    head_dim: int
    rope: str  # canonical text of theta and scaling
    kv_dtype: KVDtype
    bos_id: int
    prefill_mask: str  # "bidirectional" or "block-causal-<n>"
    format: int = RECORD_FORMAT

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this fingerprint (BLAKE3 over its fields in canonical order)."""
        packed = msgpack.packb(sorted(asdict(self).items()), use_bin_type=True)
        return blake3.blake3(packed).digest(ID_BYTES)

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token: keys and values of all layers, scales included, record headers left out."""
        n_vectors = 2 * self.n_layers * self.n_kv_heads
        if self.kv_dtype == "int8":
            return n_vectors * (self.head_dim + 4)  # one float32 scale per (token, head)
        return n_vectors * self.head_dim * (2 if self.kv_dtype == "bfloat16" else 4)

    def chunk_id(self, token_ids: NDArray[np.int32]) -> ChunkId:
        """Identity of a chunk under this model: BLAKE3 over fingerprint and token ids (little-endian int32)."""
        return blake3.blake3(self.digest + np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).digest(ID_BYTES)


class ChunkRef(NamedTuple):
    """One chunk as it stands in one document. `char_start:char_end` are code points, half open."""

    doc_id: str
    ordinal: int
    chunk_id: ChunkId
    char_start: int
    char_end: int
    page: int | None = None  # 1-based page of a paged source


@dataclass(frozen=True, eq=False)
class ChunkMeta:
    """What the first stage and the scorer need of a chunk without reading its KV.

    Attributes:
        token_ids: int32 [T], BOS first.
        sketch: float16 [G*D], mean un-rotated key of one layer, or None.
    """

    chunk_id: ChunkId
    token_ids: NDArray[np.int32]
    sketch: NDArray[np.float16] | None = None


class ChunkKV(NamedTuple):
    """Keys (rotated at chunk-local positions, BOS at 0) and values of one chunk, both [Y, T, G, D].

    What a store hands out is in the host's memory: float32 of a float32 store, else bfloat16.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Document:
    """A document as it is written: its text, where each chunk stands in it, and what its owner knows of it.

    Attributes:
        doc_id: unique within a store and model; with the ordinal it defines document order.
        source: where it came from (a path, a URL, a framework's id); decides conflicts of ids.
        text: the whole original text; chunk offsets count its code points.
        text_id: 16 bytes of BLAKE3 over the normalised text; equal text has an equal id under any model.
        recipe: canonical text of everything that cut the text into chunks; a changed recipe re-cuts the document.
        chunks: in ordinal order.
        metadata: JSON-like values only.
    """

    doc_id: str
    source: str
    text: str
    text_id: bytes
    recipe: str
    chunks: tuple[ChunkRef, ...]
    n_tokens: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


class DocumentInfo(NamedTuple):
    """A stored document without its text."""

    doc_id: str
    source: str
    text_id: bytes
    recipe: str
    chunk_ids: tuple[ChunkId, ...]
    n_tokens: int
    n_bytes: int  # stored bytes of its distinct chunks' KV records
    pinned: bool
    metadata: Mapping[str, Any]


# Encodes chunks again from their token ids, in batches of its own choice.
Recompute = Callable[[Sequence[ChunkMeta]], Iterable[Sequence[tuple[ChunkMeta, ChunkKV]]]]


class Fetched(NamedTuple):
    """KV of the chunks asked for, and which of them had to be computed again."""

    kv: dict[ChunkId, ChunkKV]
    recomputed: frozenset[ChunkId]


class ModelStats(NamedTuple):
    """What a store holds under one fingerprint."""

    documents: int = 0
    chunks: int = 0  # distinct chunks with whole KV
    orphans: int = 0  # those of them that no document refers to (left by an interrupted prefill)
    evicted: int = 0  # chunks of documents whose KV gave way to others: computed again when they are needed
    tokens: int = 0  # of chunks with whole KV
    kv_bytes: int = 0  # KV record bytes


class StoreStats(NamedTuple):
    """Figures of one store. What is marked so is counted by this handle since it was opened; the rest is on disk."""

    path: str
    kv_dtype: KVDtype
    documents: int
    chunks: int
    orphans: int
    evicted: int
    tokens: int
    kv_bytes: int
    used_bytes: int  # pages in use: KV, texts, token ids and trees
    free_bytes: int  # pages of the file that later writes use again
    file_bytes: int  # what the environment really occupies on disk
    max_bytes: int | None  # cap of the file
    evictions: int  # chunks that the cap or `evict` has cost, since the store was made
    generation: int  # raised by every change of documents
    hits: int  # of this handle: chunks loaded
    misses: int  # of this handle: chunks asked for without KV
    damaged: int  # of this handle: records and rows that failed their check
    recomputed: int  # of this handle: chunks computed again
    fetched: int  # of this handle: chunks read from a far store
    fingerprints: Mapping[str, ModelStats]  # by hex digest
