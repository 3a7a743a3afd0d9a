"""What `pdllm doctor` says of a store, and whether reading stored KV gives what computing it gives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pdllm_rag.cli.console import byte_size, counted
from pdllm_rag.cli.doctor import OK, WARNING, WRONG, Finding

if TYPE_CHECKING:
    from pdllm_store import ChunkKV, ChunkMeta, Document, DocumentInfo, MemoryStore, ModelFingerprint
    from pdllm_store.table_store import TableStore

    from pdllm_rag.answer import Answer
    from pdllm_rag.models.loader import LoadedModel

SAMPLE = 16  # chunks that are read
TEXT = "The Gannet buoy weighs 310 kilograms. Its battery lasts 18 months in cold water, and the lamp flashes twice."


class Held(NamedTuple):
    """A document with its KV as it is stored."""

    document: Document
    chunks: list[tuple[ChunkMeta, ChunkKV]]


def health(store: TableStore, name: str, model: LoadedModel | None) -> Iterator[Finding]:
    """Counts, models, and a sample of the records."""
    from pdllm_store import FORMAT

    models = store.fingerprints()
    listed = [info for fingerprint in models for info in store.documents(fingerprint)]
    damaged, missing, n_read = _read_sample(store, listed)
    stats = store.stats()
    counts = f"{counted(stats.documents, 'document')}, {counted(stats.chunks, 'chunk')}, {stats.evicted:,} evicted"
    size = f"{byte_size(stats.file_bytes)} on disk"
    yield Finding(OK, "store", f"{stats.path}: format {FORMAT}, {stats.kv_dtype}, {counts}, {size}")
    if model is not None:
        own = model.fingerprint(store.kv_dtype)
        digest = own.digest.hex()[:12]
        if own in models:
            yield Finding(OK, "fingerprint", f"{digest} of {name}: the store holds its KV")
        elif models:
            others = ", ".join(f"{other.digest.hex()[:12]} ({other.family})" for other in models)
            advice = "give --model the one that it was prefilled with"
            yield Finding(WRONG, "fingerprint", f"{digest} of {name}: the store holds only {others}", advice)
        else:
            yield Finding(WARNING, "fingerprint", "the store holds nothing", "run: pdllm prefill PATH --store DIR")
    unreadable = len(listed) < stats.documents
    if damaged or missing or unreadable:
        found = f"of {n_read} chunks read {damaged} damaged, {missing} without KV"
        found += f"; {stats.documents - len(listed)} documents cannot be read" if unreadable else ""
        yield Finding(WRONG, "records", found, "run: pdllm store verify --repair, and prefill again")
    else:
        yield Finding(OK, "records", f"{counted(n_read, 'chunk')} of {stats.chunks:,} read, all sound")


def reuse(model: LoadedModel, store: TableStore | None) -> Iterator[Finding]:
    """Compute a document's stored KV again, compare, and answer a question from both.

    The document is the store's shortest one that is whole, or, without one, a text of our own; what is computed goes
    into a store in memory.
    """
    from pdllm_store import MemoryStore
    from pdllm_store.codec import decode, encode
    from pdllm_store.recomputing import TOLERANCE, difference
    from pdllm_store.types import ChunkKV

    from pdllm_rag.encoder import ChunkEncoder

    dtype = "bfloat16" if store is None else store.kv_dtype
    fingerprint = model.fingerprint(dtype)
    memory = MemoryStore(kv_dtype=dtype)
    held = None if store is None else _shortest(store, fingerprint)
    if held is None:
        whose, held = "a text of our own", _prefilled(memory, model)
    else:
        whose = f"{held.document.doc_id!r}"
        memory.put(fingerprint, held.chunks)
        memory.add_document(fingerprint, held.document)
    stored = {meta.chunk_id: kv for meta, kv in held.chunks}
    encoder = ChunkEncoder(model, fingerprint)
    off = rounding = 0.0
    for batch in encoder.batches([meta.token_ids for meta, _ in held.chunks]):
        for meta, kv in batch:
            off = _larger(off, difference(stored[meta.chunk_id], kv))
            scaled = ChunkKV(*(1.1 * tensor.float() for tensor in kv))  # what is in that dtype rounds to itself
            rounded = ChunkKV(*(decode(encode(tensor, dtype), dtype, tensor.shape) for tensor in scaled))
            rounding = _larger(rounding, difference(rounded, scaled))
    close = off <= TOLERANCE[dtype]  # NaN is not
    found = (
        f"{counted(len(stored), 'chunk')} of {whose} computed again: off by {off:.2g} of a layer's size at most; "
        f"rounding to {dtype} alone makes about {rounding:.2g}, {TOLERANCE[dtype]:g} is allowed"
    )
    advice = "" if close else "run: pdllm store verify --recompute 1 --repair; without a store, another --device"
    yield Finding(OK if close else WRONG, "stored KV", found, advice)
    yield _same_answer(memory, model, held.document.text, close=close)


def _same_answer(memory: MemoryStore, model: LoadedModel, text: str, *, close: bool) -> Finding:
    first = _answer(memory, model, text)
    memory.evict()
    again = _answer(memory, model, text)
    if first.stats.chunks.recomputed or not first.stats.chunks.hit or not again.stats.chunks.recomputed:
        found = f"{first.stats.chunks.hit} chunks were read and {again.stats.chunks.recomputed} computed again"
        return Finding(WRONG, "answer", f"{found}, expected as many of both; please report this")
    if (first.text, first.stats.nfe) == (again.text, again.stats.nfe):
        return Finding(OK, "answer", "the same from stored KV and from KV computed again")
    if close:
        advice = "KV that was stored in another batch, dtype or thread count rounds otherwise, and a tie may turn"
        return Finding(WARNING, "answer", "from stored KV it is another than from KV computed again", advice)
    return Finding(WRONG, "answer", "from stored KV it is another than from KV computed again")


def _answer(memory: MemoryStore, model: LoadedModel, text: str) -> Answer:
    """From an engine of its own, which has no KV in memory."""
    from pdllm_rag.engine import RagEngine

    with RagEngine(memory, model) as engine:
        question = f"What is said here: {' '.join(text.split()[:12])}?"
        return engine.answer(question, abstain=False, max_new_tokens=16, score_window=math.inf)


def _read_sample(store: TableStore, listed: Sequence[DocumentInfo]) -> tuple[int, int, int]:
    """How many chunks of a sample are damaged, lack their KV without having been evicted, and were looked at."""
    from pdllm_store import RecordDamagedError

    every = sorted({chunk_id for info in listed for chunk_id in info.chunk_ids})
    sample = random.Random(0).sample(every, min(SAMPLE, len(every)))
    absent, evicted = set(store.missing(sample)), set(store.evicted(sample))
    damaged = 0
    for chunk_id in set(sample) - absent:
        try:
            store.load(chunk_id)
        except RecordDamagedError:
            damaged += 1
    return damaged, len(absent - evicted), len(sample)


def _shortest(store: TableStore, fingerprint: ModelFingerprint) -> Held | None:
    """The shortest document whose KV is all there and sound; None if there is none."""
    from pdllm_store import PdllmError

    for info in sorted(store.documents(fingerprint), key=lambda info: info.n_tokens):
        if info.chunk_ids and not store.missing(info.chunk_ids):
            try:
                chunks = [(store.meta(chunk_id), store.load(chunk_id)) for chunk_id in dict.fromkeys(info.chunk_ids)]
                return Held(store.document(fingerprint, info.doc_id), chunks)
            except PdllmError:
                continue  # `health` tells of damage
    return None


def _prefilled(memory: MemoryStore, model: LoadedModel) -> Held:
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.prefill import InputDocument

    with RagEngine(memory, model) as engine:
        engine.prefill([InputDocument("doctor", TEXT, "doctor")])
        held = _shortest(memory, engine.fingerprint)
    assert held is not None
    return held


def _larger(a: float, b: float) -> float:
    """The larger number; NaN if one is."""
    return b if math.isnan(b) or b > a else a
