"""Chunks to KV: each chunk encoded on its own, BOS first, positions 0..T-1.

Inside a chunk every token sees every token, or, in a block-causal family, its own block and the ones before it.

Source: Prefilling-dLLM (arXiv 2606.10537), independent chunk prefill with one BOS anchor per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkKV, ChunkMeta, ModelFingerprint

from pdllm_rag.attends import CaptureAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.models.loader import LoadedModel

BATCH_TOKENS = 1024


class ChunkEncoder:
    """Encodes chunks in batches of about `batch_tokens` tokens.

    Rows are packed, so a batch needs no padding; chunks of like length share a batch, because equally long ones share
    one attention call.
    """

    def __init__(self, model: LoadedModel, fingerprint: ModelFingerprint, *, batch_tokens: int = BATCH_TOKENS) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; expected 1 or more")
        self._model = model
        self._fingerprint = fingerprint
        self._batch_tokens = batch_tokens
        self._block = causal_block(model.spec.family)
        self._dtype = torch.bfloat16 if fingerprint.kv_dtype == "bfloat16" else torch.float32

    def batches(self, chunks: Sequence[NDArray[np.int32]]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        """Metas and KV [Y, T, G, D] (CPU) of chunks int32 [T], batch by batch, longest chunks first."""
        order = sorted(range(len(chunks)), key=lambda i: -len(chunks[i]))
        batch: list[NDArray[np.int32]] = []
        n_tokens = 0
        for index in order:
            if batch and n_tokens + len(chunks[index]) > self._batch_tokens:
                yield self._encode(batch)
                batch, n_tokens = [], 0
            batch.append(chunks[index])
            n_tokens += len(chunks[index])
        if batch:
            yield self._encode(batch)

    def capture(self, chunks: Sequence[NDArray[np.int32]]) -> CaptureAttend:
        """Run one batch; its keys and values stay on the model's device."""
        backbone = self._model.backbone
        lens = [len(chunk) for chunk in chunks]
        positions = torch.cat([torch.arange(length) for length in lens]).to(backbone.device)
        ids = torch.from_numpy(np.concatenate(chunks).astype(np.int64)).to(backbone.device)
        masks = block_masks(positions, lens, self._block)
        capture = CaptureAttend(backbone.rope, lens, positions, masks, sketch_layer=backbone.n_layers // 2)
        backbone.encode(ids, capture)
        return capture

    def _encode(self, chunks: list[NDArray[np.int32]]) -> list[tuple[ChunkMeta, ChunkKV]]:
        lens = [len(chunk) for chunk in chunks]
        capture = self.capture(chunks)
        keys = torch.split(torch.stack(capture.keys).to("cpu", self._dtype), lens, dim=1)
        values = torch.split(torch.stack(capture.values).to("cpu", self._dtype), lens, dim=1)
        return [
            (
                ChunkMeta(self._fingerprint.chunk_id(chunk), chunk, sketch.to("cpu", torch.float16).numpy()),
                ChunkKV(k, v),
            )
            for chunk, sketch, k, v in zip(chunks, capture.sketches, keys, values, strict=True)
        ]
