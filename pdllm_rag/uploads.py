"""Chunk KV from a store onto a device, in the dtype that the model computes in.

- What the store holds whole is read straight into staging buffers, in the dtype that the store hands it out in, and
  copied from there while the next piece is read. A piece is several chunks, or, of a chunk that is larger than a
  buffer, as many layers as fit.
- Everything else (evicted, lost, damaged) goes through `ChunkStore.fetch`, which computes it again and says so.

Either way an entry is what `fetch` gives, rounded to the device's dtype once, by the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from pdllm_store import ChunkId, ChunkKV, ChunkNotFoundError, ChunkStore, Fetched, RecordDamagedError
from pdllm_store.codec import TORCH_DTYPES

from pdllm_rag.lanes import Lane, Mark
from pdllm_rag.staging import N_SLOTS, SLOT_BYTES, StagingRing


class Piece(NamedTuple):
    """What is read at once: all layers of some chunks, or some layers of one chunk."""

    lens: dict[ChunkId, int]  # tokens
    layers: range


class Uploads:
    """Over one store, device and model.

    Args:
        lane: to the device.
        shape: layers Y, key/value heads G and head dim D of the model.
        dtype: of the entries.
    """

    def __init__(
        self,
        store: ChunkStore,
        lane: Lane,
        *,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        slot_bytes: int = SLOT_BYTES,
        n_slots: int = N_SLOTS,
    ) -> None:
        self._store = store
        self._lane = lane
        self._n_layers, self._n_kv_heads, self._head_dim = shape
        self._dtype = dtype
        self._stored_dtype = TORCH_DTYPES[store.kv_dtype]
        self._ring = StagingRing(lane, slot_bytes=slot_bytes, n_slots=n_slots)

    def load(self, chunk_ids: Sequence[ChunkId]) -> tuple[Fetched, Mark]:
        """Distinct chunks of the store as contiguous [Y, T, G, D] on the device, and the mark behind their copies.

        Raises:
            ChunkNotFoundError, RecordDamagedError: as `ChunkStore.fetch`.
        """
        kv: dict[ChunkId, ChunkKV] = {}
        failed: set[ChunkId] = set()
        for piece in self._pieces(self._lens(chunk_ids)):
            if not failed.isdisjoint(piece.lens):
                continue  # an earlier piece of this chunk could not be read
            for chunk_id, n_tokens in piece.lens.items():
                if chunk_id not in kv:
                    kv[chunk_id] = self._empty(n_tokens)
            try:
                self._read(piece, [kv[chunk_id] for chunk_id in piece.lens])
            except (ChunkNotFoundError, RecordDamagedError):  # of which chunk, `fetch` finds out and tells
                failed.update(piece.lens)
        left = [chunk_id for chunk_id in chunk_ids if chunk_id not in kv or chunk_id in failed]
        fetched = self._store.fetch(left) if left else Fetched({}, frozenset())
        kv |= {chunk_id: self._put(fetched.kv[chunk_id]) for chunk_id in left}
        return Fetched({chunk_id: kv[chunk_id] for chunk_id in chunk_ids}, fetched.recomputed), self._lane.mark()

    def put(self, fetched: Fetched) -> tuple[Fetched, Mark]:
        """The same chunks in memory of their own on the device, and the mark behind their copies.

        Args:
            fetched: KV in any float dtype, in pinned or other memory of the host, or on the device.
        """
        kv = {chunk_id: self._put(chunk) for chunk_id, chunk in fetched.kv.items()}
        return Fetched(kv, fetched.recomputed), self._lane.mark()

    def _lens(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, int]:
        """Tokens of the chunks that the store holds whole."""
        missing = set(self._store.missing(chunk_ids))
        lens = {}
        for chunk_id in chunk_ids:
            if chunk_id not in missing:
                with suppress(ChunkNotFoundError, RecordDamagedError):  # gone since: `fetch` tells
                    lens[chunk_id] = len(self._store.meta(chunk_id).token_ids)
        return lens

    def _pieces(self, lens: Mapping[ChunkId, int]) -> list[Piece]:
        """In order; a chunk of which not one layer fits into a buffer is left out."""
        token_bytes = 2 * self._n_kv_heads * self._head_dim * self._stored_dtype.itemsize  # of one layer
        n_tokens_fit = self._ring.slot_bytes // (token_bytes * self._n_layers)
        every = range(self._n_layers)
        found = []
        together: dict[ChunkId, int] = {}
        for chunk_id, n_tokens in lens.items():
            if n_tokens > n_tokens_fit:
                n_fit = self._ring.slot_bytes // (token_bytes * n_tokens)  # layers
                starts = every[::n_fit] if n_fit else []
                found += [Piece({chunk_id: n_tokens}, every[start : start + n_fit]) for start in starts]
                continue
            if sum(together.values()) + n_tokens > n_tokens_fit:
                found.append(Piece(together, every))
                together = {}
            together[chunk_id] = n_tokens
        return [*found, Piece(together, every)] if together else found

    def _read(self, piece: Piece, targets: Sequence[ChunkKV]) -> None:
        """Read a piece into a staging buffer and put its copies."""
        layers = piece.layers
        with self._ring.slot() as slot:
            staged, start = [], 0
            for target in targets:
                shape = (2, len(layers), *target.k.shape[1:])
                end = start + math.prod(shape) * self._stored_dtype.itemsize
                k, v = slot[start:end].view(self._stored_dtype).view(shape)
                staged.append(ChunkKV(k, v))
                start = end
            self._store.load_into(list(piece.lens), staged, layers=None if len(layers) == self._n_layers else layers)
            for pair, target in zip(staged, targets, strict=True):
                for source, whole in zip(pair, target, strict=True):
                    self._lane.copy(whole[layers.start : layers.stop], source)

    def _put(self, chunk: ChunkKV) -> ChunkKV:
        entry = self._empty(chunk.k.shape[1])
        for source, target in zip(chunk, entry, strict=True):
            if source.device.type != "cpu" or source.is_pinned():
                for part, layer in zip(source, target, strict=True):  # each of them in one piece, whatever the strides
                    self._lane.copy(layer, part)
            else:
                self._stage(source.reshape(-1), target.view(-1))
        return entry

    def _stage(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy flat memory of the host to the device through the staging buffers."""
        n_each = self._ring.slot_bytes // source.itemsize
        for part, goal in zip(torch.split(source, n_each), torch.split(target, n_each), strict=True):
            with self._ring.slot() as slot:
                staged = slot[: part.nbytes].view(part.dtype)
                staged.copy_(part)
                self._lane.copy(goal, staged)

    def _empty(self, n_tokens: int) -> ChunkKV:
        k, v = self._lane.empty((2, self._n_layers, n_tokens, self._n_kv_heads, self._head_dim), self._dtype)
        return ChunkKV(k, v)
