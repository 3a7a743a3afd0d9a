"""What is damaged is found, counted, never handed out, and can be made good again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pdllm_store import (
    ChunkKV,
    ChunkMeta,
    ChunkNotFoundError,
    ChunkStore,
    LMDBStore,
    MemoryStore,
    RecordDamagedError,
    StoreError,
)
from pdllm_store.rows import document_key, kv_key, ref_key
from pdllm_store.table_store import TableStore
from pdllm_store.tables import Table, Tables
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TableStore]:
    store = LMDBStore.open(tmp_path) if request.param == "disk" else MemoryStore()
    yield store
    store.close()


def change(store: TableStore, table: Table, key: bytes, edit: Callable[[bytearray], Any]) -> None:
    def body(tables: Tables) -> None:
        value = bytearray(tables.get(table, key) or b"")
        edit(value)
        tables.put(table, key, bytes(value))

    store._transactions.write(body)


def flip_last(value: bytearray) -> None:
    value[-1] ^= 1


def put_again(store: ChunkStore, seed: int) -> tuple[ChunkMeta, ChunkKV]:
    meta, kv = random_chunk(FINGERPRINT, seed=seed)
    store.discard([meta.chunk_id])
    assert store.missing([meta.chunk_id]) == [meta.chunk_id]
    store.put(FINGERPRINT, [(meta, kv)])
    return meta, kv


@pytest.mark.parametrize("harm", ["flip", "cut", "drop", "swap", "magic"])
def test_damaged_kv_is_never_handed_out(store: TableStore, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    metas = add_chunks(store, FINGERPRINT, "d", [1, 2])
    first, second = (kv_key(meta.chunk_id, 0) for meta in metas)
    if harm == "flip":
        change(store, "kv", first, flip_last)
    elif harm == "cut":
        change(store, "kv", first, lambda value: value.__delitem__(slice(len(value) // 2, None)))
    elif harm == "magic":
        change(store, "kv", first, lambda value: value.__setitem__(0, 0))
    elif harm == "swap":
        store._transactions.write(lambda tables: tables.put("kv", first, bytes(tables.get("kv", second) or b"")))
    else:
        store._transactions.write(lambda tables: tables.delete("kv", first))
    k = torch.full((3, 5, 2, 4), 7.0)
    with caplog.at_level(logging.WARNING), pytest.raises(RecordDamagedError):
        store.load_into([metas[0].chunk_id], [ChunkKV(k, k.clone())])
    with pytest.raises(RecordDamagedError):
        store.load(metas[0].chunk_id)
    assert bool((k == 7).all())
    assert caplog.text.count(metas[0].chunk_id.hex()) >= 1
    assert store.stats().damaged == 2
    report = store.verify()
    assert (report.damaged, report.missing, report.ok) == ([metas[0].chunk_id], [], False)

    meta, kv = put_again(store, 1)
    assert torch.equal(store.load(meta.chunk_id).k, kv.k)
    assert store.verify().ok


def test_every_flipped_bit_of_a_stored_chunk_is_found(store: TableStore) -> None:
    meta, kv = random_chunk(tiny_fingerprint(n_layers=1), seed=1, n_tokens=1)
    store.put(tiny_fingerprint(n_layers=1), [(meta, kv)])
    key = kv_key(meta.chunk_id, 0)
    with store._transactions.read() as tables:
        good = bytes(tables.get("kv", key) or b"")
    for index in range(len(good)):
        bad = bytearray(good)
        bad[index] ^= 1 << index % 8
        store._transactions.write(lambda tables, bad=bad: tables.put("kv", key, bytes(bad)))  # type: ignore[misc]
        with pytest.raises(RecordDamagedError):
            store.load(meta.chunk_id)
    assert store.stats().damaged == len(good)


def test_without_verifying_only_the_form_is_checked(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path, verify_reads=False) as store:
        metas = add_chunks(store, FINGERPRINT, "d", [1, 2])
        change(store, "kv", kv_key(metas[0].chunk_id, 0), flip_last)
        change(store, "kv", kv_key(metas[1].chunk_id, 0), lambda value: value.pop())
        store.load(metas[0].chunk_id)
        with pytest.raises(RecordDamagedError):
            store.load(metas[1].chunk_id)
        assert sorted(store.verify().damaged) == sorted(meta.chunk_id for meta in metas)


def test_a_damaged_chunk_row_counts_as_missing_and_is_replaced(store: TableStore) -> None:
    metas = add_chunks(store, FINGERPRINT, "a", [1, 2])
    add_chunks(store, FINGERPRINT, "b", [1, 1])
    broken = metas[0].chunk_id
    change(store, "metas", broken, flip_last)
    with pytest.raises(RecordDamagedError):
        store.meta(broken)
    with pytest.raises(RecordDamagedError):
        store.load(broken)
    with pytest.raises(ChunkNotFoundError):
        store.add_document(FINGERPRINT, make_document("c", metas))
    assert store.missing([broken]) == [broken]
    assert [meta.chunk_id for meta in store.iter_meta(FINGERPRINT)] == [metas[1].chunk_id]
    assert store.verify().damaged == [broken]

    put_again(store, 1)
    assert store.verify().ok
    store.delete_document(FINGERPRINT, "a")
    assert store.missing([broken]) == []
    store.delete_document(FINGERPRINT, "b")
    assert store.missing([broken]) == [broken]
    stats = store.stats()
    assert (stats.chunks, stats.orphans, stats.tokens, stats.kv_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("table", ["documents", "refs"])
def test_a_damaged_document_leaves_the_others_listed(store: TableStore, table: Table) -> None:
    metas = add_chunks(store, FINGERPRINT, "a", [1, 2])
    add_chunks(store, FINGERPRINT, "b", [2])
    key = document_key(FINGERPRINT.digest, "a")
    change(store, table, ref_key(key, 1) if table == "refs" else key, flip_last)
    assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["b"]
    assert [ref.doc_id for ref in store.refs(FINGERPRINT)] == ["b"]
    assert store.stats().damaged == 2
    with pytest.raises(RecordDamagedError):
        store.document(FINGERPRINT, "a")
    assert store.verify().problems

    store.add_document(FINGERPRINT, make_document("a", metas))
    assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["a", "b"]
    if isinstance(store, LMDBStore):
        store.compact()  # a lost reference leaves a count too high
        assert store.verify().ok
        assert store.delete_document(FINGERPRINT, "a")
        assert store.missing([meta.chunk_id for meta in metas]) == [metas[0].chunk_id]


@pytest.mark.parametrize("table", ["documents", "refs", "texts"])
def test_a_damaged_document_can_be_deleted(store: TableStore, table: Table) -> None:
    add_chunks(store, FINGERPRINT, "a", [1])
    key = document_key(FINGERPRINT.digest, "a")
    change(store, table, ref_key(key, 0) if table == "refs" else key, flip_last)
    with pytest.raises(RecordDamagedError):
        store.document(FINGERPRINT, "a")
    assert store.delete_document(FINGERPRINT, "a") is True
    assert store.documents(FINGERPRINT) == []
    assert store.stats().documents == 0


def test_lost_rows_are_named_by_verify(store: TableStore) -> None:
    metas = add_chunks(store, FINGERPRINT, "a", [1, 2, 3])
    key = document_key(FINGERPRINT.digest, "a")

    def lose(tables: Tables) -> None:
        tables.delete("metas", metas[0].chunk_id)
        tables.delete("texts", key)
        tables.delete("refs", ref_key(key, 2))
        tables.delete("fingerprints", FINGERPRINT.digest)

    store._transactions.write(lose)
    store.discard([metas[1].chunk_id])
    report = store.verify()
    assert sorted(report.missing) == sorted(meta.chunk_id for meta in metas[:2])
    text = "\n".join(report.problems)
    for expected in (
        "lost its text",
        "2 references instead of 3",
        "belongs to no chunk",
        "totals say",
        "says (1, 0) ref",
    ):
        assert expected in text
    with pytest.raises(RecordDamagedError, match="absent"):
        store.document(FINGERPRINT, "a")


def test_damaged_totals_and_fingerprints_are_counted_anew(store: TableStore) -> None:
    add_chunks(store, FINGERPRINT, "a", [1, 2])
    generation = store.generation
    before = store.stats()
    change(store, "manifest", b"state", flip_last)
    change(store, "counts", FINGERPRINT.digest, flip_last)
    change(store, "fingerprints", FINGERPRINT.digest, flip_last)
    assert len(store.verify().problems) == 2
    assert store.stats().fingerprints == before.fingerprints
    assert store.stats().damaged > before.damaged
    add_chunks(store, FINGERPRINT, "b", [2, 3])
    stats = store.stats()
    assert (stats.documents, stats.chunks, stats.orphans, stats.tokens) == (2, 3, 0, 15)
    assert {digest: model.documents for digest, model in stats.fingerprints.items()} == {FINGERPRINT.digest.hex(): 2}
    assert store.generation > generation
    assert store.verify().ok


def test_verify_counts_and_reports_its_progress(store: TableStore) -> None:
    add_chunks(store, FINGERPRINT, "a", range(40))
    add_chunks(store, FINGERPRINT, "b", [1])
    seen: list[tuple[int, int]] = []
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert (report.checked_chunks, report.checked_documents, report.ok) == (40, 2, True)
    assert seen in ([(32, 40), (40, 40)], [(8, 40), (40, 40)])  # two pages, by one thread or two


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.2])
def test_a_file_cut_short_gives_errors_and_no_crash(tmp_path: Path, keep: float) -> None:
    fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=40)
    with LMDBStore.open(tmp_path, kv_dtype="float32") as store:
        metas = [random_chunk(fingerprint, seed=seed, n_tokens=20) for seed in range(20)]
        store.put(fingerprint, metas)
        store.add_document(fingerprint, make_document("d", [meta for meta, _ in metas]))
    path = tmp_path / "data.mdb"
    os.truncate(path, int(path.stat().st_size * keep) // 4096 * 4096)
    n_bad = 0
    try:
        with LMDBStore.open(tmp_path, create=False) as store:
            for meta, kv in metas:
                try:
                    assert torch.equal(store.load(meta.chunk_id).k, kv.k)
                except StoreError:
                    n_bad += 1
            assert not store.verify().ok
    except StoreError:
        n_bad += 1
    assert n_bad > 0


def test_a_damaged_state_row_is_counted_and_stands_still(store: TableStore) -> None:
    add_chunks(store, FINGERPRINT, "a", [1])
    before = store.generation
    change(store, "manifest", b"state", flip_last)
    found = store.generation
    assert found == store.generation > before
    assert store.stats().damaged >= 1
    add_chunks(store, FINGERPRINT, "b", [2])
    assert store.generation > found
    assert store.verify().ok


def test_a_damaged_cap_is_mended_by_any_cap_and_by_none(store: TableStore) -> None:
    for max_bytes in (None, 1 << 20):
        change(store, "manifest", b"limits", lambda value: value.append(1))
        assert not store.verify().ok
        store.set_max_bytes(max_bytes)
        assert store.verify().ok
        assert store.max_bytes == max_bytes


@pytest.mark.parametrize("again", [True, False])
def test_a_pinned_document_with_a_damaged_row_leaves_no_pins_behind(store: TableStore, again: bool) -> None:
    metas = add_chunks(store, FINGERPRINT, "a", [1, 2])
    add_chunks(store, FINGERPRINT, "b", [2, 3])
    store.set_pinned(FINGERPRINT, "a", pinned=True)
    change(store, "documents", document_key(FINGERPRINT.digest, "a"), flip_last)
    if again:
        store.add_document(FINGERPRINT, make_document("a", metas))
    else:
        store.delete_document(FINGERPRINT, "a")
    assert store.verify().ok
    assert store.evict() == (3 if again else 2)
