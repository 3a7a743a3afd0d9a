"""What a question takes as the corpus grows: opening, the first search, and each phase of an answer.

- one store grows from size to size; the same questions are asked at each;
- chunks are fake: random token ids, and a text of made-up words whose frequencies follow Zipf's law, so that frequent
  words stand in most chunks, as in a language; questions are drawn from the same words;
- no chunk has KV before a question's candidates need it: it is computed when the question is first asked, which is not
  counted. What is counted reads real KV of the model's shape, and scores and decodes with it;
- opening is a new handle on store and index, and its first search; what is in the page cache is left there. Making the
  index, which the first search after a prefill does, is told by itself;
- every answer takes the same number of denoising steps, unless it ends earlier.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
from pdllm_store import ChunkId, ChunkRef, Document, LMDBStore
from pdllm_store.chunks import write_row
from pdllm_store.rows import ChunkRow
from pdllm_store.tables import Tables

from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.bench.prefill import random_chunks
from pdllm_rag.clock import PHASES
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.models.loader import LoadedModel

SIZES = (1_000, 10_000, 100_000)
DOCUMENT_CHUNKS = 100
CHUNK_WORDS = 110
QUESTION_WORDS = 10
VOCABULARY = 100_000
STEPS = 6


def bench_corpus(
    model: LoadedModel,
    sizes: Sequence[int] = SIZES,
    *,
    questions: int = 10,
    repeat: int = 3,
    chunk_len: int = 160,
    seed: int = 0,
    folder: str | PathLike[str] | None = None,
) -> dict[str, Any]:
    """Measure stores of these sizes.

    Args:
        sizes: chunks, ascending.
        repeat: times that every question is asked and counted.
        folder: where the store is made, and removed again; None for the system's own.

    Raises:
        ValueError: sizes that do not ascend from 1.
    """
    if not sizes or any(b <= a for a, b in zip((0, *sizes), sizes, strict=False)):
        raise ValueError(f"sizes are {list(sizes)}; expected chunks of 1 or more, ascending")
    words = _Words(seed)
    asked = [f"{words.drawn(QUESTION_WORDS)}?" for _ in range(questions)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=folder) as made:
        for first, last in zip((0, *sizes), sizes, strict=False):
            with LMDBStore.open(made, kv_dtype="bfloat16") as store:
                _fill(store, model, range(first, last), chunk_len, words)
            build_ms = _first_search_ms(made, model, asked[0])
            opened = [_first_search_ms(made, model, asked[0]) for _ in range(repeat)]
            ms = _asks(made, model, asked, repeat)
            rows.append({"chunks": last, "build_ms": build_ms, "open_ms": Spread.of(opened).as_dict(), "ms": ms})
    return {
        "machine": describe(model)._asdict(),
        "model": model.spec.name,
        "questions": questions,
        "repeat": repeat,
        "chunk_len": chunk_len,
        "candidates": AskOptions().candidates,
        "steps": STEPS,
        "seed": seed,
        "sizes": rows,
        "growth": {
            "chunks": sizes[-1] / sizes[0],
            "total_ms": rows[-1]["ms"]["total"]["median"] / rows[0]["ms"]["total"]["median"],
        },
    }


class _Words:
    """Text of made-up words, drawn with Zipf's frequencies."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        weights = 1 / (np.arange(VOCABULARY) + 2.7)  # Mandelbrot's offset for English
        self._cumulative = np.cumsum(weights / weights.sum())
        self._words = [_spelled(number) for number in range(VOCABULARY)]

    def drawn(self, n: int) -> str:
        """n words with blanks between them."""
        ranks = np.searchsorted(self._cumulative, self.generator.random(n)).tolist()
        return " ".join(self._words[rank] for rank in ranks)


def _spelled(number: int) -> str:
    """A word of letters for a number."""
    letters = chr(97 + number % 26)
    while number := number // 26:
        letters += chr(97 + number % 26)
    return f"{letters}q"  # no ending that stemming would take off


def _fill(store: LMDBStore, model: LoadedModel, numbers: range, chunk_len: int, words: _Words) -> None:
    """Documents of chunks that count as evicted: their token ids are there, their KV is not."""
    fingerprint = model.fingerprint("bfloat16")
    kv_bytes = fingerprint.bytes_per_token * chunk_len
    store.register(fingerprint)
    for start in range(numbers.start, numbers.stop, DOCUMENT_CHUNKS):
        n_rows = min(DOCUMENT_CHUNKS, numbers.stop - start)
        rows = {
            fingerprint.chunk_id(ids): ChunkRow(0, 0, 0, 0, kv_bytes, 0, fingerprint.digest, ids.tobytes(), None)
            for ids in random_chunks(model, n_rows, chunk_len, seed=start)
        }
        store._transactions.write(partial(_write, rows))
        name, text, refs = f"documents/{start:07}.txt", "", []
        for ordinal, chunk_id in enumerate(rows):
            body = f"{words.drawn(CHUNK_WORDS)}. "
            refs.append(ChunkRef(name, ordinal, chunk_id, len(text), len(text) + len(body)))
            text += body
        store.add_document(fingerprint, Document(name, name, text, bytes(16), "", tuple(refs), chunk_len * n_rows))


def _write(rows: Mapping[ChunkId, ChunkRow], tables: Tables) -> None:
    for chunk_id, row in rows.items():
        write_row(tables, chunk_id, row)


def _first_search_ms(folder: str, model: LoadedModel, question: str) -> float:
    """Milliseconds until a new handle on store and index has candidates."""
    started = time.perf_counter()
    with LMDBStore.open(folder) as store:
        BM25Index(store, model.fingerprint("bfloat16")).search(question, AskOptions().candidates)
        return (time.perf_counter() - started) * 1000


def _asks(folder: str, model: LoadedModel, questions: Sequence[str], repeat: int) -> dict[str, dict[str, float]]:
    """Milliseconds of whole answers by phase."""
    options = AskOptions(abstain=False, threshold=1.0, steps=STEPS)
    stats = []
    with RagEngine.open(folder, model, options=options) as engine:
        for turn in range(repeat + 1):
            asked = [engine.answer(question).stats for question in questions]
            stats += asked if turn else []
    return {phase: Spread.of([one.ms[phase] for one in stats]).as_dict() for phase in (*PHASES, "total")}
