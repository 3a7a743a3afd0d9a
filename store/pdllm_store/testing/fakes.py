"""Small made-up models, chunks and documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pdllm_store.protocol import ChunkStore
from pdllm_store.types import ChunkKV, ChunkMeta, ChunkRef, Document, KVDtype, ModelFingerprint

MakeStore = Callable[[KVDtype], ChunkStore]


def tiny_fingerprint(*, kv_dtype: KVDtype = "bfloat16", weights: str = "00", n_layers: int = 3) -> ModelFingerprint:
    """A model of 2 key/value heads of dimension 4 that does not exist."""
    return ModelFingerprint(
        family="tiny",
        weights_digest=weights,
        adapter_digest="",
        tokenizer_digest="11",
        n_layers=n_layers,
        n_kv_heads=2,
        head_dim=4,
        rope="theta=10000",
        kv_dtype=kv_dtype,
        bos_id=0,
        prefill_mask="bidirectional",
    )


def random_chunk(
    fingerprint: ModelFingerprint, *, seed: int, n_tokens: int = 5, sketch: bool = True
) -> tuple[ChunkMeta, ChunkKV]:
    """A chunk whose tokens and KV follow from the seed: float32 [Y, T, G, D], or bfloat16 in such a store."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(1, 1 << 20, (n_tokens,), generator=generator).to(torch.int32).numpy()
    token_ids[0] = fingerprint.bos_id
    shape = (fingerprint.n_layers, n_tokens, fingerprint.n_kv_heads, fingerprint.head_dim)
    dtype = torch.bfloat16 if fingerprint.kv_dtype == "bfloat16" else torch.float32
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    keys = k[0, 1:].to(torch.float32).mean(0).flatten().to(torch.float16).numpy() if sketch else None
    return ChunkMeta(fingerprint.chunk_id(token_ids), token_ids, keys), ChunkKV(k, v)


def make_document(doc_id: str, metas: Sequence[ChunkMeta], **changes: Any) -> Document:
    """A document of ten code points a chunk; `changes` replace its fields."""
    refs = tuple(
        ChunkRef(doc_id, ordinal, meta.chunk_id, 10 * ordinal, 10 * ordinal + 10) for ordinal, meta in enumerate(metas)
    )
    document = Document(
        doc_id=doc_id,
        source=f"/src/{doc_id}",
        text="0123456789" * len(metas),
        text_id=bytes(16),
        recipe="recipe-1",
        chunks=refs,
        n_tokens=sum(len(meta.token_ids) for meta in metas),
    )
    return replace(document, **changes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The integers behind a float tensor, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def add_chunks(
    store: ChunkStore, fingerprint: ModelFingerprint, doc_id: str, seeds: Sequence[int], **changes: Any
) -> list[ChunkMeta]:
    """Put one chunk a seed and a document of them."""
    items = [random_chunk(fingerprint, seed=seed) for seed in seeds]
    store.put(fingerprint, items)
    metas = [meta for meta, _ in items]
    store.add_document(fingerprint, make_document(doc_id, metas, **changes))
    return metas
