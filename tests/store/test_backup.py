"""An export is the store of one moment, and makes that store again; nothing else is taken for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
from pdllm_store import (
    DocumentConflictError,
    LMDBStore,
    StoreError,
    StoreFormatError,
    StoreMismatchError,
    export_store,
    import_store,
)
from pdllm_store.testing import add_chunks, bits, tiny_fingerprint

ONE, OTHER = tiny_fingerprint(weights="01"), tiny_fingerprint(weights="02")
HEADER = 64


def filled(path: Path, **options: Any) -> LMDBStore:
    store = LMDBStore.open(path, **options)
    add_chunks(store, ONE, "a", [1, 2, 3], metadata={"colour": "red", "list": [1, None]})
    add_chunks(store, ONE, "b", [3, 4])
    return store


def content(store: LMDBStore) -> dict[str, Any]:
    """All that a store holds, with each chunk's KV as integers."""
    found: dict[str, Any] = {"evicted": set(), "cap": store.max_bytes, "kv_dtype": store.kv_dtype}
    for model in store.fingerprints():
        for info in store.documents(model):
            gone = set(store.evicted(info.chunk_ids))
            kv = [[bits(t).tolist() for t in store.load(one)] for one in info.chunk_ids if one not in gone]
            found[info.doc_id, model.digest] = (info, store.document(model, info.doc_id), kv)
            found["evicted"] |= gone
    return found


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export of a small store."""
    with filled(tmp_path / "kb") as store:
        export_store(store, tmp_path / "kb.pdllm")
    return tmp_path / "kb.pdllm"


@pytest.mark.parametrize("target", ["new", "deep/er/new", "empty"])
def test_an_imported_store_is_the_exported_one(tmp_path: Path, target: str) -> None:
    (tmp_path / "empty").mkdir()
    with filled(tmp_path / "kb", max_bytes=8 << 20) as store:
        add_chunks(store, OTHER, "a", [7])
        store.set_pinned(ONE, "b", pinned=True)
        assert store.evict(n_bytes=1, unused_for_s=0) == 1
        n_bytes = export_store(store, tmp_path / "kb.pdllm")
        expected = content(store)
    assert (tmp_path / "kb.pdllm").stat().st_size == n_bytes
    assert (tmp_path / "kb.pdllm").stat().st_mode & 0o777 == 0o600
    report = import_store(tmp_path / "kb.pdllm", tmp_path / target)
    assert (report.documents, report.unchanged) == (3, 0)
    with LMDBStore.open(tmp_path / target, create=False) as again:
        assert content(again) == expected
        assert again.verify().ok
        add_chunks(again, ONE, "c", [9])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_an_export_beside_writers_is_a_store_of_one_moment(tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        for number in range(5, 500):
            if stop.is_set():
                return
            add_chunks(store, ONE, f"d{number:03}", [number, number + 1])

    with filled(tmp_path / "kb") as store:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(3):
                before = {info.doc_id for info in store.documents(ONE)}
                export_store(store, tmp_path / f"{number}")
                import_store(tmp_path / f"{number}", tmp_path / f"kb{number}")
                with LMDBStore.open(tmp_path / f"kb{number}", create=False) as again:
                    assert again.verify().ok
                    held = [info.doc_id for info in again.documents(ONE)]
                assert before <= set(held)
                assert held == ["a", "b", *(f"d{n:03}" for n in range(5, 3 + len(held)))]  # none of the later before it
        finally:
            stop.set()
            writer.join()


def _flipped(at: int) -> Callable[[bytearray], bytearray]:
    def flip(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return flip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: b"", "no export of a store"),
        (lambda _: b"%PDF-1.4\n" + b"x" * 100, "no export of a store"),
        (lambda data: data[HEADER:], "no export of a store"),
        (lambda data: data[:40], "expected"),
        (lambda data: bytes(HEADER) + data[HEADER:], "broke off"),
        (lambda data: data[:-1], "copy it again"),
        (lambda data: data + b"x", "copy it again"),
        (lambda data: data[:8] + b"\x02" + data[9:], "version 2"),
        (_flipped(HEADER - 1), "damaged"),
        (_flipped(HEADER), "damaged"),
        (_flipped(HEADER + 9000), "damaged"),
        (_flipped(-1), "damaged"),
    ],
)
def test_what_is_no_whole_export_is_refused_and_leaves_nothing(
    export: Path, tmp_path: Path, change: Callable[[bytearray], bytes], problem: str
) -> None:
    export.write_bytes(change(bytearray(export.read_bytes())))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreFormatError, match=problem):
        import_store(export, tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before


def test_sound_bytes_that_are_no_store_are_refused(tmp_path: Path, export: Path) -> None:
    nonsense = b"x" * 8192
    header = export.read_bytes()[:16] + len(nonsense).to_bytes(8, "little") + bytes(8)
    export.write_bytes(header + blake3.blake3(nonsense).digest() + nonsense)
    with pytest.raises(StoreFormatError):
        import_store(export, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_missing_file_and_an_existing_one_are_errors(tmp_path: Path, export: Path) -> None:
    with pytest.raises(StoreError, match="could not be imported"):
        import_store(tmp_path / "nothing", tmp_path / "new")
    before = export.read_bytes()
    with LMDBStore.open(tmp_path / "kb") as store:
        with pytest.raises(StoreError, match="is there already"):
            export_store(store, export)
        with pytest.raises(StoreError, match="cannot be written"):
            export_store(store, tmp_path / "no" / "folder")
    assert export.read_bytes() == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, export: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreFormatError, match="something else"):
        import_store(export, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_store_that_is_there_gets_what_it_lacks_and_keeps_what_it_has(tmp_path: Path, export: Path) -> None:
    with LMDBStore.open(tmp_path / "there") as there:
        add_chunks(there, ONE, "b", [3, 4])
        add_chunks(there, ONE, "z", [8])
        there.set_pinned(ONE, "z", pinned=True)
        report = import_store(export, tmp_path / "there")  # its environment is shared with the open handle
        assert (report.documents, report.unchanged, report.chunks) == (1, 1, 2)
        assert [info.doc_id for info in there.documents(ONE)] == ["a", "b", "z"]
        with filled(tmp_path / "same") as same:
            assert content(there)["a", ONE.digest] == content(same)["a", ONE.digest]
        assert there.documents(ONE)[-1].pinned
        assert there.verify().ok


@pytest.mark.parametrize("model", [ONE, OTHER])
def test_one_id_with_two_contents_changes_nothing(tmp_path: Path, export: Path, model: Any) -> None:
    with LMDBStore.open(tmp_path / "there") as there:
        add_chunks(there, model, "a", [9])
        before = content(there)
        if model is ONE:
            with pytest.raises(DocumentConflictError, match="'a'"):
                import_store(export, tmp_path / "there")
            assert content(there) == before
        else:  # another model's document of that id is another document
            assert import_store(export, tmp_path / "there").documents == 2


def test_another_stored_dtype_is_refused(tmp_path: Path, export: Path) -> None:
    with LMDBStore.open(tmp_path / "there", kv_dtype="int8") as there:
        with pytest.raises(StoreMismatchError, match="int8"):
            import_store(export, tmp_path / "there")
        assert there.documents(ONE) == []


def test_a_keyed_store_comes_back_with_its_key_only(tmp_path: Path) -> None:
    key = bytes(range(32))
    with filled(tmp_path / "kb", key=key) as store:
        export_store(store, tmp_path / "file")
        expected = content(store)
    for wrong in (None, bytes(32)):
        with pytest.raises(StoreMismatchError, match="key"):
            import_store(tmp_path / "file", tmp_path / "new", key=wrong)
        assert not (tmp_path / "new").exists()
    import_store(tmp_path / "file", tmp_path / "new", key=key)
    with LMDBStore.open(tmp_path / "new", create=False, key=key) as again:
        assert content(again) == expected
