"""How fast KV goes to disk and comes back, against plain files and against what the machine can do at all.

- the sides of a section take turns within one run; one of them is the limit, and every figure says what share of the
  limit's speed it reached in the same round;
- write: one batch of chunks to new files, on the disk when the call returns; the limit is one plain file;
- warm: the batch from the page cache into tensors that are there already; the limit is a copy of as many bytes between
  buffers that are there already, divided among as many threads as the store has;
- cold: the same after the page cache was made to forget the files (`resident` is the share that it still knew); the
  limit is reading a plain file, which is what the device gives through the page cache;
- the store stands in each of them with its own layer groups, and with some of other sizes;
- tables: what opening and listing take in a store of many chunks (`growth`);
- codec: tensors to stored bytes and back, one thread; the limit is a copy of the tensors' bytes.

KV is random: nothing but its size counts. Gigabytes are those of the KV as the store hands it out.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pdllm_store import KV_DTYPES, ChunkKV, ChunkMeta, KVDtype, LMDBStore, ModelFingerprint
from pdllm_store.chunks import encode_chunk, put_chunks
from pdllm_store.codec import TORCH_DTYPES, block_bytes, decode_into, encode_into
from pdllm_store.location import DATA_FILE
from pdllm_store.workers import Workers

from pdllm_rag.bench.growth import bench_growth
from pdllm_rag.bench.kv_files import FORMATS, PLAIN_FILE, raw
from pdllm_rag.bench.machine import describe
from pdllm_rag.bench.page_cache import drop
from pdllm_rag.bench.section import Side, section

WARM_TARGET, COLD_TARGET = 0.6, 0.5  # of the limit's speed
OTHER_GROUPS = (4 << 20, 16 << 20)
HEAD_START_S = 0.5  # about as long as a question's candidates are scored


@dataclass(frozen=True)
class StoreShapes:
    """Sizes of what is written and read.

    Attributes:
        chunk_len: tokens of a chunk.
        n_chunks: of one batch: one transaction, one load.
        kv_dtype: that the store keeps; plain files hold what the store hands out.
        threads: of a load, and of the copy beside it; None for as many as the store takes.
        n_metas: chunks of the largest store whose tables are measured.
    """

    n_layers: int = 24
    n_kv_heads: int = 3
    head_dim: int = 64
    chunk_len: int = 256
    n_chunks: int = 8
    kv_dtype: KVDtype = "bfloat16"
    threads: int | None = None
    n_metas: int = 100_000

    def __post_init__(self) -> None:
        if min(*self.shape, self.n_chunks, self.threads or 1) < 1 or self.n_metas < 10:
            raise ValueError(f"{self}; expected n_metas of 10 or more and the others of 1 or more")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a chunk's keys and values, [Y, T, G, D]."""
        return self.n_layers, self.chunk_len, self.n_kv_heads, self.head_dim

    def fingerprint(self, kv_dtype: KVDtype) -> ModelFingerprint:
        """Of a model of this shape that does not exist."""
        n_layers, _, n_kv_heads, head_dim = self.shape
        return ModelFingerprint("bench", "", "", "", n_layers, n_kv_heads, head_dim, "", kv_dtype, 0, "bidirectional")

    def random_kv(self, dtype: torch.dtype) -> list[ChunkKV]:
        """KV of one batch."""
        return [ChunkKV(*torch.randn(2, *self.shape, dtype=dtype)) for _ in range(self.n_chunks)]


def bench_store(
    shapes: StoreShapes | None = None, *, folder: str | PathLike[str] = ".", repeat: int = 10
) -> dict[str, Any]:
    """Measure a store on the disk under `folder`; what is written there is removed again.

    Args:
        repeat: counted repetitions; one more goes ahead.

    Raises:
        ValueError: a bad size, or the disk has too little room.
        OSError: the system cannot drop files from its page cache (any but Linux).
    """
    shapes = shapes or StoreShapes()
    if not hasattr(os, "posix_fadvise"):
        raise OSError("the page cache can be made to forget files on Linux only; measure there")
    _check_room(shapes, Path(folder))
    with tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=folder) as temporary:
        with closing(_Batch(shapes, Path(temporary), repeat)) as batch:
            sections = {"write": batch.write(), "warm": batch.warm(), "cold": batch.cold()}
        vector = shapes.n_kv_heads * shapes.head_dim
        tables = bench_growth(Path(temporary), shapes.n_metas, chunk_len=shapes.chunk_len, sketch_len=vector)
    return {
        "machine": describe()._asdict(),
        "repeat": repeat,
        "shapes": {**asdict(shapes), "threads": batch.threads, "batch_bytes": batch.n_bytes},
        **sections,
        "tables": tables,
        "codec": {dtype: _codec(shapes, dtype, repeat) for dtype in KV_DTYPES},
    }


class _Batch:
    """One batch of chunks, the tensors that it is loaded into, and the stores and folders that it lies in."""

    def __init__(self, shapes: StoreShapes, folder: Path, repeat: int) -> None:
        self.threads = shapes.threads or Workers().n_threads
        self.fingerprint = shapes.fingerprint(shapes.kv_dtype)
        self.kvs = shapes.random_kv(TORCH_DTYPES[shapes.kv_dtype])
        ids = np.random.default_rng(0).integers(0, 2**31, (shapes.n_chunks, shapes.chunk_len), dtype=np.int32)
        self.metas = [ChunkMeta(self.fingerprint.chunk_id(row), row) for row in ids]
        self.chunk_ids = [meta.chunk_id for meta in self.metas]
        # One buffer behind all tensors that are loaded into, so that a copy can divide it among threads evenly.
        target = torch.ones(2 * shapes.n_chunks, *shapes.shape, dtype=self.kvs[0].k.dtype)
        self.out = [ChunkKV(*pair) for pair in target.view(shapes.n_chunks, 2, *shapes.shape)]
        self.n_bytes = target.nbytes
        buffers = raw(target), raw(torch.full_like(target, 2))
        self._copies = list(zip(*(np.array_split(buffer, self.threads) for buffer in buffers), strict=True))
        self._folder = folder
        self._repeat = repeat
        chunk_bytes = self.n_bytes // shapes.n_chunks
        sizes = {f"groups of {size >> 20} MiB": size for size in OTHER_GROUPS if size < chunk_bytes}
        sizes["whole chunks"] = 2 * chunk_bytes
        self._store = _Store(self, folder / "store")
        self._unchecked = _Store(self, folder / "store", verify_reads=False)
        self._others = {name: _Store(self, folder / name, group_bytes=size) for name, size in sizes.items()}

    def close(self) -> None:
        for store in (self._store, self._unchecked, *self._others.values()):
            store.close()

    def write(self) -> dict[str, Any]:
        """Leaves the batch in every store, and in the files of every format."""
        sides = {
            "store": Side("put: encoding, checksums, one transaction, one fsync", self._store.put, self._store.renew)
        }
        for name, store in self._others.items():
            sides[name] = Side(f"the same, {name}", store.put, store.renew)
        for name, form in FORMATS.items():
            write = partial(form.write, self._folder / name, self.kvs)
            sides[name] = Side(form.writing, write, partial(_renew, self._folder / name))
        return self._section("one batch to new files, on the disk at the end", sides, "plain")

    def warm(self) -> dict[str, Any]:
        sides = {
            "store": Side("load_into, checksums compared", self._store.load),
            "unchecked": Side("load_into, verify_reads=False", self._unchecked.load),
        }
        for name, store in self._others.items():
            sides[name] = Side(f"load_into, {name}", store.load)
        for name, form in FORMATS.items():
            sides[name] = Side(form.reading, partial(form.read, self._folder / name, self.out))
        with ThreadPoolExecutor(self.threads) as pool:
            what = f"a copy between buffers that are there, {self.threads} threads"
            sides["copy"] = Side(what, lambda: list(pool.map(lambda part: np.copyto(*part), self._copies)))
            figures = self._section("one batch from the page cache", sides, "copy")
        self._unchecked.close()
        return {**figures, "target": WARM_TARGET}

    def cold(self) -> dict[str, Any]:
        store, plain = self._store, self._folder / "plain" / PLAIN_FILE

        def prefetch_and_load() -> None:
            store.prefetch()
            store.load()

        def forget_and_prefetch() -> None:
            store.forget()
            store.prefetch()
            time.sleep(HEAD_START_S)

        ahead = f"load_into {HEAD_START_S} s after prefetch"
        sides = {
            "store": Side("load_into, checksums compared", store.load, store.forget, store.data),
            "prefetch": Side("prefetch and then load_into at once", prefetch_and_load, store.forget, store.data),
            "prefetched": Side(ahead, store.load, forget_and_prefetch, store.data),
        }
        for name, other in self._others.items():
            sides[name] = Side(f"load_into, {name}", other.load, other.forget, other.data)
        read = partial(FORMATS["plain"].read, plain.parent, self.out)
        sides["plain"] = Side(FORMATS["plain"].reading, read, partial(drop, plain), plain)
        figures = self._section("one batch whose files the page cache was made to forget", sides, "plain")
        return {**figures, "target": COLD_TARGET}

    def _section(self, measures: str, sides: Mapping[str, Side], limit: str) -> dict[str, Any]:
        return section(measures, sides, self.n_bytes, self._repeat, limit=limit)


class _Store:
    """A store for a batch, opened when it is needed.

    Args:
        group_bytes: of a layer group, None for the store's own size.
    """

    def __init__(
        self, batch: _Batch, folder: Path, *, group_bytes: int | None = None, verify_reads: bool = True
    ) -> None:
        self.data = folder / DATA_FILE
        self._batch = batch
        self._group_bytes = group_bytes
        self._verify_reads = verify_reads
        self._handle: LMDBStore | None = None

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def renew(self) -> None:
        """Begin with an empty store."""
        self.close()
        shutil.rmtree(self.data.parent, ignore_errors=True)
        self._opened()

    def forget(self) -> None:
        """Leave nothing of the store in the page cache but what opening it maps."""
        self.close()
        drop(self.data)
        self._opened()
        drop(self.data)  # what was read ahead

    def put(self) -> None:
        fingerprint, items = self._batch.fingerprint, zip(self._batch.metas, self._batch.kvs, strict=True)
        if self._group_bytes is None:
            self._opened().put(fingerprint, items)
            return
        now_ms, size = time.time_ns() // 1_000_000, self._group_bytes
        encoded = [encode_chunk(fingerprint, meta, kv, now_ms=now_ms, group_bytes=size) for meta, kv in items]
        self._opened()._transactions.write(lambda tables: put_chunks(tables, encoded))

    def load(self) -> None:
        self._opened().load_into(self._batch.chunk_ids, self._batch.out)

    def prefetch(self) -> None:
        self._opened().prefetch(self._batch.chunk_ids)

    def _opened(self) -> LMDBStore:
        if self._handle is None:
            dtype = self._batch.fingerprint.kv_dtype
            self._handle = LMDBStore.open(self.data.parent, kv_dtype=dtype, verify_reads=self._verify_reads)
            self._handle._workers.n_threads = self._batch.threads
        return self._handle


def _codec(shapes: StoreShapes, dtype: KVDtype, repeat: int) -> dict[str, Any]:
    """Encoding what a model computes and decoding what the store hands out, whole tensors at a time."""
    fingerprint = shapes.fingerprint(dtype)
    computed = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    tensors = [tensor for kv in shapes.random_kv(computed) for tensor in kv]
    blocks = [bytearray(block_bytes(tensor.shape, dtype)) for tensor in tensors]
    out = [torch.ones(tensor.shape, dtype=TORCH_DTYPES[dtype]) for tensor in tensors]

    def encode() -> None:
        for tensor, block in zip(tensors, blocks, strict=True):
            encode_into(tensor, dtype, memoryview(block))

    def decode() -> None:
        for tensor, block in zip(out, blocks, strict=True):
            decode_into(block, dtype, tensor)

    def copy() -> None:
        for tensor, target in zip(tensors, out, strict=True):
            np.copyto(raw(target), raw(tensor)[: target.nbytes])

    names = [str(one.dtype).removeprefix("torch.") for one in (tensors[0], out[0])]
    sides = {
        "encode": Side(f"encode {names[0]} to {dtype}", encode),
        "decode": Side(f"decode {dtype} to {names[1]}", decode),
        "copy": Side(f"a copy of the {names[1]} bytes", copy),
    }
    n_bytes = sum(tensor.nbytes for tensor in out)
    return {
        "bytes_per_1k_tokens": 1000 * fingerprint.bytes_per_token,
        **section(f"tensors to stored {dtype} and back, one thread", sides, n_bytes, repeat, limit="copy"),
    }


def _renew(folder: Path) -> None:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _check_room(shapes: StoreShapes, folder: Path) -> None:
    """Raises ValueError unless everything fits onto the disk with some to spare."""
    batch_bytes = 8 * shapes.n_chunks * math.prod(shapes.shape)  # in float32
    row_bytes = 8 * shapes.chunk_len + 2 * shapes.n_kv_heads * shapes.head_dim + 1000  # of a chunk with next to no KV
    needed = (len(FORMATS) + len(OTHER_GROUPS) + 2) * batch_bytes + 3 * shapes.n_metas * row_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free} bytes free, and up to {needed} are needed for a while; take fewer chunks or metas, "
            "or another folder"
        )
