"""What users of shared stores have reported elsewhere, tried here: reader slots, and readers beside writers.

Each test names the public report that it stands for. `PDLLM_LONG=1` runs the sizes of the reports.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pdllm_store import (
    ChunkNotFoundError,
    DocumentNotFoundError,
    LMDBStore,
    MemoryStore,
    StoreError,
    chunks,
    documents,
    record,
)
from test_reports_store import FORKS, LAMP, LONG, QUESTION, Forks, document, in_new_process, is_sound, large, opened

from pdllm_rag import LoadedModel, RagEngine

pytestmark = FORKS

# -- 10: reader slots -----------------------------------------------------------------------------------------------


def reader_slots(path: Path) -> int:
    """How many reader slots LMDB itself says to be taken, by any process."""
    code = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True, max_dbs=16).readers())"
    return sum(line.split()[0].isdigit() for line in in_new_process(code, path).splitlines() if line.strip())


def stopped(telling: int) -> None:
    """Tell the parent, and wait to be killed; without a parent, end."""
    os.write(telling, b"!")
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def told(forks: Forks, body: Callable[[int], object]) -> int:
    """The id of a child that runs `body` and has called `stopped` with the number that it was given."""
    hearing, telling = os.pipe()
    child = forks.run(lambda: body(telling))
    os.close(telling)
    heard = os.read(hearing, 1)
    os.close(hearing)
    assert heard == b"!", "the child has failed before it came so far"
    return child


def stuck_reader(forks: Forks, path: Path, model: LoadedModel, *, asks: bool = True) -> int:
    """A process that has opened the store, has asked, and is inside a read that does not end; its id."""

    def body(telling: int) -> None:
        engine = opened(path, model, pool_bytes=0)
        if asks:
            assert engine.answer(QUESTION, max_new_tokens=1).citations
        record.parse = lambda *_args, **_options: stopped(telling)  # type: ignore[assignment]
        engine.store.load(engine.store.refs(engine.fingerprint)[0].chunk_id)

    return told(forks, body)


@pytest.fixture
def eight_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are made now have eight reader slots instead of 1,024."""
    monkeypatch.setattr("pdllm_store.environment._MAX_READERS", 8)


def test_readers_that_were_killed_never_use_up_the_slots(
    tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    n_killed, at_once = (200, 200) if LONG else (24, 6)
    if not LONG:
        monkeypatch.setattr("pdllm_store.environment._MAX_READERS", 8)
    with opened(tmp_path, tiny_model, pool_bytes=0) as engine, Forks() as forks:
        engine.prefill([document("lamp", LAMP)])  # while this is open, nobody makes the lock file anew
        expected = engine.answer(QUESTION).text
        for _ in range(0, n_killed, at_once):
            children = [stuck_reader(forks, tmp_path, tiny_model) for _ in range(at_once)]
            for child in children:
                forks.kill(child)
            assert engine.answer(QUESTION).text == expected
    with opened(tmp_path, tiny_model, create=False) as engine:
        assert engine.answer(QUESTION).text == expected
        assert reader_slots(tmp_path) == 0


@pytest.mark.usefixtures("eight_slots")
def test_slots_of_killed_readers_are_free_again_for_who_has_the_store_open(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    with opened(tmp_path, tiny_model, pool_bytes=0) as engine, Forks() as forks:
        engine.prefill([document("lamp", LAMP)])
        expected = engine.answer(QUESTION).text
        for child in [stuck_reader(forks, tmp_path, tiny_model, asks=False) for _ in range(8)]:
            forks.kill(child)
        assert engine.answer(QUESTION).text == expected


@pytest.mark.usefixtures("eight_slots")
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="lmdb.open takes a slot itself before reader_check can free those"
)
def test_slots_of_killed_readers_are_free_again_for_who_opens_the_store(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    with opened(tmp_path, tiny_model) as idle, Forks() as forks:
        idle.prefill([document("lamp", LAMP)])
        for child in [stuck_reader(forks, tmp_path, tiny_model, asks=False) for _ in range(8)]:
            forks.kill(child)
        child = forks.run(lambda: LMDBStore.open(tmp_path).stats())
        assert forks.status(child) == 0


def without_a_slot(path: Path, model: LoadedModel) -> str:
    """What an engine is told at once while living readers hold every slot; without them it answers again."""
    with opened(path, model, pool_bytes=0) as engine, Forks() as forks:
        engine.prefill([document("lamp", LAMP)])
        expected = engine.answer(QUESTION).text
        children = [stuck_reader(forks, path, model, asks=False) for _ in range(8)]
        started = time.monotonic()
        with pytest.raises(StoreError) as refused:
            engine.answer(QUESTION)
        assert time.monotonic() - started < 5
        for child in children:
            forks.kill(child)
        assert engine.answer(QUESTION).text == expected
        return str(refused.value)


@pytest.mark.usefixtures("eight_slots")
def test_a_question_without_a_free_slot_fails_at_once_instead_of_waiting(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    assert "reader" in without_a_slot(tmp_path, tiny_model).lower()


@pytest.mark.usefixtures("eight_slots")
def test_a_question_without_a_free_slot_is_not_told_that_the_store_is_broken(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129 (deleting the folder was the only cure)"""
    assert "restore a copy" not in without_a_slot(tmp_path, tiny_model)


def test_many_threads_ask_at_once_and_leave_no_slot_taken(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    n_threads = 200 if LONG else 40
    with opened(tmp_path, tiny_model, pool_bytes=0) as engine:
        engine.prefill([document("lamp", LAMP), document("other", "Other words of no use.")])
        expected = engine.answer(QUESTION, max_new_tokens=4).text
        got = in_threads([lambda: engine.answer(QUESTION, max_new_tokens=4).text] * n_threads)
        assert got == [expected] * n_threads
        abandoned = engine.stream(QUESTION)
        next(abandoned)  # the answer has begun, and nobody reads on
        assert reader_slots(tmp_path) == 0
        del abandoned


@pytest.mark.usefixtures("eight_slots")
@pytest.mark.parametrize("kept", ["errors that are kept", "no garbage collection"])
def test_errors_keep_no_slot(tmp_path: Path, kept: str) -> None:
    """https://github.com/cocoindex-io/cocoindex-code/issues/129"""
    errors: list[StoreError] = []
    with LMDBStore.open(tmp_path) as store:
        gc.disable()
        try:
            for number in range(20):
                try:
                    store.load(bytes([number]) * 16)
                except ChunkNotFoundError as error:
                    if kept.startswith("errors"):
                        errors.append(error)
        finally:
            gc.enable()
            gc.collect()


# -- 11: read while it is written -----------------------------------------------------------------------------------

NEW, NEW_QUESTION = document("new", large(40)), "Which word opens the door 70?"


def in_threads(bodies: Sequence[Callable[[], object]]) -> list[object]:
    """What each body returned or raised, all having begun at one moment."""
    barrier = threading.Barrier(len(bodies))
    got: list[object] = [None] * len(bodies)

    def run(index: int) -> None:
        barrier.wait()
        try:
            got[index] = bodies[index]()
        except BaseException as error:
            got[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.fixture(scope="module")
def expected(tiny_model: LoadedModel) -> str:
    """The answer over the new document in a store of its own."""
    with opened(MemoryStore(kv_dtype="float32"), tiny_model) as engine:
        engine.prefill([NEW])
        return engine.answer(NEW_QUESTION).text


def answers_from_the_beginning(engine: RagEngine) -> Iterator[str]:
    """Three answers, the first as soon as there is one; nothing but that the store is empty may be raised."""
    n_left = 3
    while n_left:
        try:
            yield engine.answer(NEW_QUESTION).text
            n_left -= 1
        except DocumentNotFoundError:
            continue


def check_once_and_whole(engine: RagEngine) -> None:
    stats = engine.store.stats()
    assert (stats.documents, stats.orphans, stats.damaged, stats.recomputed) == (1, 0, 0, 0)
    assert stats.chunks == len(set(engine.documents()[0].chunk_ids))
    assert is_sound(engine)


def test_threads_that_ingest_and_ask_the_same_new_document_get_all_of_it_or_nothing(
    tmp_path: Path, tiny_model: LoadedModel, expected: str
) -> None:
    """https://github.com/LMCache/LMCache/issues/207"""
    for number in range(50 if LONG else 2):
        with opened(tmp_path / str(number), tiny_model, pool_bytes=0) as engine:
            ingest = [lambda engine=engine: engine.prefill([NEW]).chunks_computed] * 2
            ask = [lambda engine=engine: list(answers_from_the_beginning(engine))] * 2
            *n_computed, first, second = in_threads([*ingest, *ask])
            assert first == second == [expected] * 3
            check_once_and_whole(engine)
            assert all(isinstance(n, int) for n in n_computed)  # once, twice, or something in between


def test_processes_that_ingest_and_ask_the_same_new_document_get_all_of_it_or_nothing(
    tmp_path: Path, tiny_model: LoadedModel, expected: str
) -> None:
    """https://github.com/LMCache/LMCache/issues/207"""
    for number in range(50 if LONG else 2):
        path = tmp_path / str(number)
        LMDBStore.open(path, kv_dtype="float32").close()

        def ingest_and_ask(path: Path = path) -> None:
            with opened(path, tiny_model, pool_bytes=0) as engine:
                engine.prefill([NEW])
                assert list(answers_from_the_beginning(engine)) == [expected] * 3

        with Forks() as forks:
            children = [forks.run(ingest_and_ask) for _ in range(2)]
            with opened(path, tiny_model, pool_bytes=0) as engine:
                assert list(answers_from_the_beginning(engine)) == [expected] * 3
                assert [forks.status(child) for child in children] == [0, 0]
                check_once_and_whole(engine)


def stopping(wrapped: Callable[..., Any], telling: int, *, call: int, before: bool = False) -> Callable[..., Any]:
    """`wrapped`, but its n-th call never returns: it stops before or after the work, inside the write transaction."""
    n_calls = 0

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == call and before:
            stopped(telling)
        result = wrapped(*args, **options)
        if n_calls == call:
            stopped(telling)
        return result

    return wrapper


@pytest.mark.parametrize("where", ["in the first put", "in a later put", "before the document", "in the document"])
def test_a_writer_killed_in_the_middle_leaves_a_store_that_answers_and_goes_on(
    tmp_path: Path, tiny_model: LoadedModel, expected: str, where: str
) -> None:
    """https://github.com/LMCache/LMCache/issues/207"""

    def write(telling: int) -> None:
        if where.endswith("put"):
            chunks.put_chunks = stopping(chunks.put_chunks, telling, call=1 if "first" in where else 2)
        else:
            documents.add = stopping(documents.add, telling, call=1, before=where.startswith("before"))
        opened(tmp_path, tiny_model).prefill([NEW])

    with opened(tmp_path, tiny_model, pool_bytes=0) as engine, Forks() as forks:
        engine.prefill([document("lamp", LAMP)])
        lamp = engine.answer(QUESTION).text
        writer = told(forks, write)
        assert engine.answer(QUESTION).text == lamp  # a writer does not make readers wait
        forks.kill(writer)
        assert [info.doc_id for info in engine.documents()] == ["lamp"]
        assert engine.answer(QUESTION).text == lamp
        assert is_sound(engine)
        n_left = engine.store.stats().orphans
        assert (n_left > 0) == (where != "in the first put")
        report = engine.prefill([NEW])
        n_whole = len(set(engine.documents()[1].chunk_ids))
        assert (report.added, report.chunks_computed) == (1, n_whole - n_left)  # what was whole is not done again
        engine.delete("lamp")
        assert engine.answer(NEW_QUESTION).text == expected
        check_once_and_whole(engine)


def test_a_writer_that_hangs_does_not_make_questions_wait(
    tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/LMCache/LMCache/issues/207"""

    def write(telling: int) -> None:
        chunks.put_chunks = stopping(chunks.put_chunks, telling, call=1)
        opened(tmp_path, tiny_model).prefill([NEW])

    with opened(tmp_path, tiny_model, pool_bytes=0) as engine:
        engine.prefill([document("lamp", LAMP)])
        with Forks() as forks:
            told(forks, write)
            monkeypatch.setattr("pdllm_store.capped._USES_S", 0.0)  # as if the minute were over
            asking = threading.Thread(target=engine.answer, args=(QUESTION,))
            asking.start()
            asking.join(timeout=5)
            waits = asking.is_alive()
        asking.join()
        assert not waits
