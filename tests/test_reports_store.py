"""What users of stores and caches on disk have reported elsewhere, tried here: a store that is full or opened twice.

Each test names the public report that it stands for. Sizes are small; `PDLLM_LONG=1` runs those of the reports. The
same for stores that others read, write and kill is in `test_reports_store_shared.py`, for the keys and values in
`test_reports_store_kv.py`, and smaller reports are in `test_reports_store_spares.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from pdllm_store import LMDBStore, StoreError, StoreFullError

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.cli import main

LONG = bool(os.environ.get("PDLLM_LONG"))
MIB = 1 << 20
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LAMP = "The lamp in the hall is blue. It was bought in March."
QUESTION = "What colour is the lamp in the hall?"


def opened(place: Any, model: LoadedModel, **options: Any) -> RagEngine:
    """An engine that asks in few steps, reads every chunk that it finds and never abstains."""
    chosen = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    return RagEngine.open(place, model, **{"chunk_len": 64, "options": chosen, "kv_dtype": "float32", **options})


def document(doc_id: str, text: str, **metadata: Any) -> InputDocument:
    return InputDocument(doc_id, text, doc_id, metadata=metadata)


def large(n_chunks: int, name: str = "p") -> str:
    """A text of so many chunks of 64 tokens, or a few more."""
    return "\n\n".join(f"Paragraph {i} says that the word {name}{i} opens the door {i * 7}." for i in range(n_chunks))


def is_sound(engine: RagEngine) -> bool:
    """Whether `verify` finds nothing wrong with an engine's store."""
    assert isinstance(engine.store, LMDBStore)
    return engine.store.verify().ok


def in_new_process(code: str, *arguments: object, **environment: str | None) -> str:
    """What Python code prints in a process of its own; an environment variable that is None is taken out."""
    changed = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in changed.items() if value is not None},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Forks:
    """Child processes of a `with` block; those that are left at its end are killed."""

    def __init__(self) -> None:
        self._running: set[int] = set()

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in list(self._running):
            self.kill(child)

    def run(self, body: Callable[[], object]) -> int:
        """A child that runs `body` and ends with 0 if that returns; its id."""
        if not (child := os.fork()):
            status = 1
            try:
                body()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        self._running.add(child)
        return child

    def status(self, child: int) -> int:
        """Wait for a child; its exit status, negative after a signal."""
        self._running.remove(child)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def kill(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)
        self.status(child)


# -- 8: the map, the cap or the disk is full ------------------------------------------------------------------------

LIMITS: list[dict[str, int]] = [{"map_size": MIB}, {"max_bytes": MIB}, {"map_size": MIB, "max_bytes": MIB}]


@pytest.mark.parametrize("limits", LIMITS, ids=["map", "cap", "both"])
def test_a_document_beyond_the_limit_is_refused_whole_with_the_figures_and_the_others_still_answer(
    tmp_path: Path, tiny_model: LoadedModel, limits: dict[str, int]
) -> None:
    """https://github.com/man-group/ArcticDB/issues/866, https://github.com/jnwatson/py-lmdb/issues/140"""
    with opened(tmp_path, tiny_model, store_options=limits) as engine:
        engine.prefill([document("lamp", LAMP)])
        answer, before = engine.answer(QUESTION), engine.store.stats()
        try:
            (failure,) = engine.prefill([document("large", large(200))]).failed
            reason = failure.reason
        except StoreFullError as error:
            reason = str(error)
        assert len(re.findall(rf"(?:cap|map) of {MIB}", reason)) == 1
        assert "bytes used" in reason or "more than 40% of the store's cap" in reason  # it could never fit
        assert "more needed" in reason or "bytes of KV" in reason
        assert "MDB_" not in reason
        after = engine.store.stats()
        assert (after.documents, after.chunks, after.orphans) == (1, before.chunks, 0)
        assert after.used_bytes == before.used_bytes
        assert engine.answer(QUESTION).text == answer.text
    with opened(tmp_path, tiny_model, create=False) as engine:
        assert [info.doc_id for info in engine.documents()] == ["lamp"]
        assert engine.answer(QUESTION).text == answer.text
        assert is_sound(engine)


def test_the_file_grows_as_far_as_the_cap_lets_it(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """https://github.com/man-group/ArcticDB/issues/866"""
    with opened(tmp_path, tiny_model, store_options={"max_bytes": 32 * MIB}) as engine:
        assert engine.prefill([document("large", large(200))]).added == 1
        stats = engine.store.stats()
        assert stats.chunks >= 200
        assert MIB < stats.file_bytes <= 32 * MIB
        assert engine.answer("Which word opens the door 700?").stats.chunks.recomputed == 0


def test_at_the_cap_older_keys_and_values_give_way_and_every_document_still_answers(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/man-group/ArcticDB/issues/866"""
    with opened(tmp_path, tiny_model, pool_bytes=0, store_options={"max_bytes": MIB}) as engine:
        for i in range(12):
            assert engine.prefill([document(f"d{i}", large(4, name=f"d{i}p"))]).added == 1
        assert engine.store.stats().evictions > 0
        assert len(engine.documents()) == 12
        for i in (0, 6, 11):
            answer = engine.answer("Which word opens the door 7?", k=2, filter={"doc_id": f"d{i}"})
            assert {citation.doc_id for citation in answer.citations} == {f"d{i}"}
        stats = engine.store.stats()
        assert stats.recomputed > 0
        assert stats.used_bytes + stats.free_bytes <= MIB


def test_a_document_that_is_too_large_does_not_keep_others_of_the_call_out(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/140"""
    with opened(tmp_path, tiny_model, store_options={"max_bytes": MIB}) as engine:
        report = engine.prefill([document("a", LAMP), document("large", large(200)), document("z", "The end.")])
        assert (report.added, [failure.path for failure in report.failed]) == (2, ["large"])
        assert [info.doc_id for info in engine.documents()] == ["a", "z"]


def test_prefill_into_a_full_store_ends_with_1_and_a_line_for_what_failed(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/man-group/ArcticDB/issues/866"""
    place = ["--store", str(tmp_path / "kb")]
    asked = ["--model", str(tiny_model_path), *place]
    (tmp_path / "large.txt").write_text(large(200))
    assert main(["prefill", str(tmp_path / "large.txt"), *asked, "--max-bytes", "1MiB", "--json"]) == 1
    told = capsys.readouterr()
    done, failed = told.err.splitlines()
    assert done.startswith("pdllm: done: ")
    assert failed.startswith("pdllm: failed: ")
    (failure,) = json.loads(told.out)["documents"]["failed"]
    assert failure["path"] == "large.txt"
    assert f"cap of {MIB}" in failure["reason"]

    for i in range(20):  # pinned documents leave nothing to evict
        name = f"{i}.txt"
        (tmp_path / name).write_text(f"{i}. {large(10)}")
        if main(["prefill", str(tmp_path / name), *asked, "--json"]):
            break
        assert main(["store", "pin", name, *place]) == 0
        capsys.readouterr()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("pdllm: error: ")
    assert told.err.count("\n") == 1
    for figure in ("bytes used", f"cap of {MIB}", "more needed"):
        assert figure in told.err
    assert main(["ask", "Which word opens the door 7?", *asked, "--json", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("limits", LIMITS[:2], ids=["map", "cap"])
def test_a_refused_document_leaves_nothing_behind_however_little_was_lacking(
    tmp_path: Path, tiny_model: LoadedModel, limits: dict[str, int]
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/140"""
    chance = random.Random(0)
    n_refused = 0
    with opened(tmp_path, tiny_model, store_options=limits) as engine:
        assert isinstance(engine.store, LMDBStore)
        for i in range(60):
            text = f"{i} " + "".join(chance.choice("abcdefgh ijk") for _ in range(chance.choice([20, 60, 200, 500])))
            with contextlib.suppress(StoreFullError):
                engine.prefill([document(f"d{i}", text)])
            if i in {int(info.doc_id[1:]) for info in engine.documents()}:
                engine.store.set_pinned(engine.fingerprint, f"d{i}", pinned=True)  # nothing may give way
            else:
                n_refused += 1
            assert engine.store.stats().orphans == 0
        assert n_refused > 10


def test_long_metadata_does_not_take_a_store_beyond_its_cap(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """https://github.com/man-group/ArcticDB/issues/866"""
    with opened(tmp_path, tiny_model, store_options={"max_bytes": MIB}) as engine:
        engine.prefill([document("lamp", LAMP)])
        with contextlib.suppress(StoreFullError):
            engine.prefill([document("long", "A few words.", note="y" * (3 * MIB))])
        assert engine.store.stats().used_bytes <= MIB
        assert engine.prefill([document("next", "Some more words.")]).added == 1


def test_a_document_of_short_chunks_near_the_limit_does_not_stop_the_call(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/140"""
    chance = random.Random(0)
    letters = "".join(chance.choice("abcdefgh") for _ in range(950))
    options = {"chunk_len": 11, "kv_dtype": "bfloat16", "store_options": {"max_bytes": MIB}}
    with opened(tmp_path, tiny_model, **options) as engine:
        report = engine.prefill([document("lamp", LAMP), document("letters", letters), document("z", "The end.")])
        assert report.added + len(report.failed) == 3
        assert {"lamp", "z"} <= {info.doc_id for info in engine.documents()}


@pytest.fixture
def full_disk() -> Iterator[Callable[[Path], None]]:
    """Fills the disk, as far as this process can tell: no file may be longer than a given one is."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda path: resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("case", ["sound", "evicted", "damaged", "a minute later"])
def test_on_a_full_disk_documents_still_answer(
    tmp_path: Path,
    tiny_model: LoadedModel,
    full_disk: Callable[[Path], None],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/140"""
    data = tmp_path / "data.mdb"
    with opened(tmp_path, tiny_model, pool_bytes=0) as engine:
        engine.prefill([document("large", large(150)), document("lamp", LAMP)])
        expected = engine.answer(QUESTION, k=2, candidates=150).text
        lamp = engine.documents()[1]
        needle = engine.store.load(lamp.chunk_ids[0]).v[-1, -2].numpy().tobytes()
        assert isinstance(engine.store, LMDBStore)
        if case == "evicted":
            engine.store.evict()
    if case == "damaged":
        content = data.read_bytes()
        assert content.count(needle) == 1
        data.write_bytes(content.replace(needle, bytes(len(needle))))
    elif case == "a minute later":
        monkeypatch.setattr("pdllm_store.capped._USES_S", 0.0)
    with opened(tmp_path, tiny_model, pool_bytes=0) as engine:
        engine.documents()
        full_disk(data)
        for _ in range(2):
            assert engine.answer(QUESTION, k=2, candidates=150).text == expected


# -- 9: one store opened several times in one process ---------------------------------------------------------------


def is_in_use(path: Path) -> bool:
    """Whether another process sees that somebody has the store open."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    tried = subprocess.run([sys.executable, "-c", code, path / "store.lock"], capture_output=True, text=True)
    assert not tried.returncode or "BlockingIOError" in tried.stderr
    return tried.returncode != 0


def test_engines_on_one_folder_by_any_name_share_it_and_outlive_each_other(
    tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/193, https://github.com/jnwatson/py-lmdb/issues/129"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("kb")
    (tmp_path / "above").symlink_to(tmp_path, target_is_directory=True)
    path = tmp_path / "kb"
    names = [path, "kb", str(path), "link", f"{path}/", "./link/", "above/kb", Path("kb/../kb")]
    engines = [opened(name, tiny_model, pool_bytes=0) for name in names]
    assert {engine.store.path for engine in engines} == {str(path)}
    engines[0].prefill([document("lamp", LAMP)])
    expected = engines[-1].answer(QUESTION)
    assert expected.citations[0].doc_id == "lamp"
    while len(engines) > 1:
        engines.pop(0).close()
        assert is_in_use(path)  # closing one has not let go of the locks of the others
        for engine in engines:
            assert engine.answer(QUESTION, filter={"doc_id": "lamp"}).text == expected.text
        assert engines[0].prefill([document(f"d{len(engines)}", f"Text number {len(engines)}.")]).added == 1
        assert len(engines[-1].documents()) == 1 + len(names) - len(engines)
    assert is_sound(engines[0])
    engines[0].close()
    assert not is_in_use(path)
    with pytest.raises(StoreError, match="closed"):
        engines[0].answer(QUESTION)


def test_opening_and_closing_one_engine_does_not_disturb_questions_on_the_other(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/jnwatson/py-lmdb/issues/193"""
    with opened(tmp_path, tiny_model, pool_bytes=0) as asking:
        asking.prefill([document("lamp", LAMP)])
        expected = asking.answer(QUESTION).text
        stop = threading.Event()
        failures: list[BaseException] = []
        n_opened = 0

        def open_and_close() -> None:
            nonlocal n_opened
            try:
                while not stop.is_set():
                    with opened(f"{tmp_path}/", tiny_model) as other:
                        other.prefill([document("other", "Other words.")])
                        other.delete("other")
                    n_opened += 1
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=open_and_close)
        thread.start()
        texts = {asking.answer(QUESTION, filter={"doc_id": "lamp"}).text for _ in range(200 if LONG else 20)}
        stop.set()
        thread.join()
        assert failures == []
        assert texts == {expected}
        assert n_opened > 0
