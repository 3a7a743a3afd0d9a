"""How fast chunks are encoded: against the library's own forward of the same weights, and onto disk.

- both sides see the same chunks in the same batch, in turns within one run;
- ours: `ChunkEncoder`, keys and values of every layer captured, converted to the stored dtype, not written;
- theirs: the transformers model without its head, no cache, under an explicit full mask (bidirectional);
- onto disk: ours and then `put` into a new LMDB store in a temporary folder, checksums and commit included.
"""

from __future__ import annotations

import tempfile
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import KVDtype, LMDBStore

from pdllm_rag.bench.machine import Spread, compare, describe, take_turns
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.models.loader import LoadedModel

TARGET = 0.9  # of the library's own speed
MIB = 2**20


@torch.inference_mode()
def bench_prefill(
    model: LoadedModel,
    *,
    batch: int = 4,
    chunk_len: int = 256,
    repeat: int = 10,
    kv_dtype: KVDtype = "bfloat16",
    folder: str | None = None,
) -> dict[str, Any]:
    """Measure the encoding of random chunks.

    Args:
        batch: chunks of one forward.
        chunk_len: tokens of a chunk, BOS included.
        repeat: counted repetitions.
        folder: where the store is made, and removed again; None for the system's own.

    Raises:
        ValueError: a size below 1 (chunk_len: 2).
    """
    if batch < 1 or chunk_len < 2:
        raise ValueError(f"batch is {batch} and chunk_len {chunk_len}; expected at least 1 and 2")
    backbone = model.backbone
    fingerprint = model.fingerprint(kv_dtype)
    encoder = ChunkEncoder(model, fingerprint, batch_tokens=batch * chunk_len)
    # The store leaves a chunk alone that it holds, so every round writes chunks of its own.
    rounds = [random_chunks(model, batch, chunk_len, seed=turn) for turn in range(repeat + 1)]
    ours, theirs, stored = cycle(rounds), cycle(rounds), cycle(rounds)
    mask = torch.ones(batch, 1, chunk_len, chunk_len, dtype=torch.bool, device=backbone.device)
    written: list[int] = []

    def encode() -> None:
        list(encoder.batches(next(ours)))

    def forward() -> None:
        ids = torch.from_numpy(np.stack(next(theirs)).astype(np.int64)).to(backbone.device)
        backbone.model.model(input_ids=ids, attention_mask=mask, use_cache=False)

    def write() -> None:
        for encoded in encoder.batches(next(stored)):
            written.append(store.put(fingerprint, encoded))

    with tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=folder) as temporary:
        store = LMDBStore.open(temporary, kv_dtype=kv_dtype)
        try:
            store.register(fingerprint)
            ms = take_turns({"transformers": forward, "ours": encode, "written": write}, repeat, device=backbone.device)
        finally:
            store.close()
    n_tokens = batch * chunk_len
    speed = {name: [n_tokens * 1000 / value for value in values] for name, values in ms.items()}
    mib = [n_bytes / MIB * 1000 / value for n_bytes, value in zip(written[1:], ms["written"], strict=True)]
    sides = {
        name: {"name": name, "ms": ms[name], "tokens_per_s": Spread.of(speed[name]).as_dict()}
        for name in ("transformers", "ours")
    }
    encoded = compare(
        "ms, transformers' forward (no cache, explicit full mask) / ours (KV captured and converted, not "
        "written): above 1 ours is faster",
        sides["transformers"],
        sides["ours"],
    )
    return {
        "machine": describe(model)._asdict(),
        "model": model.spec.name,
        "repeat": repeat,
        "shapes": {"batch": batch, "chunk_len": chunk_len, "tokens": n_tokens},
        "kv_dtype": kv_dtype,
        "encode": {**encoded, "target": TARGET},
        "write": {
            "measures": "ours and writing to a new LMDB store",
            "ms": Spread.of(ms["written"]).as_dict(),
            "tokens_per_s": Spread.of(speed["written"]).as_dict(),
            "mib_per_s": Spread.of(mib).as_dict(),
        },
    }


def random_chunks(model: LoadedModel, count: int, chunk_len: int, *, seed: int) -> list[NDArray[np.int32]]:
    """Chunks int32 [chunk_len], BOS and then random ids; the same seed gives the same chunks."""
    generator = np.random.default_rng(seed)
    chunks = generator.integers(0, model.spec.n_tokens, (count, chunk_len), dtype=np.int32)
    chunks[:, 0] = model.spec.bos_id
    return list(chunks)
