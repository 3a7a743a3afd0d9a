"""Chunks to KV: each chunk encoded on its own, BOS first, positions 0..T-1.

Inside a chunk every token sees every token, or, in a block-causal family, its own block and the ones before it.

On a GPU a batch is computed while the KV of the one before leaves for the host and is used there: whoever writes each
batch to a store before he asks for the next one writes beside the computation. Then two batches are under way, and the
caller has a third.

Source: Prefilling-dLLM (arXiv 2606.10537), independent chunk prefill with one BOS anchor per chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkKV, ChunkMeta, ModelFingerprint

from pdllm_rag.attends import CaptureAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.lanes import CudaLane, Lane, Mark
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.teams import passing_team

LEAST_BATCH_TOKENS = 1024  # and the batch of a CPU
GPU_BATCH_TOKENS = 16384  # at most: more do not make a GPU faster
GPU_BATCH_KV_BYTES = 1 << 30  # at most, in pinned memory of the host; 2,048 tokens of a model with 512 KiB a token
GPU_TOKEN_BYTES = (
    2 << 20
)  # of a GPU's memory that a token in a batch may need: KV and activations (0.2 to 1.1 MiB seen)


def default_batch_tokens(backbone: Backbone, fingerprint: ModelFingerprint) -> int:
    """Tokens of a batch whose user names none: 1,024 on a CPU, as many as memory allows, and fill it, on a GPU."""
    if backbone.device.type != "cuda":
        return LEAST_BATCH_TOKENS
    free, _ = torch.cuda.mem_get_info(backbone.device)
    by_memory = min(GPU_BATCH_KV_BYTES // fingerprint.bytes_per_token, free // GPU_TOKEN_BYTES)
    return max(LEAST_BATCH_TOKENS, min(GPU_BATCH_TOKENS, by_memory))


class _Leaving(NamedTuple):
    """A batch whose KV is on its way to the host: k, v [Y, N, G, D] and sketches float16 [chunks, G*D]."""

    chunks: list[NDArray[np.int32]]
    k: torch.Tensor
    v: torch.Tensor
    sketches: torch.Tensor
    mark: Mark


class ChunkEncoder:
    """Encodes chunks in batches of about `batch_tokens` tokens.

    Rows are packed, so a batch needs no padding; chunks of like length share a batch, because equally long ones share
    one attention call.

    Args:
        batch_tokens: None takes `default_batch_tokens`.
        lane: that KV takes to the host; None takes one of its own on a CUDA device, and plain copies elsewhere.
    """

    def __init__(
        self,
        model: LoadedModel,
        fingerprint: ModelFingerprint,
        *,
        batch_tokens: int | None = None,
        lane: Lane | None = None,
    ) -> None:
        if batch_tokens is None:
            batch_tokens = default_batch_tokens(model.backbone, fingerprint)
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; expected 1 or more")
        self._model = model
        self._fingerprint = fingerprint
        self._batch_tokens = batch_tokens
        self._block = causal_block(model.spec.family)
        self._dtype = torch.bfloat16 if fingerprint.kv_dtype == "bfloat16" else torch.float32
        on_gpu = model.backbone.device.type == "cuda"
        self._lane = CudaLane(model.backbone.device) if lane is None and on_gpu else lane

    @property
    def batch_tokens(self) -> int:
        """Tokens of a full batch."""
        return self._batch_tokens

    def batches(self, chunks: Sequence[NDArray[np.int32]]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        """Metas and KV [Y, T, G, D] (CPU) of chunks int32 [T], batch by batch, longest chunks first.

        The tensors stay as they are for as long as they are held.
        """
        if self._lane is None:
            with passing_team():
                yield from map(self._encode, self._cut(chunks))
            return
        leaving: deque[_Leaving] = deque()
        for batch in self._cut(chunks):
            leaving.append(self._depart(batch, self._lane))
            if len(leaving) > 1:
                yield self._arrived(leaving.popleft())
        while leaving:
            yield self._arrived(leaving.popleft())

    def capture(self, chunks: Sequence[NDArray[np.int32]]) -> CaptureAttend:
        """Run one batch; its keys and values stay on the model's device."""
        backbone = self._model.backbone
        lens = [len(chunk) for chunk in chunks]
        positions = self._moved(torch.cat([torch.arange(length) for length in lens]))
        ids = self._moved(torch.from_numpy(np.concatenate(chunks).astype(np.int64)))
        masks = block_masks(positions, lens, self._block)
        capture = CaptureAttend(backbone.rope, lens, positions, masks, sketch_layer=backbone.n_layers // 2)
        backbone.encode(ids, capture)
        return capture

    def _cut(self, chunks: Sequence[NDArray[np.int32]]) -> Iterator[list[NDArray[np.int32]]]:
        """The chunks of each batch."""
        batch: list[NDArray[np.int32]] = []
        n_tokens = 0
        for index in sorted(range(len(chunks)), key=lambda i: -len(chunks[i])):
            if batch and n_tokens + len(chunks[index]) > self._batch_tokens:
                yield batch
                batch, n_tokens = [], 0
            batch.append(chunks[index])
            n_tokens += len(chunks[index])
        if batch:
            yield batch

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the model's device, without waiting for what the device is doing."""
        device = self._model.backbone.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def _encode(self, chunks: list[NDArray[np.int32]]) -> list[tuple[ChunkMeta, ChunkKV]]:
        capture = self.capture(chunks)
        k = torch.stack(capture.keys).to("cpu", self._dtype)
        v = torch.stack(capture.values).to("cpu", self._dtype)
        sketches = [sketch.to("cpu", torch.float16).numpy() for sketch in capture.sketches]
        return self._apart(chunks, k, v, sketches)

    def _depart(self, chunks: list[NDArray[np.int32]], lane: Lane) -> _Leaving:
        """Begin to compute a batch, and put the copies of its KV."""
        capture = self.capture(chunks)
        # New memory for each batch: nothing here knows for how long a batch is held.
        k, v = (lane.host((len(rows), *rows[0].shape), self._dtype) for rows in (capture.keys, capture.values))
        for target, layers in ((k, capture.keys), (v, capture.values)):
            for row, layer in zip(target, layers, strict=True):
                lane.copy(row, layer)
        on_device = torch.stack(capture.sketches)
        sketches = lane.host(on_device.shape, torch.float16)
        lane.copy(sketches, on_device)
        return _Leaving(chunks, k, v, sketches, lane.mark())

    def _arrived(self, batch: _Leaving) -> list[tuple[ChunkMeta, ChunkKV]]:
        batch.mark.wait()
        return self._apart(batch.chunks, batch.k, batch.v, list(batch.sketches.numpy().copy()))

    def _apart(
        self,
        chunks: Sequence[NDArray[np.int32]],
        k: torch.Tensor,
        v: torch.Tensor,
        sketches: Sequence[NDArray[np.float16]],
    ) -> list[tuple[ChunkMeta, ChunkKV]]:
        """The parts of a batch's k and v [Y, N, G, D] that are each chunk's."""
        lens = [len(chunk) for chunk in chunks]
        keys, values = torch.split(k, lens, dim=1), torch.split(v, lens, dim=1)
        return [
            (ChunkMeta(self._fingerprint.chunk_id(chunk), chunk, sketch), ChunkKV(key, value))
            for chunk, sketch, key, value in zip(chunks, sketches, keys, values, strict=True)
        ]
