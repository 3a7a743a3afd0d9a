"""Stores of one model into one: what several machines have prefilled, each its part.

- a document is taken whole or not at all, and what is there already is not copied: a merge that was interrupted goes
  on where it stopped, and one that is repeated changes nothing;
- nobody wins a conflict: one id with two contents is an error, before anything is changed;
- a sample of what is to be copied is computed again first, since a checksum only says that a record is as it was
  written, not that it is what the model computes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch

from pdllm_store.errors import (
    ChunkDiffersError,
    ChunkNotFoundError,
    DocumentConflictError,
    RecordDamagedError,
    StoreMismatchError,
)
from pdllm_store.held import absent
from pdllm_store.protocol import ChunkStore
from pdllm_store.recomputing import TOLERANCE, difference
from pdllm_store.types import ChunkId, ChunkKV, ChunkMeta, DocumentInfo, ModelFingerprint, Recompute

_BYTES_AT_ONCE = 64 << 20  # of KV that is copied in one transaction, about
_DOCUMENTS_AT_ONCE = 256
_COMPARED_AT_ONCE = 32


class MergeReport(NamedTuple):
    """What a merge did. `compared` are chunks that were computed again before any was trusted."""

    documents: int  # that went in
    unchanged: int  # that were there already
    chunks: int  # that were copied
    compared: int
    bytes: int  # of KV that were written


def merge(
    dest: ChunkStore,
    sources: Sequence[ChunkStore],
    fingerprint: ModelFingerprint,
    *,
    recompute: Recompute | None = None,
    sample: float = 0.0,
    seed: int | None = None,
) -> MergeReport:
    """Bring the documents of other stores into one. Pins stay behind.

    Args:
        fingerprint: of the model whose documents they are.
        recompute: encodes chunks from their token ids; needed for a sample, and for chunks that a source has evicted.
        sample: the share, 0 to 1, of each source's new chunks that is computed again and compared, rounded up.
        seed: of the sample; None takes another one every time, so that nobody knows which chunks are looked at.

    Raises:
        StoreMismatchError: a source keeps another dtype, or documents of another model.
        DocumentConflictError: two stores hold one document id with different contents.
        ChunkDiffersError: a chunk of the sample is not what the model computes.
        ValueError: a sample without `recompute`. In all of these cases nothing was changed.
        ChunkNotFoundError, RecordDamagedError, StoreFullError: what went in before stays.
    """
    if sample and recompute is None:
        raise ValueError(f"the sample is {sample} and nothing can compute it; give recompute, or a sample of 0")
    taken, n_unchanged = _to_take(dest, sources, fingerprint)
    n_compared = 0
    if sample and recompute is not None:
        for source, infos in taken:
            n_compared += _check_sample(dest, source, infos, fingerprint, recompute, sample, random.Random(seed))
    n_chunks = n_bytes = 0
    for source, infos in taken:
        for part in _parts(infos, fingerprint):
            wanted = _wanted(dest, part)
            for items in _loaded(source, wanted, fingerprint, recompute):
                n_bytes += dest.put(fingerprint, items)
            n_chunks += len(wanted)
            for info in part:
                dest.add_document(fingerprint, source.document(fingerprint, info.doc_id))
    return MergeReport(sum(len(infos) for _, infos in taken), n_unchanged, n_chunks, n_compared, n_bytes)


def _to_take(
    dest: ChunkStore, sources: Sequence[ChunkStore], fingerprint: ModelFingerprint
) -> tuple[list[tuple[ChunkStore, list[DocumentInfo]]], int]:
    """The documents of each source that neither the destination nor a source before it holds, and how many others."""
    held = {info.doc_id: (info, dest) for info in dest.documents(fingerprint)}
    taken = []
    n_held = 0
    for source in sources:
        _check_source(dest, source, fingerprint)
        n_damaged = source.stats().damaged
        infos = source.documents(fingerprint)
        if source.stats().damaged > n_damaged:
            raise RecordDamagedError(
                f"{source.path} has damaged rows, so documents would be left out; `pdllm store verify` names them, and "
                "prefilling it again writes them anew"
            )
        new = []
        for info in infos:
            other, holder = held.setdefault(info.doc_id, (info, source))
            if holder is source:
                new.append(info)
            elif _content(other) != _content(info):
                raise DocumentConflictError(
                    f"document {info.doc_id!r} has one content in {holder.path} and another in {source.path}; nothing "
                    "was merged. Delete the one that is out of date (`pdllm store delete`), then merge again"
                )
        taken.append((source, new))
        n_held += len(infos) - len(new)
    return taken, n_held


def _check_source(dest: ChunkStore, source: ChunkStore, fingerprint: ModelFingerprint) -> None:
    if source.kv_dtype != dest.kv_dtype:
        raise StoreMismatchError(
            f"{source.path} keeps {source.kv_dtype}, {dest.path} keeps {dest.kv_dtype}; expected one stored dtype, so "
            "prefill one of them anew"
        )
    others = [f for f in source.fingerprints() if f.digest != fingerprint.digest and source.documents(f)]
    if others:
        raise StoreMismatchError(
            f"{source.path} holds documents of {others[0].family} ({others[0].digest.hex()}), expected only those of "
            f"{fingerprint.family} ({fingerprint.digest.hex()}); merge the stores of each model by themselves"
        )


def _content(info: DocumentInfo) -> tuple[object, ...]:
    """What has to be alike for two documents to be one; machines may have it under different paths."""
    return info.text_id, info.recipe, info.chunk_ids, dict(info.metadata)


def _wanted(dest: ChunkStore, infos: Sequence[DocumentInfo]) -> list[ChunkId]:
    """Chunks of these documents that the destination lacks."""
    return absent(dest, [chunk_id for info in infos for chunk_id in info.chunk_ids])


def _check_sample(
    dest: ChunkStore,
    source: ChunkStore,
    infos: Sequence[DocumentInfo],
    fingerprint: ModelFingerprint,
    recompute: Recompute,
    share: float,
    generator: random.Random,
) -> int:
    """The number of chunks that were compared. Raises ChunkDiffersError for the first that differs."""
    wanted = _wanted(dest, infos)
    gone = set(source.missing(wanted))
    candidates = sorted(chunk_id for chunk_id in wanted if chunk_id not in gone)
    chosen = generator.sample(candidates, ceil(share * len(candidates)))
    most = TOLERANCE[fingerprint.kv_dtype]
    for start in range(0, len(chosen), _COMPARED_AT_ONCE):
        for batch in recompute([source.meta(chunk_id) for chunk_id in chosen[start : start + _COMPARED_AT_ONCE]]):
            for meta, computed in batch:
                deviation = difference(source.load(meta.chunk_id), computed)
                if not deviation <= most:  # NaN is no agreement
                    raise ChunkDiffersError(
                        f"chunk {meta.chunk_id.hex()} of {source.path} deviates by {deviation:.3g} from what the model "
                        f"computes, expected at most {most}; nothing was merged. Prefill that store anew, or drop what "
                        "differs with `pdllm store verify --recompute 1 --repair`",
                        meta.chunk_id,
                        deviation,
                    )
    return len(chosen)


def _parts(infos: Sequence[DocumentInfo], fingerprint: ModelFingerprint) -> Iterator[list[DocumentInfo]]:
    """Documents that are copied together."""
    part: list[DocumentInfo] = []
    for info in infos:
        part.append(info)
        n_bytes = sum(each.n_tokens for each in part) * fingerprint.bytes_per_token
        if n_bytes >= _BYTES_AT_ONCE or len(part) == _DOCUMENTS_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _loaded(
    source: ChunkStore, chunk_ids: Sequence[ChunkId], fingerprint: ModelFingerprint, recompute: Recompute | None
) -> Iterator[Sequence[tuple[ChunkMeta, ChunkKV]]]:
    """Chunks of a source; those that it has evicted are computed again."""
    gone = dict.fromkeys(source.missing(chunk_ids))
    if gone and recompute is None:
        raise ChunkNotFoundError(
            f"{source.path} lacks the KV of {len(gone)} chunks (evicted, or damaged and dropped), the first is "
            f"{next(iter(gone)).hex()}, and no model is there to compute them; merge with a sample above 0",
            tuple(gone),
        )
    batch: list[tuple[ChunkMeta, ChunkKV]] = []
    for chunk_id in chunk_ids:
        if chunk_id in gone:
            continue
        meta = source.meta(chunk_id)
        batch.append((meta, _empty(len(meta.token_ids), fingerprint)))
        if sum(len(each.token_ids) for each, _ in batch) * fingerprint.bytes_per_token >= _BYTES_AT_ONCE:
            yield _filled(source, batch)
            batch = []
    if batch:
        yield _filled(source, batch)
    if gone and recompute is not None:
        yield from recompute([source.meta(chunk_id) for chunk_id in gone])


def _empty(n_tokens: int, fingerprint: ModelFingerprint) -> ChunkKV:
    """Tensors that hold the stored dtype exactly: int8 comes back whole from float32, from bfloat16 not."""
    dtype = torch.bfloat16 if fingerprint.kv_dtype == "bfloat16" else torch.float32
    shape = (fingerprint.n_layers, n_tokens, fingerprint.n_kv_heads, fingerprint.head_dim)
    return ChunkKV(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))


def _filled(source: ChunkStore, batch: list[tuple[ChunkMeta, ChunkKV]]) -> list[tuple[ChunkMeta, ChunkKV]]:
    source.load_into([meta.chunk_id for meta, _ in batch], [kv for _, kv in batch])
    return batch
