"""Who may write, who may read, and what is left behind."""

from __future__ import annotations

import logging
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from pdllm_store import (
    KV_DTYPES,
    ChunkKV,
    ChunkMeta,
    DocumentNotFoundError,
    KVDtype,
    LMDBStore,
    RecordDamagedError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
)
from pdllm_store.rows import document_key, kv_key
from pdllm_store.testing import ChunkStoreConformance, MakeStore, add_chunks, make_document, random_chunk
from pdllm_store.testing import tiny_fingerprint as tiny

FINGERPRINT = tiny()
KEY, OTHER_KEY = bytes(range(32)), bytes(32)


class TestKeyedStore(ChunkStoreConformance):
    """A store with a key does all that one without does."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        made: list[LMDBStore] = []

        def make(kv_dtype: KVDtype) -> LMDBStore:
            made.append(LMDBStore.open(tmp_path / str(len(made)), kv_dtype=kv_dtype, key=KEY))
            return made[-1]

        yield make
        for store in made:
            store.close()


def forge(path: Path, table: str, key: bytes, value: bytes) -> None:
    """What somebody who can write the file, but has no key, can do: put a value as a plain store would."""
    import lmdb

    env = lmdb.open(str(path), max_dbs=16)
    with env.begin(write=True) as transaction:
        transaction.put(key, value, db=env.open_db(table.encode(), txn=transaction))
    env.close()


def raw(path: Path, table: str, key: bytes) -> bytes:
    import lmdb

    env = lmdb.open(str(path), max_dbs=16)
    with env.begin() as transaction:
        value = transaction.get(key, db=env.open_db(table.encode(), txn=transaction, create=False))
    env.close()
    return bytes(value)


def test_a_swapped_record_with_a_right_checksum_is_refused_with_a_key_only(tmp_path: Path) -> None:
    evil, _ = random_chunk(FINGERPRINT, seed=1)
    _, other_kv = random_chunk(FINGERPRINT, seed=2)
    with LMDBStore.open(tmp_path / "forger") as forger:
        forger.put(FINGERPRINT, [(evil, other_kv)])  # sound in every way, but not what the model computes
    record = raw(tmp_path / "forger", "kv", kv_key(evil.chunk_id, 0))
    for name, key in (("plain", None), ("keyed", KEY)):
        with LMDBStore.open(tmp_path / name, key=key) as store:
            add_chunks(store, FINGERPRINT, "d", [1])
        forge(tmp_path / name, "kv", kv_key(evil.chunk_id, 0), record)
        with LMDBStore.open(tmp_path / name, key=key) as store:
            if key is None:
                assert torch.equal(store.load(evil.chunk_id).k, other_kv.k)  # trusts whoever can write the folder
                assert store.verify().ok
            else:
                with pytest.raises(RecordDamagedError):
                    store.load(evil.chunk_id)
                assert store.verify().damaged == [evil.chunk_id]


def test_computing_a_sample_again_finds_a_swapped_record_without_a_key(tmp_path: Path) -> None:
    items = {meta.chunk_id: (meta, kv) for meta, kv in (random_chunk(FINGERPRINT, seed=s) for s in range(10))}

    def recompute(metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        yield [(meta, ChunkKV(*(t + 1e-4 for t in items[meta.chunk_id][1]))) for meta in metas]

    with LMDBStore.open(tmp_path) as store:
        metas = [meta for meta, _ in items.values()]
        swapped = metas[3].chunk_id
        kvs = {chunk_id: kv for chunk_id, (_, kv) in items.items()} | {swapped: items[metas[4].chunk_id][1]}
        store.put(FINGERPRINT, [(meta, kvs[meta.chunk_id]) for meta in metas])
        store.add_document(FINGERPRINT, make_document("d", metas))
        with pytest.raises(ValueError, match="recompute_with"):
            store.verify(recompute_share=0.5)
        store.recompute_with(FINGERPRINT, recompute)
        with pytest.raises(ValueError, match="0 to 1"):
            store.verify(recompute_share=1.5)
        report = store.verify(recompute_share=1.0)
        assert (report.n_compared, report.differing, report.ok) == (10, [swapped], False)
        assert store.verify(recompute_share=0.2).n_compared == 2
        store.discard(report.differing)
        assert store.fetch([swapped]).recomputed == {swapped}
        assert store.verify(recompute_share=1.0).ok


@pytest.mark.parametrize("table", ["metas", "documents", "refs", "texts", "counts", "fingerprints"])
def test_no_value_of_a_keyed_store_is_believed_from_a_plain_one(tmp_path: Path, table: str) -> None:
    for name, key in (("plain", None), ("keyed", KEY)):
        with LMDBStore.open(tmp_path / name, key=key) as store:
            (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
    document = document_key(FINGERPRINT.digest, "d")
    at = {"metas": meta.chunk_id, "refs": document + bytes(4), "documents": document, "texts": document}
    key = at.get(table, FINGERPRINT.digest)
    forge(tmp_path / "keyed", table, key, raw(tmp_path / "plain", table, key))
    with LMDBStore.open(tmp_path / "keyed", key=KEY) as store:
        assert not store.verify().ok


def test_another_key_or_none_does_not_open_a_keyed_store(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path / "keyed", key=KEY) as store:
        with pytest.raises(StoreMismatchError, match="another key"):
            LMDBStore.open(tmp_path / "keyed")
        with pytest.raises(TypeError, match="does not pickle"):
            pickle.dumps(store)
    LMDBStore.open(tmp_path / "plain").close()
    for name, key in (("keyed", None), ("keyed", OTHER_KEY), ("plain", KEY)):
        with pytest.raises(StoreMismatchError, match="was made with"):
            LMDBStore.open(tmp_path / name, key=key)
    for wrong in (b"short", "text", bytes(33)):
        with pytest.raises(ValueError, match="expected 32 bytes"):
            LMDBStore.open(tmp_path / "new", key=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    data = (tmp_path / "keyed" / "data.mdb").read_bytes()
    assert KEY not in data


def test_a_keyed_store_compacts_evicts_and_forks(tmp_path: Path, run_child: Callable[..., str]) -> None:
    with LMDBStore.open(tmp_path, key=KEY, max_bytes=1 << 20) as store:
        metas = add_chunks(store, FINGERPRINT, "d", [1, 2])
        store.evict(n_bytes=1)
        store.compact()
        assert store.verify().ok
        expected = store.load(metas[1].chunk_id).k.view(torch.int16).sum().item()
    code = """
        import os, sys, torch
        from pdllm_store import LMDBStore
        store = LMDBStore.open(sys.argv[1], key=bytes(range(32)))
        if not (child := os.fork()):
            print(store.load(bytes.fromhex(sys.argv[2])).k.view(torch.int16).sum().item(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """
    assert int(run_child(code, str(tmp_path), metas[1].chunk_id.hex())) == expected


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_purged_documents_leave_no_bytes(tmp_path: Path, kv_dtype: KVDtype) -> None:
    fingerprint, word = tiny(kv_dtype=kv_dtype, n_layers=40), "Quarzsandtrichter"
    with LMDBStore.open(tmp_path, kv_dtype=kv_dtype) as store:
        (kept,) = add_chunks(store, fingerprint, "kept", [1])
        (meta,) = add_chunks(store, fingerprint, "secret", [2], text=word * 20, metadata={"owner": word})
        kv = store.load(meta.chunk_id)
        assert store.derived_dir is not None
        (Path(store.derived_dir) / "index").write_bytes(word.encode())
        traces = [word.encode(), meta.token_ids.astype("<i4").tobytes(), meta.chunk_id]
        if kv_dtype != "int8":
            bits = torch.int16 if kv_dtype == "bfloat16" else torch.int32
            traces += [t[3].contiguous().view(bits).numpy().tobytes() for t in kv]
        path = tmp_path / "data.mdb"
        assert all(trace in path.read_bytes() for trace in traces)
        old = os.open(path, os.O_RDONLY)
        with pytest.raises(DocumentNotFoundError, match="nothing was deleted"):
            store.purge([(fingerprint, "secret"), (fingerprint, "unknown")])
        assert len(store.documents(fingerprint)) == 2
        store.purge([(fingerprint, "secret")])
        assert [info.doc_id for info in store.documents(fingerprint)] == ["kept"]
        assert store.missing([kept.chunk_id]) == []
        assert store.verify().ok
        add_chunks(store, fingerprint, "before", [3], text="Taubenschlagkante" * 300)
        store.delete_document(fingerprint, "before")
        assert b"Taubenschlagkante" in path.read_bytes()
        store.purge([])
        traces.append(b"Taubenschlagkante")
        left = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert not [trace for trace in traces if trace in left]
        assert not any(os.pread(old, 1 << 24, 0))  # the file that was replaced
        os.close(old)


def test_a_plain_delete_leaves_bytes_as_the_docs_say(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, FINGERPRINT, "secret", [2], text="Quarzsandtrichter" * 400)
        store.delete_document(FINGERPRINT, "secret")
        assert b"Quarzsandtrichter" in (tmp_path / "data.mdb").read_bytes()
        store.compact()
        assert b"Quarzsandtrichter" not in (tmp_path / "data.mdb").read_bytes()


def test_purging_needs_the_store_alone(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store, LMDBStore.open(tmp_path):
        add_chunks(store, FINGERPRINT, "d", [1])
        with pytest.raises(StoreError, match="2 handles"):
            store.purge([(FINGERPRINT, "d")])
        assert len(store.documents(FINGERPRINT)) == 1


def test_all_files_belong_to_their_owner_only(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path / "s") as store:
        add_chunks(store, FINGERPRINT, "d", [1])
        store.compact()
        add_chunks(store, FINGERPRINT, "e", [2])
        assert store.derived_dir is not None
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_read_only_store_answers_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with LMDBStore.open(path) as store:
        (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
        store.discard([random_chunk(FINGERPRINT, seed=5)[0].chunk_id])
    (path / "lock.mdb").unlink()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with LMDBStore.open(path, read_only=True) as store:
        assert store.load(meta.chunk_id).k.shape == (3, 5, 2, 4)
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["d"]
        assert store.verify().ok
        changes: list[Callable[[], object]] = [
            lambda: store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=2)]),
            lambda: store.delete_document(FINGERPRINT, "d"),
            lambda: store.discard([meta.chunk_id]),
            lambda: store.set_max_bytes(1 << 20),
            lambda: store.evict(),
            lambda: store.compact(),
            lambda: store.purge([(FINGERPRINT, "d")]),
        ]
        for change in changes:
            with pytest.raises(StoreError, match="read-only"):
                change()
        with pytest.raises(StoreError, match="open read-only in this process"):
            LMDBStore.open(path)
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}
    assert after == before
    with LMDBStore.open(path) as writer, LMDBStore.open(path, read_only=True) as reader:
        add_chunks(writer, FINGERPRINT, "e", [2])
        assert len(reader.documents(FINGERPRINT)) == 2
        with pytest.raises(StoreError, match="read-only"):
            reader.delete_document(FINGERPRINT, "d")


def test_what_a_read_only_store_lacks_is_computed_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LMDBStore.open(tmp_path) as store:
        (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
        store.evict()
    item = random_chunk(FINGERPRINT, seed=1)
    with LMDBStore.open(tmp_path, read_only=True) as store, caplog.at_level(logging.INFO):
        store.recompute_with(FINGERPRINT, lambda _metas: iter([[item]]))
        fetched = store.fetch([meta.chunk_id])
        assert torch.equal(fetched.kv[meta.chunk_id].k, item[1].k)
        assert "not written back" in caplog.text
        assert store.evicted([meta.chunk_id]) == [meta.chunk_id]


def test_a_store_that_is_not_there_is_not_made_read_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        LMDBStore.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_store_that_is_removed_while_open_is_not_used_any_more(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "s"
    with LMDBStore.open(path) as store:
        (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
        path.rename(tmp_path / "away")
        if replaced:
            path.mkdir()
            (path / "data.mdb").write_bytes((tmp_path / "away" / "data.mdb").read_bytes())
        for use in (
            lambda: store.load(meta.chunk_id),
            lambda: store.put(FINGERPRINT, [random_chunk(FINGERPRINT, seed=2)]),
            lambda: store.refs(FINGERPRINT),
        ):
            with pytest.raises(StoreError, match="removed or replaced"):
                use()


def test_everything_can_be_deleted_even_what_has_lost_its_name(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        for seed, doc_id in enumerate(("a", "b", "c")):
            add_chunks(store, FINGERPRINT, doc_id, [seed], text="Quarzsandtrichter" * 10)
        key = document_key(FINGERPRINT.digest, "b")
        store._transactions.write(lambda tables: tables.put("documents", key, b"damaged"))
        assert len(store.documents(FINGERPRINT)) == 2
        assert store.delete_all() == 3
        assert (store.stats().documents, store.stats().chunks) == (0, 0)
        assert store.verify().ok
        add_chunks(store, FINGERPRINT, "d", [4])
        store.purge(None)
        assert store.stats().documents == 0
        assert b"Quarzsandtrichter" not in (tmp_path / "data.mdb").read_bytes()


def test_a_purge_without_room_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, FINGERPRINT, "a", [1])
        add_chunks(store, FINGERPRINT, "b", [2])
        usage = type("Usage", (), {"free": 0})
        with monkeypatch.context() as patched:
            patched.setattr("pdllm_store.compaction.shutil.disk_usage", lambda _path: usage)
            with pytest.raises(StoreFullError, match="nothing was changed"):
                store.purge([(FINGERPRINT, "a")])
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["a", "b"]
        store.purge([(FINGERPRINT, "a")])
        assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["b"]


def test_a_purge_touches_nothing_that_is_not_the_stores(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("not the store's")
    with LMDBStore.open(tmp_path / "s") as store:
        add_chunks(store, FINGERPRINT, "a", [1])
        assert store.derived_dir is not None
        folder = Path(store.derived_dir)
        (folder / "link").symlink_to(mine)
        os.link(mine, folder / "second-name")
        os.mkfifo(folder / "pipe")
        store.purge([(FINGERPRINT, "a")])
        assert mine.read_text() == "not the store's"
        assert not folder.exists() or not list(folder.iterdir())
        folder.rmdir() if folder.exists() else None
        folder.symlink_to(tmp_path)
        with pytest.raises(StoreError, match="is a link"):
            store.purge([])
        assert mine.read_text() == "not the store's"


def test_kv_of_nan_is_not_what_the_model_computes(tmp_path: Path) -> None:
    meta, kv = random_chunk(FINGERPRINT, seed=1)
    with LMDBStore.open(tmp_path) as store:
        store.put(FINGERPRINT, [(meta, ChunkKV(torch.full_like(kv.k, torch.nan), kv.v))])
        store.add_document(FINGERPRINT, make_document("d", [meta]))
        store.recompute_with(FINGERPRINT, lambda _metas: iter([[(meta, kv)]]))
        before = store.stats().hits
        assert store.verify(recompute_share=1.0).differing == [meta.chunk_id]
        assert store.stats().hits == before
