"""Merged stores are the store that one machine would have filled, and nothing is merged that should not be."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pdllm_store import (
    KV_DTYPES,
    ChunkDiffersError,
    ChunkKV,
    ChunkMeta,
    ChunkNotFoundError,
    ChunkStore,
    DocumentConflictError,
    KVDtype,
    LMDBStore,
    MemoryStore,
    ModelFingerprint,
    RecordDamagedError,
    StoreFullError,
    StoreMismatchError,
    merge,
)
from pdllm_store.rows import document_key
from pdllm_store.testing import add_chunks, bits, random_chunk, tiny_fingerprint

MODEL = tiny_fingerprint()
SEEDS = {"a": [1, 2, 3], "b": [3, 4], "c": [5], "d": [6, 7, 8, 9], "e": [1, 5]}  # chunks 1, 3 and 5 are shared


def filled(names: Iterable[str], *, kv_dtype: KVDtype = "bfloat16") -> MemoryStore:
    """A store of some of the documents."""
    store = MemoryStore(kv_dtype=kv_dtype)
    for name in names:
        add_chunks(store, tiny_fingerprint(kv_dtype=kv_dtype), name, SEEDS[name])
    return store


def computed(metas: Sequence[ChunkMeta]) -> Iterator[Sequence[tuple[ChunkMeta, ChunkKV]]]:
    """What the made-up model computes."""
    everything = {meta.chunk_id: kv for seed in range(1, 10) for meta, kv in [random_chunk(MODEL, seed=seed)]}
    for meta in metas:
        yield [(meta, everything[meta.chunk_id])]


def content(store: ChunkStore, fingerprint: ModelFingerprint = MODEL) -> dict[str, Any]:
    """All that a store holds, with each chunk's KV as integers."""
    documents = [store.document(fingerprint, info.doc_id) for info in store.documents(fingerprint)]
    kv = {ref.chunk_id: store.load(ref.chunk_id) for ref in store.refs(fingerprint)}
    return {
        "documents": [(d.doc_id, d.text, d.text_id, d.recipe, d.chunks, d.metadata) for d in documents],
        "tokens": {meta.chunk_id: meta.token_ids.tolist() for meta in store.iter_meta(fingerprint)},
        "sketches": {
            meta.chunk_id: None if s is None else s.tolist()
            for meta in store.iter_meta(fingerprint)
            for s in [meta.sketch]
        },
        "kv": {chunk_id: [bits(tensor).tolist() for tensor in pair] for chunk_id, pair in kv.items()},
    }


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_any_partition_merges_into_the_store_of_one_machine(tmp_path: Path, kv_dtype: KVDtype, seed: int) -> None:
    model = tiny_fingerprint(kv_dtype=kv_dtype)
    generator = random.Random(seed)
    parts: list[list[str]] = [[] for _ in range(3)]
    for name in SEEDS:
        for part in generator.sample(parts, generator.choice([1, 1, 2])):
            part.append(name)
    with LMDBStore.open(tmp_path / "kb", kv_dtype=kv_dtype) as dest:
        report = merge(dest, [filled(part, kv_dtype=kv_dtype) for part in parts], model)
        assert content(dest, model) == content(filled(SEEDS, kv_dtype=kv_dtype), model)
        assert (report.documents, report.unchanged) == (5, sum(map(len, parts)) - 5)
        assert report.chunks == 9
        assert dest.verify().ok


def test_what_a_merge_copies_is_the_same_record_byte_for_byte_in_int8_too(tmp_path: Path) -> None:
    model = tiny_fingerprint(kv_dtype="int8")
    with (
        LMDBStore.open(tmp_path / "a", kv_dtype="int8") as source,
        LMDBStore.open(tmp_path / "b", kv_dtype="int8") as dest,
    ):
        for name, seeds in SEEDS.items():
            add_chunks(source, model, name, seeds)
        merge(dest, [source], model)
        records = []
        for store in (source, dest):
            with store._transactions.read() as tables:
                records.append({bytes(key): bytes(value) for key, value in tables.scan("kv")})
    assert records[0] == records[1]
    assert records[0]


def test_a_second_merge_changes_nothing() -> None:
    dest, sources = MemoryStore(), [filled("abc"), filled("cde")]
    merge(dest, sources, MODEL)
    before = dest.generation
    assert merge(dest, sources, MODEL, recompute=computed, sample=1.0) == (0, 6, 0, 0, 0)
    assert dest.generation == before


def test_a_merge_that_was_interrupted_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdllm_store.merging._DOCUMENTS_AT_ONCE", 1)
    dest, sources = MemoryStore(), [filled("ab"), filled("cde")]
    add, n_left = dest.add_document, iter([True, True, False])

    def until_the_disk_is_full(*arguments: Any) -> bool:
        if not next(n_left):
            raise StoreFullError("no room")
        return add(*arguments)

    monkeypatch.setattr(dest, "add_document", until_the_disk_is_full)
    with pytest.raises(StoreFullError):
        merge(dest, sources, MODEL)
    monkeypatch.setattr(dest, "add_document", add)
    report = merge(dest, sources, MODEL)
    assert (report.documents, report.unchanged, report.chunks) == (3, 2, 4)  # chunk 5 was there already
    assert content(dest) == content(filled(SEEDS))


@pytest.mark.parametrize("in_dest", [True, False])
def test_one_id_with_two_contents_is_an_error_and_nothing_is_changed(*, in_dest: bool) -> None:
    dest, one, other = MemoryStore(), filled("abc"), filled("de")
    add_chunks(dest if in_dest else one, MODEL, "f", [1])
    add_chunks(other, MODEL, "f", [2])
    before = dest.generation
    with pytest.raises(DocumentConflictError, match=r"document 'f' has one content in .* and another in .*; nothing"):
        merge(dest, [one, other], MODEL)
    assert dest.generation == before


def test_a_document_that_another_machine_has_under_another_path_is_the_same() -> None:
    dest, other = filled("a"), MemoryStore()
    add_chunks(other, MODEL, "a", SEEDS["a"], source="/mnt/a")
    assert merge(dest, [other], MODEL).unchanged == 1


@pytest.mark.parametrize("wrong", ["another chunk's KV", "NaN"])
def test_a_chunk_that_is_not_the_models_is_named_with_its_deviation_before_anything_is_merged(wrong: str) -> None:
    good, bad, dest = filled("ab"), filled("c"), MemoryStore()
    meta, kv = random_chunk(MODEL, seed=11)
    false = ChunkKV(-kv.k, kv.v) if wrong != "NaN" else ChunkKV(torch.full_like(kv.k, torch.nan), kv.v)
    bad.put(MODEL, [(meta, false)])
    add_chunks(bad, MODEL, "f", [11])  # what is held already is left as it is

    def truly(metas: Sequence[ChunkMeta]) -> Iterator[Sequence[tuple[ChunkMeta, ChunkKV]]]:
        for meta in metas:
            yield [(meta, kv)] if meta.chunk_id == true_id else next(computed([meta]))

    true_id = meta.chunk_id
    with pytest.raises(ChunkDiffersError, match=meta.chunk_id.hex()) as caught:
        merge(dest, [good, bad], MODEL, recompute=truly, sample=1.0)
    assert caught.value.chunk_id == meta.chunk_id
    assert caught.value.deviation != caught.value.deviation if wrong == "NaN" else caught.value.deviation > 1.9
    assert not dest.documents(MODEL)
    assert not dest.stats().chunks


def test_a_sample_takes_part_of_what_is_new_from_every_source_at_least_one_chunk() -> None:
    dest, sources = filled("a"), [filled("ab"), filled("cd")]
    seen: list[bytes] = []

    def noted(metas: Sequence[ChunkMeta]) -> Iterator[Sequence[tuple[ChunkMeta, ChunkKV]]]:
        seen.extend(meta.chunk_id for meta in metas)
        return computed(metas)

    report = merge(dest, sources, MODEL, recompute=noted, sample=0.4, seed=3)
    chunk_of = {seed: random_chunk(MODEL, seed=seed)[0].chunk_id for seed in range(1, 10)}
    assert report.compared == len(seen) == 1 + 2  # of chunk 4; of 5 to 9
    assert seen[0] == chunk_of[4]
    assert set(seen[1:]) < {chunk_of[seed] for seed in range(5, 10)}


def test_evicted_chunks_are_computed_again_or_the_merge_says_that_it_needs_the_model() -> None:
    source = filled("ad")
    source.evict()
    with pytest.raises(ChunkNotFoundError, match="sample above 0"):
        merge(MemoryStore(), [source], MODEL)
    dest = MemoryStore()
    merge(dest, [source], MODEL, recompute=computed, sample=0.1)
    assert content(dest) == content(filled("ad"))


def test_what_the_destination_has_evicted_stays_evicted() -> None:
    dest, source = filled("a"), filled("ac")
    dest.evict()
    assert merge(dest, [source], MODEL).chunks == 1
    assert len(dest.evicted([ref.chunk_id for ref in dest.refs(MODEL)])) == 3


def test_stores_of_another_dtype_or_model_are_refused() -> None:
    with pytest.raises(StoreMismatchError, match="keeps int8"):
        merge(MemoryStore(), [filled("a", kv_dtype="int8")], MODEL)
    mixed = filled("a")
    add_chunks(mixed, tiny_fingerprint(weights="02"), "z", [1])
    with pytest.raises(StoreMismatchError, match="expected only those of"):
        merge(MemoryStore(), [mixed], MODEL)
    with pytest.raises(ValueError, match="nothing can compute it"):
        merge(MemoryStore(), [filled("a")], MODEL, sample=0.5)


def test_a_source_with_a_damaged_document_is_refused_rather_than_merged_without_it() -> None:
    source = filled("ab")
    key = document_key(MODEL.digest, "b")
    source._transactions.write(lambda tables: tables.put("documents", key, b"nonsense"))
    with pytest.raises(RecordDamagedError, match="would be left out"):
        merge(MemoryStore(), [source], MODEL)
