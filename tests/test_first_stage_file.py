"""The lexical index in a file: kept, followed, shared, made again when damaged, and free of what was deleted."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import ChunkRef, Document, DocumentInfo, LMDBStore, MemoryStore, ModelFingerprint, StoreError
from pdllm_store.testing import random_chunk, tiny_fingerprint

from pdllm_rag import lexical_file
from pdllm_rag.first_stage import BM25Index, Candidate
from pdllm_rag.lexical_tables import LexicalError, LexicalTables

FINGERPRINT = tiny_fingerprint()
NOBODY = 65534


class FolderStore(MemoryStore):
    """A store in memory that offers a folder and counts what is read of its documents."""

    def __init__(self, folder: Path | str | None) -> None:
        super().__init__()
        self.folder = None if folder is None else str(folder)
        self.calls: Counter[str] = Counter()
        self.broken: BaseException | None = None

    @property
    def derived_dir(self) -> str | None:
        return self.folder

    def documents(self, fingerprint: ModelFingerprint) -> list[DocumentInfo]:
        self.calls["documents"] += 1
        return super().documents(fingerprint)

    def document(self, fingerprint: ModelFingerprint, doc_id: str) -> Document:
        self.calls["document"] += 1
        if self.broken is not None:
            raise self.broken
        return super().document(fingerprint, doc_id)


def add(store: MemoryStore | LMDBStore, doc_id: str, *texts: str, fingerprint: ModelFingerprint = FINGERPRINT) -> None:
    """A document of one chunk a text; equal texts are one chunk."""
    items = [random_chunk(fingerprint, seed=zlib.crc32(text.encode("utf-8", "surrogatepass"))) for text in texts]
    store.put(fingerprint, items)
    refs, start = [], 0
    for ordinal, (text, (meta, _)) in enumerate(zip(texts, items, strict=True)):
        refs.append(ChunkRef(doc_id, ordinal, meta.chunk_id, start, start + len(text)))
        start += len(text)
    text_id = zlib.crc32("".join(texts).encode("utf-8", "surrogatepass")).to_bytes(16, "little")
    store.add_document(fingerprint, Document(doc_id, "s", "".join(texts), text_id, "recipe", tuple(refs), 1, {}))


def index_of(store: MemoryStore | LMDBStore) -> BM25Index:
    return BM25Index(store, FINGERPRINT)


def path_of(folder: Path | str) -> Path:
    return Path(folder) / f"lexical-{FINGERPRINT.digest.hex()}.sqlite"


def names(found: Sequence[Candidate]) -> list[str]:
    return [candidate.ref.doc_id for candidate in found if candidate.score > 0]


def in_memory(store: FolderStore, ask: Callable[[BM25Index], object]) -> object:
    """What an index without a history says."""
    folder, store.folder = store.folder, None
    try:
        with closing(index_of(store)) as index:
            return ask(index)
    finally:
        store.folder = folder


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, level: int, n: int = 1) -> Iterator[None]:
    """The block logs `n` records of this level or above."""
    caplog.clear()
    with caplog.at_level(level, logger="pdllm_rag"):
        yield
    assert len([record for record in caplog.records if record.levelno >= level]) == n, caplog.text


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path)
    for name, text in {"a": "walrus facts", "b": "penguin facts", "c": "heron nests"}.items():
        add(store, name, f"{text}.", f"More of {name}.")
    return store


# -- kept and followed ---------------------------------------------------------------------------------------------


def test_an_index_that_is_current_lists_no_documents(store: FolderStore) -> None:
    before = index_of(store).search("walrus facts", 4)
    store.calls.clear()
    after = index_of(store)
    assert after.generation is None
    assert after.search("walrus facts", 4) == before
    assert (after.size(), len(after.chunk_ids()), after.generation) == (6, 6, store.generation)
    assert store.calls["documents"] == 0


def test_another_process_uses_the_file_as_well(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pdllm_store import LMDBStore
        from pdllm_store.testing import tiny_fingerprint
        from pdllm_rag.first_stage import BM25Index
        with LMDBStore.open(sys.argv[1]) as store:
            store.documents = None
            (best,) = BM25Index(store, tiny_fingerprint()).search("walrus", 1)
            print(best.ref.doc_id, best.score > 0)
    """
    with LMDBStore.open(tmp_path / "s") as store:
        add(store, "a", "walrus facts")
        add(store, "b", "heron nests")
        assert index_of(store).size() == 2
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.stdout, done.stderr) == ("a True\n", "")


def test_only_what_changed_is_read_again(store: FolderStore) -> None:
    index = index_of(store)
    assert index.size() == 6
    store.calls.clear()
    add(store, "b", "walrus walrus")
    add(store, "d", "walrus tusks")
    store.delete_document(FINGERPRINT, "a")
    assert names(index.search("walrus", 5)) == ["b", "d"]
    assert store.calls == {"documents": 1, "document": 2}


def test_two_indexes_take_over_what_the_other_followed(store: FolderStore) -> None:
    first, second = index_of(store), index_of(store)
    assert first.size() == second.size() == 6
    add(store, "d", "walrus tusks")
    assert names(first.search("tusks", 3)) == ["d"]
    store.calls.clear()
    assert names(second.search("tusks", 3)) == ["d"]
    assert second.generation == store.generation
    assert store.calls["documents"] == 0


def test_a_folder_that_was_removed_is_filled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LMDBStore.open(tmp_path) as store, logged(caplog, logging.INFO, 0):
        add(store, "a", "walrus facts")
        index = index_of(store)
        assert index.size() == 1
        shutil.rmtree(tmp_path / "derived")
        assert names(index.search("walrus", 1)) == ["a"]
        assert path_of(tmp_path / "derived").exists()


def test_models_have_files_of_their_own_that_only_the_owner_reads(store: FolderStore, tmp_path: Path) -> None:
    other = tiny_fingerprint(weights="22")
    add(store, "x", "walrus", fingerprint=other)
    assert (index_of(store).size(), BM25Index(store, other).size()) == (6, 1)
    files = sorted(tmp_path.iterdir())
    assert [file.name.split(".", 1)[1] for file in files] == ["sqlite", "sqlite.lock"] * 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_chunks_are_found_at_their_first_place_in_document_order(store: FolderStore) -> None:
    add(store, "A", "Another.", "More of c.", "More of c.")
    for folder in (store.folder, None):
        store.folder = folder
        refs = {ref[:2]: ref for ref in store.refs(FINGERPRINT)}
        ids = [refs["c", 1].chunk_id, bytes(16), refs["b", 0].chunk_id, refs["c", 1].chunk_id]
        assert index_of(store).refs_of(ids) == [refs["A", 1], refs["b", 0]]
        assert index_of(store).refs_of([]) == []


def test_errors_of_the_store_pass_through_and_change_nothing(
    store: FolderStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(store)
    assert index.size() == 6
    before = path_of(tmp_path).read_bytes()
    add(store, "a", "other")
    for broken in (StoreError("out of order"), sqlite3.DatabaseError("a store of another kind"), KeyboardInterrupt()):
        store.broken = broken
        with pytest.raises(type(broken)), logged(caplog, logging.INFO, 0):
            index.size()
    assert path_of(tmp_path).read_bytes() == before
    store.broken = None
    assert names(index.search("other", 3)) == ["a"]


WORDS = st.sampled_from(["cat", "dog", "cats", "Hen", "Größe", "東京", "x", "the", "kàt"])
TEXT = st.lists(WORDS, max_size=8).map(" ".join)
DOC_ID = st.sampled_from(["a", "b", "B", "é", "é2", "\ud800", "\uffff", "😀", "a/cat", "n" * 5000])
CHANGE = st.one_of(
    st.tuples(st.just("add"), DOC_ID, st.lists(TEXT, max_size=4)),
    st.tuples(st.just("delete"), DOC_ID, st.none()),
    st.tuples(st.just("open"), st.none(), st.none()),
    st.tuples(st.just("ask"), TEXT, st.tuples(st.integers(0, 9), st.none() | st.sets(DOC_ID, max_size=4))),
)


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(CHANGE, max_size=14), question=TEXT)
def test_whatever_happened_the_file_answers_as_a_new_index_in_memory(changes: list, question: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder)
        index = index_of(store)
        for kind, what, more in [*changes, ("ask", question, (20, None))]:
            if kind == "add":
                add(store, what, *more)
            elif kind == "delete":
                store.delete_document(FINGERPRINT, what)
            elif kind == "open":
                index = index_of(store)
            else:
                n, doc_ids = more
                found = index.search(what, n, doc_ids=doc_ids)
                assert found == in_memory(store, lambda fresh: fresh.search(what, n, doc_ids=doc_ids))  # noqa: B023
        assert index.size() == len(store.refs(FINGERPRINT))
        firsts = {ref.chunk_id: ref for ref in reversed(store.refs(FINGERPRINT))}
        assert index.chunk_ids() == set(firsts)
        assert index.refs_of(firsts) == list(firsts.values())


def test_an_index_in_memory_ranks_alike_whatever_was_deleted_before() -> None:
    """The mean length of a chunk, which BM25 divides by, must not count chunks that are gone."""
    store = FolderStore(None)
    index = index_of(store)
    for i in range(20):
        add(store, f"d{i:02}", "cat " * (i % 3 + 1) + "dog " * (5 * i + 1))
    assert index.size() == 20
    for i in range(12):
        store.delete_document(FINGERPRINT, f"d{i:02}")
    assert index.search("cat dog", 20) == in_memory(store, lambda fresh: fresh.search("cat dog", 20))


# -- another store -------------------------------------------------------------------------------------------------


def test_another_store_in_the_same_folder_is_noticed(tmp_path: Path) -> None:
    first, second = FolderStore(tmp_path), FolderStore(tmp_path)
    add(first, "a", "walrus facts")
    add(second, "a", "heron nests")
    assert first.generation != second.generation  # which both have one document
    assert names(index_of(first).search("walrus", 1)) == ["a"]
    index = index_of(second)
    assert (names(index.search("walrus", 1)), names(index.search("heron", 1))) == ([], ["a"])


def test_a_store_that_was_emptied_or_filled_behind_the_file_is_noticed(tmp_path: Path) -> None:
    full, emptied = FolderStore(tmp_path), FolderStore(tmp_path)
    add(full, "a", "walrus facts")
    add(full, "b", "heron nests")
    add(emptied, "a", "walrus facts")
    emptied.delete_document(FINGERPRINT, "a")
    assert [index_of(store).size() for store in (full, emptied, full)] == [2, 0, 2]


def test_a_generation_that_went_backwards_is_followed(tmp_path: Path) -> None:
    newer, older = FolderStore(tmp_path), FolderStore(tmp_path)
    for store in (newer, older):
        add(store, "a", "walrus facts")
    add(newer, "b", "walrus tusks")
    assert names(index_of(newer).search("walrus", 3)) == ["a", "b"]
    assert names(index_of(older).search("walrus", 3)) == ["a"]


# -- damage --------------------------------------------------------------------------------------------------------


def write_foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE other (x)")


def write_sql(*statements: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            for statement in statements:
                database.execute(statement)

    return write


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_bytes(random.Random(0).randbytes(20000)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "cut inside its header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "zeroed": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(len(path.read_bytes()) - 4096)),
    "another database": write_foreign,
    "of another model": write_sql("UPDATE state SET fingerprint = x'00'"),
    "without state": write_sql("DELETE FROM state"),
    "without words": write_sql("DROP TABLE words"),
    "words of no document": write_sql("DELETE FROM refs"),
    "a ref with a flipped bit": write_sql("UPDATE refs SET char_start = char_start + 1"),
    "an id that is no text": write_sql("UPDATE documents SET doc_id = x'ff' WHERE id = 1"),
    "an id of another type": write_sql("UPDATE documents SET doc_id = 7 WHERE id = 1"),
    "broken words": write_sql("DELETE FROM words_data WHERE id > 10"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again_with_one_warning(
    store: FolderStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    expected = index_of(store).search("walrus facts", 6)
    damage(path_of(tmp_path))
    with logged(caplog, logging.WARNING):
        assert index_of(store).search("walrus facts", 6) == expected
    store.calls.clear()
    with logged(caplog, logging.WARNING, 0):
        assert index_of(store).search("walrus facts", 6) == expected
    assert store.calls["documents"] == 0


@pytest.mark.parametrize("damage", ["no database", "cut", "words of no document", "broken words"])
def test_damage_that_a_change_meets_is_mended_too(
    store: FolderStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    index = index_of(store)
    assert index.size() == 6
    DAMAGE[damage](path_of(tmp_path))
    add(store, "a", "otter facts")
    with logged(caplog, logging.WARNING):
        assert names(index.search("otter", 6)) == ["a"]
        assert index.search("facts", 6) == in_memory(store, lambda fresh: fresh.search("facts", 6))


def test_random_damage_never_reaches_the_caller(store: FolderStore, tmp_path: Path) -> None:
    assert index_of(store).size() == 6
    good, path, draw = path_of(tmp_path).read_bytes(), path_of(tmp_path), random.Random(0)
    refs = set(store.refs(FINGERPRINT))
    for _ in range(60):
        bad = bytearray(good)
        start = draw.randrange(len(bad))
        for at in range(start, min(start + draw.choice([1, 1, 8, 300]), len(bad))):
            bad[at] ^= draw.randrange(1, 256)
        path.write_bytes(bad)
        index = index_of(store)
        found = [candidate.ref for question in ("walrus facts", "zzz") for candidate in index.search(question, 4)]
        assert refs.issuperset(found)
        index.size(), index.chunk_ids()


def test_another_layout_and_an_empty_file_are_no_damage(
    store: FolderStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for change in (write_sql("UPDATE state SET layout = 999"), lambda path: path.write_bytes(b""), os.unlink):
        assert index_of(store).size() == 6
        change(path_of(tmp_path))
        with logged(caplog, logging.WARNING, 0):
            assert names(index_of(store).search("walrus", 1)) == ["a"]


def test_a_store_error_while_the_file_is_made_leaves_one_that_is_filled_later(
    store: FolderStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.broken = StoreError("out of order")
    with pytest.raises(StoreError):
        index_of(store).size()
    store.broken = None
    with logged(caplog, logging.INFO, 0):
        assert index_of(store).size() == 6


# -- no file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(store: FolderStore) -> Iterator[Callable[[], None]]:
    """A folder of the store's that nobody may write from the call on (tests often run as root)."""
    folder = Path(tempfile.mkdtemp())
    store.folder = str(folder)
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    yield lambda: folder.chmod(0o500)
    if root:
        os.seteuid(0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_that_cannot_be_written_means_memory(
    store: FolderStore, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    read_only()
    index = index_of(store)
    with logged(caplog, logging.INFO):
        assert names(index.search("walrus", 2)) == ["a"]
        add(store, "d", "walrus tusks")
        assert names(index.search("walrus", 2)) == ["a", "d"]
    assert caplog.records[0].levelno == logging.INFO
    index.close()


def test_a_file_that_cannot_be_written_is_read_while_it_is_current(
    store: FolderStore, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert index_of(store).size() == 6
    read_only()
    index = index_of(store)
    store.calls.clear()
    with logged(caplog, logging.INFO, 0):
        assert names(index.search("walrus", 2)) == ["a"]
    assert store.calls["documents"] == 0
    store.delete_document(FINGERPRINT, "a")
    with logged(caplog, logging.INFO):
        assert names(index.search("walrus", 2)) == []
    index.close()


def test_a_file_without_a_lock_is_read_only(store: FolderStore, tmp_path: Path) -> None:
    assert index_of(store).size() == 6
    lock = Path(f"{path_of(tmp_path)}.lock")
    lock.unlink()
    lock.mkdir()  # as on a read-only file system, for root too
    before = path_of(tmp_path).read_bytes()
    store.calls.clear()
    index = index_of(store)
    assert names(index.search("walrus", 2)) == ["a"]
    assert store.calls["documents"] == 0
    add(store, "d", "walrus tusks")
    assert names(index.search("walrus", 2)) == ["a", "d"]
    assert path_of(tmp_path).read_bytes() == before
    index.close()


@pytest.mark.parametrize("folder", ["/proc/nothing/here", "/dev/null"])
def test_a_folder_that_is_none_means_memory(folder: str) -> None:
    store = FolderStore(folder)
    add(store, "a", "walrus facts")
    index = index_of(store)
    assert names(index.search("walrus", 2)) == ["a"]
    index.close()


def test_whoever_waits_too_long_for_the_lock_goes_on_in_memory(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lexical_file, "LOCK_TIMEOUT_S", 0.05)
    with open(f"{path_of(tmp_path)}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = index_of(store)
        with logged(caplog, logging.INFO):
            assert names(index.search("walrus", 2)) == ["a"]
    index.close()


def test_a_full_disk_means_memory(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert index_of(store).size() == 6
    add(store, "d", "walrus tusks")
    run = LexicalTables.run

    def full(tables: LexicalTables, statement: str, parameters: Sequence[object] = ()) -> int:
        (path,) = (row[2] for row in tables._rows("PRAGMA database_list"))
        if statement == "COMMIT" and path and run(tables, "UPDATE state SET layout = layout"):
            raise LexicalError("database or disk is full")
        return run(tables, statement, parameters)

    monkeypatch.setattr(LexicalTables, "run", full)
    index = index_of(store)
    with logged(caplog, logging.WARNING, 2):
        assert names(index.search("walrus", 3)) == ["a", "d"]
    assert not path_of(tmp_path).exists()
    index.close()


# -- deletion ------------------------------------------------------------------------------------------------------

WORD_OF = "{}{:06}plugh"


def test_nothing_of_a_deleted_document_stays_in_the_file(tmp_path: Path) -> None:
    """Words, names and titles, in a file large enough that pages are split, merged and moved."""
    store, draw = FolderStore(tmp_path), random.Random(0)
    index = index_of(store)
    n_made = 0

    def make() -> None:
        nonlocal n_made
        n_made += 1
        words = [WORD_OF.format("w", n_made * 100 + i) for i in range(draw.choice([5, 90]))]
        name = WORD_OF.format("name" * draw.choice([1, 60]), n_made)
        add(store, name, *(" ".join(words[at : at + 20]) for at in range(0, len(words), 20)))

    def held() -> set[int]:
        return {int(info.doc_id[-11:-5]) for info in store.documents(FINGERPRINT)}

    for _ in range(80):
        make()
    for _ in range(12):
        assert index.size()
        for info in draw.sample(store.documents(FINGERPRINT), draw.choice([1, 5, 15])):
            store.delete_document(FINGERPRINT, info.doc_id)
        for _ in range(draw.choice([0, 3, 9])):
            make()
        index.chunk_ids()
        content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        gone = set(range(1, n_made + 1)) - held()
        assert [n for n in gone if f"name{n:06}".encode() in content] == []
        assert [n for n in gone if f"w{n * 100:06}pl".encode() in content] == []
        assert all(f"name{n:06}".encode() in content for n in held())


def test_a_crash_before_the_old_file_is_replaced_is_made_good(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(store)
    assert index.size() == 6
    store.delete_document(FINGERPRINT, "a")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            index.size()
    assert len(list(tmp_path.iterdir())) == 3
    store.calls.clear()
    assert names(index_of(store).search("facts", 6)) == ["b"]
    assert store.calls["documents"] == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert b"walrus" not in path_of(tmp_path).read_bytes()


# -- together ------------------------------------------------------------------------------------------------------


def test_threads_search_while_documents_change(store: FolderStore, caplog: pytest.LogCaptureFixture) -> None:
    shared, stop = index_of(store), threading.Event()
    wrong: list[object] = []

    def search() -> None:
        own = index_of(store)
        while not stop.is_set():
            for index in (shared, own):
                try:
                    found = index.search("pair walrus", 50)
                    # Both chunks of a document come and go together.
                    counted = Counter(candidate.ref.doc_id for candidate in found)
                    wrong.extend(name for name, n in counted.items() if n != 2)
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    with logged(caplog, logging.INFO, 0):
        for thread in threads:
            thread.start()
        for i in range(25):
            add(store, f"p{i % 4}", f"pair {i} one", f"pair {i} two")
            if i % 3 == 0:
                store.delete_document(FINGERPRINT, f"p{(i + 1) % 4}")
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert shared.search("pair", 9) == in_memory(store, lambda fresh: fresh.search("pair", 9))


@pytest.mark.slow
def test_processes_killed_at_any_moment_leave_a_file_that_goes_on(tmp_path: Path) -> None:
    code = """if True:
        import os, sys, random
        sys.path.insert(0, os.path.dirname(sys.argv[2]))
        from pdllm_store import LMDBStore
        from test_first_stage_file import FINGERPRINT, add, index_of
        draw = random.Random(int(sys.argv[3]))
        with LMDBStore.open(sys.argv[1]) as store:
            index = index_of(store)
            print("ready", flush=True)
            while True:
                name = f"d{draw.randrange(30)}"
                if draw.random() < 0.5:
                    add(store, name, f"secret{draw.randrange(10**9):09} walrus", "w%d " * 200 % (*range(200),))
                else:
                    store.delete_document(FINGERPRINT, name)
                index.search("walrus w7", 5)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with LMDBStore.open(tmp_path / "s") as store:
        for i in range(30):
            add(store, f"d{i}", f"secret{i:09} walrus")
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / "s"), __file__, str(seed)],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for seed in range(2)
        ]
        for child in children:
            with child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                time.sleep(0.3)
                child.kill()
        found = index_of(store).search("walrus", 100)
        texts = {info.doc_id: store.document(FINGERPRINT, info.doc_id).text for info in store.documents(FINGERPRINT)}
        assert {candidate.ref.doc_id for candidate in found if candidate.score} == set(texts)
        content = b"".join(file.read_bytes() for file in Path(store.derived_dir or "").iterdir())
        secrets = {text[6:15].encode() for text in texts.values()}
        assert set(re.findall(rb"secret([0-9]{9})", content)) == secrets


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_and_its_parent_both_go_on(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path) as store:
        add(store, "a", "walrus facts")
        index = index_of(store)
        assert index.size() == 1

        def child() -> None:
            add(store, "b", "walrus tusks")
            os._exit(0 if names(index.search("walrus", 3)) == ["a", "b"] else 1)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        add(store, "c", "walrus calves")
        assert names(index.search("walrus", 3)) == ["a", "b", "c"]


def test_a_read_only_store_uses_its_file_and_changes_nothing(tmp_path: Path) -> None:
    with LMDBStore.open(tmp_path / "kb") as store:
        add(store, "a", "walrus facts")
        assert names(index_of(store).search("walrus", 1)) == ["a"]
    folder = tmp_path / "kb" / "derived"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with LMDBStore.open(tmp_path / "kb", read_only=True) as reader:
        assert names(index_of(reader).search("walrus", 1)) == ["a"]
        with LMDBStore.open(tmp_path / "kb", read_only=True) as same:
            assert same.documents(FINGERPRINT)
    with LMDBStore.open(tmp_path / "kb") as store:
        add(store, "b", "walrus tusks")
        with LMDBStore.open(tmp_path / "kb", read_only=True) as reader:
            assert names(index_of(reader).search("walrus", 3)) == ["a", "b"]  # in memory
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
