"""A path either holds a store that fits, or opening it says what is there instead."""

from __future__ import annotations

import os
import pickle
import stat
import threading
import time
from pathlib import Path

import lmdb
import pytest
import torch
from pdllm_store import (
    LMDBStore,
    RecordDamagedError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreMismatchError,
    StoreNotFoundError,
)
from pdllm_store.location import check_file_system, file_system_type
from pdllm_store.rows import pack_map
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()


def test_the_stored_dtype_is_bfloat16_by_default_and_stays(tmp_path: Path) -> None:
    LMDBStore.open(tmp_path / "a").close()
    LMDBStore.open(tmp_path / "b", kv_dtype="int8").close()
    with LMDBStore.open(tmp_path / "a") as a, LMDBStore.open(tmp_path / "b") as b:
        assert (a.kv_dtype, b.kv_dtype) == ("bfloat16", "int8")


def test_another_stored_dtype_is_a_mismatch_that_names_both(tmp_path: Path) -> None:
    LMDBStore.open(tmp_path / "s", kv_dtype="int8").close()
    with pytest.raises(StoreMismatchError, match=r"int8.*float32"):
        LMDBStore.open(tmp_path / "s", kv_dtype="float32")
    LMDBStore.open(tmp_path / "s", kv_dtype="int8").close()  # the failed try has let go of it


def test_an_unknown_dtype_or_size_is_a_bad_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float16"):
        LMDBStore.open(tmp_path / "s", kv_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="map_size"):
        LMDBStore.open(tmp_path / "s", map_size=0)
    assert not (tmp_path / "s").exists()


def test_nothing_there_is_not_found_and_nothing_is_made(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreNotFoundError, match=str(path)):
            LMDBStore.open(path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made(tmp_path: Path) -> None:
    LMDBStore.open(tmp_path / "x" / "y" / "s").close()
    LMDBStore.open(tmp_path / "x" / "y" / "s", create=False).close()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("hello")
    with pytest.raises(StoreFormatError, match="is no folder"):
        LMDBStore.open(path)
    assert path.read_text() == "hello"


def test_a_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(StoreError, match="cannot make the folder"):
        LMDBStore.open(tmp_path / "file" / "s")
    with pytest.raises(StoreNotFoundError):
        LMDBStore.open(tmp_path / "file" / "s", create=False)


def test_a_map_that_does_not_fit_the_address_space_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="with a map of"):
        LMDBStore.open(tmp_path / "s", map_size=1 << 60)
    LMDBStore.open(tmp_path / "s").close()


def test_a_dangling_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    LMDBStore.open(tmp_path / "link").close()
    assert (tmp_path / "target" / "data.mdb").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("hello")
    with pytest.raises(StoreFormatError, match=r"thesis\.txt"):
        LMDBStore.open(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_another_programs_lmdb_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True) as transaction:
        transaction.put(b"key", b"value", db=env.open_db(b"theirs", txn=transaction))
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormatError, match="of something else"):
        LMDBStore.open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("content", [b"no database at all", b"\0" * 16384, os.urandom(16384)])
def test_a_data_file_that_is_no_lmdb_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(StoreFormatError, match="no LMDB file"):
        LMDBStore.open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == content


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        manifest = pack_map(b"manifest", {"format": 3, "kv_dtype": "fp4"})
        store._transactions.write(lambda tables: tables.put("manifest", b"manifest", manifest))
    with pytest.raises(StoreFormatError, match=r"format 3.*format 2"):
        LMDBStore.open(tmp_path)


def test_a_store_of_the_first_format_is_refused_with_instructions(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path), max_dbs=8)
    with env.begin(write=True) as transaction:
        for table in ("manifest", "fingerprints", "documents", "refs", "texts", "metas", "kv"):  # all that it had
            env.open_db(table.encode(), txn=transaction)
        manifest = pack_map(b"manifest", {"format": 1, "kv_dtype": "bfloat16", "lmdb": "0.9.36"})
        transaction.put(b"manifest", manifest, db=env.open_db(b"manifest", txn=transaction))
    env.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormatError, match=r"format 1, this version reads format 2; .*new store"):
        LMDBStore.open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        store._transactions.write(lambda tables: tables.put("manifest", b"manifest", b"garbage!"))
    with pytest.raises(StoreFormatError, match="manifest"):
        LMDBStore.open(tmp_path)


def test_a_creation_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path)).close()  # both files, and nothing in them
    with pytest.raises(StoreNotFoundError):
        LMDBStore.open(tmp_path, create=False)
    with LMDBStore.open(tmp_path) as store:
        add_chunks(store, FINGERPRINT, "d", [1])


def test_only_the_owner_can_read_a_store(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with LMDBStore.open(tmp_path / "s") as store:
            add_chunks(store, FINGERPRINT, "d", [1])
            store.compact()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "s").iterdir()} == {0o600}


def test_everything_is_there_after_opening_again(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        metas = add_chunks(store, FINGERPRINT, "d", [1, 2], metadata={"a": 1})
        orphan, kv = random_chunk(FINGERPRINT, seed=3)
        store.put(FINGERPRINT, [(orphan, kv)])
        before = (store.stats(), store.documents(FINGERPRINT), store.refs(FINGERPRINT))
    with LMDBStore.open(tmp_path, create=False) as store:
        assert (store.stats(), store.documents(FINGERPRINT), store.refs(FINGERPRINT)) == before
        assert store.missing([meta.chunk_id for meta in [*metas, orphan]]) == []
        assert torch.equal(store.load(orphan.chunk_id).v, kv.v)


def test_pins_survive_replacing_and_opening_again(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        metas = add_chunks(store, FINGERPRINT, "d", [1])
        store.set_pinned(FINGERPRINT, "d", pinned=True)
        store.add_document(FINGERPRINT, make_document("d", metas, metadata={"new": True}))
    with LMDBStore.open(tmp_path) as store:
        assert store.documents(FINGERPRINT)[0].pinned
        store.set_pinned(FINGERPRINT, "d", pinned=False)
        assert not store.documents(FINGERPRINT)[0].pinned


def test_a_store_pickles_as_its_path(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path / "s", kv_dtype="float32", verify_reads=False) as store:
        data = pickle.dumps(store)
        with pickle.loads(data) as twin:
            assert (twin.path, twin.kv_dtype, twin._verify_reads) == (store.path, "float32", False)
        assert store.stats().documents == 0
    pickle.loads(data).close()
    assert str(tmp_path) in repr(store)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("9p", True), ("ext4", False), ("fuse.ntfs", False)],
)
def test_network_file_systems_are_refused(tmp_path: Path, kind: str, refused: bool) -> None:
    mounts = tmp_path / "mounts"
    folder = tmp_path / "a b"
    mounts.write_text(f"dev / ext4 rw 0 0\nsrv {str(folder).replace(' ', chr(92) + '040')} {kind} rw 0 0\nshort\n")
    assert file_system_type(str(folder / "s"), mounts=str(mounts)) == kind
    assert file_system_type(str(tmp_path / "a b c"), mounts=str(mounts)) == "ext4"
    assert file_system_type("/", mounts=str(tmp_path / "none")) is None
    if refused:
        with pytest.raises(StoreError, match=rf"network file system \({kind}\).*read_only=True and force=True"):
            check_file_system(str(folder / "s"), forced_read_only=False, mounts=str(mounts))
        assert not check_file_system(str(folder / "s"), forced_read_only=True, mounts=str(mounts))
    else:
        assert check_file_system(str(folder / "s"), forced_read_only=False, mounts=str(mounts))


def test_a_network_file_system_is_read_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBStore.open(tmp_path / "s") as store:
        (meta,) = add_chunks(store, FINGERPRINT, "d", [1])
        expected = store.load(meta.chunk_id).k
    monkeypatch.setattr("pdllm_store.location.file_system_type", lambda *_args, **_kwargs: "nfs")
    for options in ({}, {"force": True}, {"read_only": True}):
        with pytest.raises(StoreError, match="nfs"):
            LMDBStore.open(tmp_path / "s", **options)
    with LMDBStore.open(tmp_path / "s", read_only=True, force=True) as store:
        assert torch.equal(store.load(meta.chunk_id).k, expected)
        with pytest.raises(StoreError, match="read-only"):
            store.delete_document(FINGERPRINT, "d")


def test_a_store_that_was_removed_while_open_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path / "s"):
        (tmp_path / "s" / "data.mdb").unlink()
        with pytest.raises(StoreError, match="removed or replaced"):
            LMDBStore.open(tmp_path / "s")
    with LMDBStore.open(tmp_path / "s") as store:
        assert store.stats().documents == 0


def test_opening_scans_nothing(tmp_path: Path) -> None:
    n_chunks = 20_000
    fingerprint = tiny_fingerprint(n_layers=1)
    with LMDBStore.open(tmp_path) as store:
        meta, _ = random_chunk(fingerprint, seed=0)
        add_chunks(store, fingerprint, "d", [0])
        row = store._transactions.write(lambda tables: bytes(tables.get("metas", meta.chunk_id) or b""))

        def fill(tables: object) -> None:
            for index in range(n_chunks):
                tables.put("metas", index.to_bytes(16, "big"), row)  # type: ignore[attr-defined]

        store._transactions.write(fill)
    started = time.perf_counter()
    with LMDBStore.open(tmp_path) as store:
        store.stats()
        assert time.perf_counter() - started < 0.3
        with pytest.raises(RecordDamagedError):  # each of these rows lies under another key than its own
            store.meta((5).to_bytes(16, "big"))


def test_closing_while_others_read_waits_for_them(tmp_path: Path) -> None:
    store = LMDBStore.open(tmp_path)
    metas = add_chunks(store, FINGERPRINT, "d", range(4))
    ended: list[type[BaseException]] = []

    def read() -> None:
        try:
            while True:
                for meta in metas:
                    store.load(meta.chunk_id)
        except BaseException as error:
            ended.append(type(error))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    store.close()
    for thread in threads:
        thread.join()
    assert ended == [StoreClosedError] * 4
