"""What opening and listing a store take as it grows: milliseconds, and bytes of memory for each chunk.

- two stores, one ten times the other; their chunks have token ids and sketches of real size and next to no KV;
- every action has a process of its own, as memory that another one has freed would hide what it takes;
- peak memory counts the pages of the file that were read, which the system takes back when it needs them; own memory
  does not. What a listing returned is still held when they are read;
- the limit of `iter_meta` is LMDB's cursor alone over the same rows.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pdllm_store import ChunkKV, ChunkMeta, ChunkRef, Document, LMDBStore, ModelFingerprint

from pdllm_rag.bench.machine import Spread

SMALLER = 10  # times as many chunks are in the larger store
REPEAT = 3
DOCUMENT_CHUNKS = 100
BATCH_CHUNKS = 2000
CHUNK_CHARS = 600
FINGERPRINT = ModelFingerprint("bench", "", "", "", 1, 1, 1, "", "bfloat16", 0, "bidirectional")


class _Memory(NamedTuple):
    """Bytes of this process."""

    now: int
    peak: int  # since it was last reset
    own: int  # not mapped from files


def _rows(store: LMDBStore) -> int:
    with store._transactions.read() as tables:
        return sum(len(row) for _, row in tables.scan("metas"))


LISTINGS: dict[str, tuple[str, Callable[[LMDBStore], object]]] = {
    "open": ("opening the store", lambda store: store),
    "stats": ("stats", lambda store: store.stats()),
    "rows": ("LMDB's cursor over the rows of all chunks, the limit of iter_meta", _rows),
    "iter_meta": ("iter_meta to its end, nothing kept", lambda store: deque(store.iter_meta(FINGERPRINT), 0)),
    "refs": ("refs, all kept", lambda store: store.refs(FINGERPRINT)),
    "documents": ("documents, all kept", lambda store: store.documents(FINGERPRINT)),
}


def bench_growth(folder: Path, n_chunks: int, *, chunk_len: int, sketch_len: int) -> dict[str, Any]:
    """Measure stores of a tenth of `n_chunks` and of `n_chunks` chunks (10 or more), made in `folder`.

    Args:
        sketch_len: elements of a chunk's sketch.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    sizes = [n_chunks // SMALLER, n_chunks]
    file_bytes, found = [], []
    for first, last in zip([0, *sizes], sizes, strict=False):
        with LMDBStore.open(folder / "growth", kv_dtype="bfloat16") as store:
            _fill(store, range(first, last), chunk_len, sketch_len)
            file_bytes.append(store.stats().used_bytes)
        with context.Pool(1, maxtasksperchild=1) as pool:
            found.append(pool.map(partial(_measure, str(folder / "growth")), LISTINGS, chunksize=1))

    def each(bytes_of_both: Sequence[int]) -> float:
        return (bytes_of_both[1] - bytes_of_both[0]) / (sizes[1] - sizes[0])

    return {
        "measures": f"a store of {n_chunks:,} chunks of {chunk_len} tokens; bytes of memory a chunk by the difference "
        f"from one of {sizes[0]:,}",
        "n_chunks": sizes,
        "file_bytes_per_chunk": each(file_bytes),
        "sides": {
            name: {
                "what": what,
                "ms": Spread.of(large["ms"]).as_dict(),
                "ms_smaller": Spread.of(small["ms"]).as_dict(),
                "peak_bytes_per_chunk": each([small["peak"], large["peak"]]),
                "own_bytes_per_chunk": each([small["own"], large["own"]]),
            }
            for (name, (what, _)), small, large in zip(LISTINGS.items(), *found, strict=True)
        },
    }


def _fill(store: LMDBStore, numbers: range, chunk_len: int, sketch_len: int) -> None:
    """Put chunks, and documents of them."""
    kv = ChunkKV(*(torch.zeros(1, chunk_len, 1, 1, dtype=torch.bfloat16) for _ in range(2)))
    sketch = np.zeros(sketch_len, np.float16)
    for start in range(numbers.start, numbers.stop, BATCH_CHUNKS):
        n_rows = min(BATCH_CHUNKS, numbers.stop - start)
        token_ids = np.random.default_rng(start).integers(0, 2**31, (n_rows, chunk_len), dtype=np.int32)
        metas = [ChunkMeta(FINGERPRINT.chunk_id(row), row, sketch) for row in token_ids]
        store.put(FINGERPRINT, [(meta, kv) for meta in metas])
        for at in range(0, n_rows, DOCUMENT_CHUNKS):
            name = f"documents/{start + at}.md"
            refs = tuple(
                ChunkRef(name, i, meta.chunk_id, i * CHUNK_CHARS, (i + 1) * CHUNK_CHARS)
                for i, meta in enumerate(metas[at : at + DOCUMENT_CHUNKS])
            )
            text = "x" * (CHUNK_CHARS * len(refs))
            store.add_document(FINGERPRINT, Document(name, name, text, bytes(16), "", refs, chunk_len * len(refs)))


def _measure(path: str, name: str) -> dict[str, Any]:
    """Milliseconds of a listing's repetitions, and what memory grew by in the first."""
    ms: list[float] = []
    grown: dict[str, int] = {}
    for _ in range(REPEAT):
        opened = None if name == "open" else LMDBStore.open(path)
        before = _memory(reset=True)
        started = time.perf_counter()
        store = LMDBStore.open(path) if opened is None else opened
        kept = LISTINGS[name][1](store)
        ms.append((time.perf_counter() - started) * 1000)
        after = _memory()
        grown = grown or {"peak": after.peak - before.now, "own": after.own - before.own}
        del kept
        store.close()
    return {"ms": ms, **grown}


def _memory(*, reset: bool = False) -> _Memory:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return _Memory(*(1024 * int(status[key]) for key in ("VmRSS", "VmHWM", "RssAnon")))
