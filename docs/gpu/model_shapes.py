"""Measure the real families' shapes with random weights on one GPU (`python docs/gpu/model_shapes.py --out FILE`).

A checkpoint in each family's released form (names, config, tokenizer files, shards) is written with random weights and
then used through the public API: loaded, 32k tokens prefilled in chunks of 256 and 1024, stored, loaded again, asked.
Nothing here says anything about answer quality. Needs about 60 GB of disk and 100 GB of memory for LLaDA's shape.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "store"), str(ROOT / "tests")]

import checkpoints  # noqa: E402
from pdllm_store import ChunkKV, ChunkMeta, LMDBStore  # noqa: E402

from pdllm_rag import InputDocument, RagEngine, load_model  # noqa: E402
from pdllm_rag.attention import causal_block  # noqa: E402
from pdllm_rag.bench.machine import describe  # noqa: E402
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder  # noqa: E402
from pdllm_rag.encoder import ChunkEncoder  # noqa: E402
from pdllm_rag.models.loader import LoadedModel  # noqa: E402
from pdllm_rag.placement import plan_offsets  # noqa: E402

GIB = 2**30
LLADA = {
    "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
    "embedding_size": 126464, "vocab_size": 126464,
}  # fmt: skip
DREAM = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 131072,
}  # fmt: skip
SDAR = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada-8b": ("llada-instruct", LLADA),
    "dream-7b": ("dream", DREAM),
    "sdar-8b": ("sdar", SDAR),
}
QUESTION_LEN, ANSWER_LEN, SELECTED, SELECTED_LEN = 64, 32, 4, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="fewer layers, to try the script out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; kept up to date after each shape")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": describe()._asdict(), "tokens": args.tokens, "shapes": {}}
    if args.device == "cuda":
        found["machine"]["device"] = torch.cuda.get_device_name()
    for name in args.shapes:
        with tempfile.TemporaryDirectory(prefix="pdllm-shape-") as folder:
            found["shapes"][name] = measure(name, Path(folder), args)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found["shapes"][name]), flush=True)


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one shape."""
    kind, changes = SHAPES[name]
    if args.layers:
        changes = {**changes, "n_layers" if "n_layers" in changes else "num_hidden_layers": args.layers}
    write_random_checkpoint(folder / "model", kind, changes, device=args.device)
    started = time.perf_counter()
    model = load_model(str(folder / "model"), device=args.device, dtype=torch.bfloat16)
    load_s = time.perf_counter() - started
    spec, fingerprint = model.spec, model.fingerprint("bfloat16")
    n_parameters = sum(p.numel() for p in model.backbone.model.model.layers.parameters())
    figures: dict[str, Any] = {
        "family": spec.family.name,
        "load_s": load_s,
        "weights_gib": sum(p.numel() * p.element_size() for p in model.backbone.model.parameters()) / GIB,
        "kv_bytes_per_token": fingerprint.bytes_per_token,
        "matmul_tflops": matmul_tflops(args.device),
        "copies_gb_per_s": host_copies(args.device),
        "prefill": {},
    }
    for chunk_len in (256, 1024):
        figures["prefill"][str(chunk_len)] = prefill_and_reload(
            model, folder / f"kb-{chunk_len}", args, chunk_len, n_parameters, figures["matmul_tflops"]
        )
        shutil.rmtree(folder / f"kb-{chunk_len}")
    figures["step"] = step(model, args.device)
    figures["ask"] = ask(model, folder / "kb")
    if args.device == "cuda":
        figures["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    return figures


def write_random_checkpoint(folder: Path, kind: str, changes: dict[str, Any], *, device: str) -> None:
    """A checkpoint of the real size: random weights, and a tokenizer with as many tokens as the embedding has rows."""
    rows = changes.get("embedding_size", changes.get("vocab_size"))
    small = checkpoints.vocabulary

    def vocabulary(kind: str) -> tuple[dict[str, int], dict[str, int]]:
        base, added = small(kind)
        words = [*base, *(f"<filler {n}>" for n in range(rows - len(base) - len(added)))]
        base = {word: number for number, word in enumerate(words)}
        return base, {token: len(base) + number for number, token in enumerate(added)}

    checkpoints.vocabulary = vocabulary
    try:
        folder.mkdir(parents=True)
        config = {**checkpoints._config(kind, vocabulary(kind)[1]), **changes}
        (folder / "config.json").write_text(json.dumps(config))
        checkpoints.write_tokenizer(folder, kind)
        shapes = checkpoints._shapes(kind, config)
    finally:
        checkpoints.vocabulary = small
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    n_shards = 0
    for index, (name, shape) in enumerate(shapes.items()):
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        shard[name] = (tensor * 0.02 if len(shape) > 1 else tensor * 0.02 + ("norm" in name or "ln_f" in name)).cpu()
        if sum(t.nbytes for t in shard.values()) > 4 * GIB or index == len(shapes) - 1:
            n_shards += 1
            file = f"model-{n_shards:05}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def timed(body: Callable[[], object], device: str, *, repeat: int = 5) -> float:
    """Median seconds, after one call that is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        synchronise(device)
        started = time.perf_counter()
        body()
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_tflops(device: str) -> float:
    """The rate of one large bfloat16 product: the ceiling of prefill."""
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, device, repeat=10) / 1e12


def host_copies(device: str) -> dict[str, float]:
    """GB/s from host to device: what a chunk's KV costs once it is in memory."""
    n_bytes = 1 << (30 if device == "cuda" else 20)
    target = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    pageable = torch.zeros(n_bytes, dtype=torch.uint8)
    found = {"pageable": n_bytes / timed(lambda: target.copy_(pageable), device) / 1e9}
    if device == "cuda":
        pinned = pageable.pin_memory()
        found["pinned"] = n_bytes / timed(lambda: target.copy_(pinned, non_blocking=True), device) / 1e9
    return found


def prefill_and_reload(
    model: LoadedModel, path: Path, args: argparse.Namespace, chunk_len: int, n_parameters: int, ceiling: float
) -> dict[str, Any]:
    """Encode, store, load: seconds, rates, and what one chunk costs either way."""
    device, backbone, spec = args.device, model.backbone, model.spec
    fingerprint = model.fingerprint("bfloat16")
    generator = np.random.default_rng(chunk_len)
    chunks = [
        np.concatenate(([spec.bos_id], generator.integers(0, 200, chunk_len - 1))).astype(np.int32)
        for _ in range(args.tokens // chunk_len)
    ]
    per_batch = max(1, 16384 // chunk_len)
    encoder = ChunkEncoder(model, fingerprint, batch_tokens=per_batch * chunk_len)

    n_tokens = per_batch * chunk_len
    batch_s = timed(lambda: encoder.capture(chunks[:per_batch]), device, repeat=3)
    single_s = timed(lambda: encoder.capture(chunks[:1]), device)
    heads = backbone.n_heads * backbone.head_dim * backbone.n_layers
    flops_per_token = 2 * n_parameters + 4 * chunk_len * heads
    started = time.perf_counter()
    encoded = [item for batch in encoder.batches(chunks) for item in batch]
    to_host_s = time.perf_counter() - started
    with LMDBStore.open(path) as store:
        started = time.perf_counter()
        for start in range(0, len(encoded), 16):
            store.put(fingerprint, encoded[start : start + 16])
        write_s = time.perf_counter() - started
        ids = [meta.chunk_id for meta, _ in encoded]
        is_sound = store.verify().ok
    data = os.open(path / "data.mdb", os.O_RDONLY)  # after closing: pages that are mapped stay in memory
    os.fsync(data)
    os.posix_fadvise(data, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(data)
    with LMDBStore.open(path) as store:
        loads = reload(store, encoded, ids, device)
    n_bytes = len(chunks) * chunk_len * fingerprint.bytes_per_token
    return {
        "chunks": len(chunks),
        "batch_tokens": n_tokens,
        "compute_tokens_per_s": n_tokens / batch_s,
        "matmul_share": flops_per_token * n_tokens / batch_s / 1e12 / ceiling,
        "to_host_tokens_per_s": len(chunks) * chunk_len / to_host_s,
        "write_gb_per_s": n_bytes / write_s / 1e9,
        "sound": is_sound,
        "one_chunk_ms": {
            "compute_alone": 1000 * single_s,
            "compute_in_a_batch": 1000 * batch_s / per_batch,
            **loads,
        },
    }


def reload(
    store: LMDBStore, encoded: list[tuple[ChunkMeta, ChunkKV]], ids: list[bytes], device: str
) -> dict[str, float]:
    """Milliseconds that a chunk takes from the disk, the page cache and pinned memory to the device."""
    some = ids[: max(4, min(len(ids), 64 * 256 // encoded[0][1].k.shape[1]))]
    shape = encoded[0][1].k.shape
    host = [
        ChunkKV(*(torch.empty(shape, dtype=torch.bfloat16, pin_memory=device == "cuda") for _ in range(2)))
        for _ in some
    ]
    on_device = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def copy() -> None:
        for kv in host:
            for source, target in zip(kv, on_device, strict=True):
                target.copy_(source, non_blocking=True)

    def load() -> None:
        store.load_into(some, host)
        copy()

    started = time.perf_counter()
    load()
    synchronise(device)
    cold_s = time.perf_counter() - started
    warm_s = timed(load, device, repeat=3)
    pinned_s = timed(copy, device, repeat=3)
    for chunk_id, kv in list(zip(some, host, strict=True))[:4]:
        expected = {meta.chunk_id: kv for meta, kv in encoded}[chunk_id]
        assert torch.equal(kv.k.view(torch.int16), expected.k.view(torch.int16)), "what was loaded is not what was put"
    return {
        "load_from_disk": 1000 * cold_s / len(some),
        "load_from_page_cache": 1000 * warm_s / len(some),
        "load_from_pinned_memory": 1000 * pinned_s / len(some),
    }


def step(model: LoadedModel, device: str) -> dict[str, float]:
    """One static-KV denoising step over 4 x 1024 stored tokens, eager."""
    spec, backbone = model.spec, model.backbone
    shape = (backbone.n_layers, SELECTED_LEN, backbone.n_kv_heads, backbone.head_dim)
    kvs = [ChunkKV(*(torch.randn(shape).to(torch.bfloat16) for _ in range(2))) for _ in range(SELECTED)]
    multiple = causal_block(spec.family) or 1
    placement = plan_offsets([SELECTED_LEN] * SELECTED, "sequential", chunk_len=SELECTED_LEN, multiple=multiple)
    request = DecodeRequest(list(range(QUESTION_LEN)), placement, ANSWER_LEN, chunk_kv=kvs)
    decoder = StaticKVDecoder(model, CommitRule(threshold=1.0))
    at = []
    for _ in decoder.steps([request]):
        synchronise(device)
        at.append(time.perf_counter())
    gaps = [1000 * (b - a) for a, b in pairwise(at)]
    return {
        "rows": QUESTION_LEN + ANSWER_LEN,
        "selected": SELECTED * SELECTED_LEN,
        "ms": median(gaps),
        "steps": len(at),
    }


def ask(model: LoadedModel, path: Path) -> dict[str, Any]:
    """A question through the engine: prefill, restart, ask; the second time by whichever way is cheaper."""
    text = "\n\n".join(f"Paragraph {i} says that codeword p{i} opens door number {7 * i}." for i in range(200))
    documents = [InputDocument(f"d{i}", f"{i} {text}", f"d{i}") for i in range(4)]
    with RagEngine.open(path, model) as engine:
        report = engine.prefill(documents)
    found: dict[str, Any] = {"prefill_tokens": report.tokens}
    for load in ("store", "auto"):
        with RagEngine.open(path, model, create=False, pool_bytes=0, load=load) as engine:
            seconds = []
            for n in range(5):
                started = time.perf_counter()
                answer = engine.answer(f"Which codeword opens door {7 * n}?", k=4, max_new_tokens=32, abstain=False)
                seconds.append(time.perf_counter() - started)
            found[load] = {"s": median(seconds[2:]), "chunks": answer.stats.chunks._asdict()}
    return found


if __name__ == "__main__":
    main()
