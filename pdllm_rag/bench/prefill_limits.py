"""What prefill is held up by: computing, copying KV to host memory, or writing it to the disk.

In turns within one run:
- compute: batches encoded, KV left on the device; its operations against a large matrix product's rate;
- host: the same through `ChunkEncoder.batches`, KV in host memory, dropped as it comes;
- store: the same and `put` into a new LMDB store, checksums and commits included;
- disk: a plain file of as many bytes as one batch's KV, on the disk when its time ends.

Each part's rate is given in tokens per second, the unit in which they limit each other.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import KVDtype, LMDBStore, ModelFingerprint

from pdllm_rag.bench.ceilings import describe_device, host_copies, measure_ceilings, write_synced
from pdllm_rag.bench.kv_files import raw
from pdllm_rag.bench.machine import Spread, describe, take_turns
from pdllm_rag.bench.prefill import random_chunks
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.models.loader import LoadedModel

ROOM = 1.5  # bytes on the disk for each byte of KV: the store, the plain file, pages between records


@torch.inference_mode()
def bench_prefill_limits(
    model: LoadedModel,
    *,
    batch: int = 16,
    chunk_len: int = 1024,
    batches: int = 4,
    repeat: int = 3,
    kv_dtype: KVDtype = "bfloat16",
    folder: str | None = None,
) -> dict[str, Any]:
    """Measure the parts of a prefill of random chunks.

    Args:
        batch: chunks of one forward.
        chunk_len: tokens of a chunk, BOS included.
        batches: forwards of one round, so that parts which can overlap do.
        repeat: counted rounds.
        folder: where the store and the plain file are made, and removed again; None for the system's own.

    Raises:
        ValueError: a size below 1 (chunk_len: 2), or too little room on the disk.
    """
    if min(batch, batches) < 1 or chunk_len < 2:
        raise ValueError(f"batch {batch}, batches {batches}, chunk_len {chunk_len}; expected at least 1, 1 and 2")
    device = model.backbone.device
    fingerprint = model.fingerprint(kv_dtype)
    n_tokens = batches * batch * chunk_len
    batch_bytes = batch * chunk_len * fingerprint.bytes_per_token
    encoder = ChunkEncoder(model, fingerprint, batch_tokens=batch * chunk_len)
    chunks = random_chunks(model, batches * batch, chunk_len, seed=0)

    def compute() -> None:
        for first in range(0, len(chunks), batch):
            encoder.capture(chunks[first : first + batch])

    def to_host() -> None:
        for _ in encoder.batches(chunks):
            pass

    with tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=folder) as temporary:
        _check_room(Path(temporary), batches * batch_bytes)
        target = _Target(Path(temporary), kv_dtype, batch_bytes)
        try:
            ms = take_turns(
                {
                    "compute": compute,
                    "host": to_host,
                    "store": lambda: target.put(encoder, chunks, fingerprint),
                    "disk": target.write_plain,
                },
                repeat,
                device=device,
                prepare={"store": target.renew, "disk": target.remove_plain},
            )
        finally:
            target.close()
    ceilings = measure_ceilings(device, model.backbone.dtype)
    copies = host_copies(device)
    tokens = {name: [n_tokens * 1000 / value for value in ms[name]] for name in ("compute", "host", "store")}
    plain = [batch_bytes * 1000 / value for value in ms["disk"]]
    rates = {
        "compute": Spread.of(tokens["compute"]).median,
        "copy": max(copies.values()) / fingerprint.bytes_per_token,
        "disk": Spread.of(plain).median / fingerprint.bytes_per_token,
    }
    limit = min(rates, key=lambda name: rates[name])
    flops = flops_per_token(model, chunk_len)
    return {
        "machine": {**describe(model)._asdict(), **describe_device(device, model.backbone.dtype)},
        "model": model.spec.name,
        "repeat": repeat,
        "shapes": {"batch": batch, "batches": batches, "chunk_len": chunk_len, "tokens": n_tokens},
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": fingerprint.bytes_per_token,
        "matmul_flops_per_s": ceilings.flops_per_s,
        "compute": {
            "what": "encoded, KV left on the device",
            "tokens_per_s": Spread.of(tokens["compute"]).as_dict(),
            "flops_per_token": flops,
            "matmul_share": flops * rates["compute"] / ceilings.flops_per_s,
        },
        "host": {
            "what": "encoded, KV in host memory",
            "tokens_per_s": Spread.of(tokens["host"]).as_dict(),
            "copy_bytes_per_s": copies,
        },
        "store": {
            "what": "encoded, KV in a new LMDB store",
            "tokens_per_s": Spread.of(tokens["store"]).as_dict(),
            "bytes_per_s": Spread.of([rate * fingerprint.bytes_per_token for rate in tokens["store"]]).as_dict(),
        },
        "disk": {"what": "a plain file of one batch's bytes, one fsync", "bytes_per_s": Spread.of(plain).as_dict()},
        "limit": {
            "tokens_per_s": rates,
            "is": limit,
            "store_share": Spread.of(tokens["store"]).median / rates[limit],
            "host_share": Spread.of(tokens["host"]).median / min(rates["compute"], rates["copy"]),
        },
    }


def flops_per_token(model: LoadedModel, chunk_len: int) -> int:
    """Floating-point operations that encoding takes for a token: products with weights, and attention in its chunk.

    The last layer's output is never computed, so its output projection and MLP are not counted.
    """
    backbone = model.backbone
    layers = backbone.model.model.layers
    left_out = [*layers[-1].self_attn.o_proj.parameters(), *layers[-1].mlp.parameters()]
    n_weights: int = sum(p.numel() for p in layers.parameters()) - sum(p.numel() for p in left_out)
    return 2 * n_weights + 4 * chunk_len * backbone.n_heads * backbone.head_dim * backbone.n_layers


def _check_room(folder: Path, n_bytes: int) -> None:
    """Raises ValueError unless so many bytes of KV fit onto the disk with some to spare."""
    free = shutil.disk_usage(folder).free
    if free < ROOM * n_bytes:
        raise ValueError(
            f"{folder} has {free} bytes free, and a round writes {n_bytes} bytes of KV; take fewer batches or smaller "
            "ones, or another folder"
        )


class _Target:
    """Where KV is written: a store and a plain file in one folder."""

    def __init__(self, folder: Path, kv_dtype: KVDtype, plain_bytes: int) -> None:
        self._store_folder, self._plain = folder / "store", folder / "plain"
        self._kv_dtype = kv_dtype
        self._data = raw(torch.empty(plain_bytes, dtype=torch.uint8).random_()).data
        self._store: LMDBStore | None = None

    def renew(self) -> None:
        """Begin with an empty store."""
        self.close()
        shutil.rmtree(self._store_folder, ignore_errors=True)
        self._store = LMDBStore.open(self._store_folder, kv_dtype=self._kv_dtype)

    def put(self, encoder: ChunkEncoder, chunks: Sequence[NDArray[np.int32]], fingerprint: ModelFingerprint) -> None:
        """Encode and store, batch by batch."""
        assert self._store is not None
        self._store.register(fingerprint)
        for encoded in encoder.batches(chunks):
            self._store.put(fingerprint, encoded)

    def remove_plain(self) -> None:
        """Leave no plain file, whose pages would be written over."""
        self._plain.unlink(missing_ok=True)

    def write_plain(self) -> None:
        """One plain file, on the disk at the end."""
        write_synced(self._plain, self._data)

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None
