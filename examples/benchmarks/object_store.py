"""Measure stores by URL against a store in a folder, in turns, and write docs/numbers/object_store.json.

    python examples/benchmarks/object_store.py                          # a folder, and moto's S3 on this machine
    python examples/benchmarks/object_store.py --url s3://bucket/place  # a service, by the environment's credentials

KV is random: nothing but its size counts. What is written under the URL stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pdllm_store import ChunkKV, ChunkMeta, ChunkRef, Document, LMDBStore, ObjectChunkStore, TieredChunkStore

from pdllm_rag.bench.machine import describe
from pdllm_rag.bench.section import Side, section
from pdllm_rag.bench.store import StoreShapes

OUT = Path(__file__).parents[2] / "docs" / "numbers" / "object_store.json"
SHAPES = StoreShapes()
FINGERPRINT = SHAPES.fingerprint("bfloat16")
N_PUBLISHED = 32
QUARTER = range(SHAPES.n_layers // 4)
Chunks = list[tuple[ChunkMeta, ChunkKV]]


def batch(seed: int) -> Chunks:
    """Chunks that nobody has written before."""
    ids = np.random.default_rng([seed, time.time_ns()]).integers(0, 2**31, (SHAPES.n_chunks, SHAPES.chunk_len))
    rows = ids.astype(np.int32)
    return [
        (ChunkMeta(FINGERPRINT.chunk_id(row), row), kv)
        for row, kv in zip(rows, SHAPES.random_kv(torch.bfloat16), strict=True)
    ]


def document(name: str, chunks: Chunks) -> Document:
    refs = tuple(ChunkRef(name, n, meta.chunk_id, 10 * n, 10 * n + 10) for n, (meta, _) in enumerate(chunks))
    return Document(name, name, "0123456789" * len(chunks), bytes(16), "bench", refs, 1)


def measure(url: str, folder: Path, repeat: int) -> dict[str, Any]:
    """Every section over one place."""
    with (
        LMDBStore.open(folder / "lmdb") as near,
        ObjectChunkStore.open(url) as far,
        TieredChunkStore.open(url, cache=folder / "cache") as tiered,
    ):
        stores = {"lmdb": near, "object": far, "tiered": tiered}
        numbers = count()
        fresh: dict[str, Chunks] = {}
        held = batch(next(numbers))
        for store in (near, tiered):
            store.put(FINGERPRINT, held)
            store.add_document(FINGERPRINT, document("held", held))
        far.refresh()
        ids = [meta.chunk_id for meta, _ in held]
        out = [ChunkKV(torch.ones_like(kv.k), torch.ones_like(kv.v)) for _, kv in held]
        some = [ChunkKV(kv.k[: len(QUARTER)], kv.v[: len(QUARTER)]) for kv in out]
        n_bytes = sum(kv.k.nbytes + kv.v.nbytes for kv in out)

        def renew(name: str) -> None:
            fresh[name] = batch(next(numbers))

        def publish(name: str) -> None:
            stores[name].add_document(FINGERPRINT, document(f"{name}-{next(numbers)}", held[:1]))

        def load(name: str) -> None:
            stores[name].load_into(ids, out)

        put = {
            name: Side("put", lambda n=name: stores[n].put(FINGERPRINT, fresh[n]), lambda n=name: renew(n))  # type: ignore[misc]
            for name in stores
        }
        published = {
            name: Side("add_document", lambda n=name: publish(n), lambda n=name: getattr(stores[n], "refresh", int)())  # type: ignore[misc]
            for name in stores
        }
        cold = {
            "object": Side("load_into", lambda: load("object")),
            "layers": Side("load_into, a quarter of the layers", lambda: far.load_into(ids, some, layers=QUARTER)),
            "tiered": Side("load_into after the cache was emptied", lambda: load("tiered"), lambda: tiered.evict()),
        }
        warm = {name: Side("load_into", lambda n=name: load(n)) for name in ("lmdb", "tiered")}  # type: ignore[misc]
        sections = {
            "warm": section("one batch that is here", warm, n_bytes, 5 * repeat, limit="lmdb"),
            "cold": section("one batch that is far away", cold, n_bytes, repeat, limit="object"),
            "put": section("one batch of new chunks", put, n_bytes, repeat, limit="lmdb"),
            "publish": section("one document of a chunk that is there", published, 1, repeat, limit="lmdb"),
        }
        opened = section("a handle of a store of some documents", {
            "lmdb": Side("open", lambda: LMDBStore.open(folder / "lmdb").close()),
            "object": Side("open", lambda: ObjectChunkStore.open(url).close()),
            "tiered": Side("open", lambda: TieredChunkStore.open(url, cache=folder / "cache").close()),
        }, 1, repeat, limit="lmdb")  # fmt: skip
        return {**sections, "open": opened}


def publishing(url: str, n_writers: int) -> float:
    """Documents a second that so many handles publish together, each one alone."""
    chunks = batch(0)[:1]

    def write(writer: int) -> None:
        with ObjectChunkStore.open(url) as store:
            store.put(FINGERPRINT, chunks)
            for number in range(N_PUBLISHED // n_writers):
                store.add_document(FINGERPRINT, document(f"{n_writers}-{writer}-{number}", chunks))

    started = time.perf_counter()
    with ThreadPoolExecutor(n_writers) as pool:
        list(pool.map(write, range(n_writers)))
    return N_PUBLISHED / (time.perf_counter() - started)


@contextmanager
def loopback_s3() -> Iterator[str]:
    """A bucket of moto's S3 in a process of its own, which the environment leads to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    names = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    os.environ.update({**names, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"})
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT")).close()
                break
            except OSError:
                time.sleep(0.1)
        yield "s3://bench/store"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an empty place (default: a folder, and moto's S3 on this machine)")
    parser.add_argument("--dir", default=".", help="local disk for the folders (default: here)")
    parser.add_argument("--repeat", type=int, default=10)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=args.dir))).resolve()
        places = {args.url: args.url} if args.url else {
            "folder": (folder / "far").as_uri(), "loopback S3": stack.enter_context(loopback_s3())
        }  # fmt: skip
        figures = {name: measure(url, folder / str(n), args.repeat) for n, (name, url) in enumerate(places.items())}
        writers = {name: {n: publishing(url, n) for n in (1, 2, 4)} for name, url in places.items()}
    print("documents a second, one at a time, by the number of writers:", writers)
    for place, sections in figures.items():
        for name, found in sections.items():
            for side, values in found["sides"].items():
                ms, speed = values["ms"]["median"], values["of_limit"]["median"]
                print(f"{place:12} {name:8} {side:7} {ms:9.1f} ms   {1 / speed:6.2f}x of {found['limit']}")
    result = {
        "machine": describe()._asdict(),
        "published_per_s": writers,
        "batch_bytes": next(iter(figures.values()))["warm"]["n_bytes"],
        **figures,
    }
    OUT.write_text(
        json.dumps({"command": "python examples/benchmarks/object_store.py", "result": result}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
