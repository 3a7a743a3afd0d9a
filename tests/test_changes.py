"""A store that changes, loses or damages things while it is used: no wrong citation, no lost document."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pdllm_store import ChunkKV, Fetched, LMDBStore, MemoryStore
from tiny import save_tiny_model

from pdllm_rag import AskOptions, Final, InputDocument, LoadedModel, RagEngine, load_model
from pdllm_rag.errors import ContextWindowError, NumericsError, RequestError
from pdllm_rag.models.families import Support
from pdllm_rag.pool import KVPool

PARAGRAPHS = [f"Paragraph {i} says that codeword p{i} opens door number {i * 7}." for i in range(6)]


def opened(model: LoadedModel, store: Any = None, **options: Any) -> RagEngine:
    chosen = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    return RagEngine.open(store or MemoryStore(kv_dtype="float32"), model, chunk_len=72, options=chosen, **options)


def once(engine: RagEngine, act: Callable[[], object]) -> None:
    """Let `act` happen once, right after the engine's next selection."""
    retriever = engine._retriever
    pending = [act]

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(retriever, name)

        def select(self, *args: Any, **kwargs: Any) -> Any:
            selection = retriever.select(*args, **kwargs)
            if pending:
                pending.pop()()
            return selection

    engine._retriever = Interrupted()  # type: ignore[assignment]


def test_a_document_replaced_during_a_question_is_never_quoted_at_its_old_places(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", "\n\n".join(PARAGRAPHS), "d")])
    longer = "\n\n".join(["A new first paragraph of some length.", *PARAGRAPHS])
    once(engine, lambda: engine.prefill([InputDocument("d", longer, "d")]))
    answer = engine.answer("Which codeword opens door 14?", k=3)
    document = engine.store.document(engine.fingerprint, "d")
    for citation in answer.citations:
        assert document.text[citation.char_start : citation.char_end] == citation.quote
        ref = document.chunks[citation.ordinal]
        assert ref.char_start <= citation.char_start <= citation.char_end <= ref.char_end
    assert answer.citations


def test_a_document_deleted_during_a_question_leaves_the_others_to_answer(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model, pool_bytes=0)
    for i, text in enumerate(PARAGRAPHS):
        engine.prefill([InputDocument(f"d{i}", text, f"d{i}")])
    once(engine, lambda: engine.delete("d2"))
    found = engine.retrieve("Which codeword opens door 14?", k=5)
    assert len(found) == 5
    assert "d2" not in {one.ref.doc_id for one in found}


def test_deleted_and_replaced_chunks_leave_the_memory(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(PARAGRAPHS)])
    engine.answer("Which codeword?", k=6)
    assert len(engine._pool) == 6
    engine.delete("d0")
    assert len(engine._pool) == 5
    engine.prefill([InputDocument("d1", "Something else entirely.", "d1")])
    engine.retrieve("Which codeword?", k=5)
    live = {ref.chunk_id for ref in engine.store.refs(engine.fingerprint)}
    assert set(engine._pool._entries) <= live


def test_the_pool_keeps_within_its_budget_and_drops_the_oldest_first() -> None:
    A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
    loads: list[bytes] = []

    class Loading(MemoryStore):
        def fetch(self, chunk_ids: Sequence[bytes]) -> Fetched:
            loads.extend(chunk_ids)
            kv = {name: ChunkKV(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)) for name in chunk_ids}
            return Fetched(kv, frozenset())

    pool = KVPool(Loading(), budget_bytes=2 * 256)
    pool.acquire([A, B])
    pool.acquire([A])
    assert loads == [A, B]
    pool.acquire([C])
    pool.acquire([A])
    assert loads == [A, B, C]
    pool.acquire([B])
    assert loads == [A, B, C, B]
    assert len(pool) == 2


def test_many_questions_on_one_lost_chunk_all_get_it(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model, pool_bytes=0)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    (ref, *_) = engine.store.refs(engine.fingerprint)
    engine.store.discard([ref.chunk_id])
    got: list[ChunkKV] = []

    def fetch() -> None:
        got.append(engine.store.fetch([ref.chunk_id]).kv[ref.chunk_id])

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert all(torch.equal(kv.k, got[0].k) for kv in got)
    assert engine.store.missing([ref.chunk_id]) == []
    assert engine.store.stats().recomputed == 1


def test_a_flipped_byte_on_disk_is_computed_again_and_the_answer_stays(tmp_path: Path, tiny_model: LoadedModel) -> None:
    with opened(tiny_model, tmp_path / "kb", kv_dtype="float32", pool_bytes=0) as engine:
        engine.prefill([InputDocument("d", "\n\n".join(PARAGRAPHS), "d")])
        whole = engine.answer("Which codeword?", k=2)
        needle = engine.store.load(engine.store.refs(engine.fingerprint)[0].chunk_id).v[-1, -2].numpy().tobytes()
    data = tmp_path / "kb" / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.find(needle)
    assert at > 0
    content[at + 5] ^= 0x10
    data.write_bytes(content)
    with opened(tiny_model, tmp_path / "kb", pool_bytes=0) as engine:
        refs = [ref.chunk_id for ref in engine.store.refs(engine.fingerprint)]
        again = engine.answer("Which codeword?", chunk_ids=refs[:2])
        assert again.stats.chunks == (1, 1, 2)
        assert engine.answer("Which codeword?", chunk_ids=refs[:2]).stats.chunks == (2, 0, 2)
        assert engine.answer("Which codeword?", k=2).text == whole.text


@pytest.mark.parametrize("given", [False, True])
def test_a_damaged_chunk_row_is_made_again_from_the_text_and_the_answer_stays(
    tiny_model: LoadedModel, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(kv_dtype="float32")
    engine = opened(tiny_model, store, pool_bytes=0)
    engine.prefill([InputDocument("d", "\n\n".join(PARAGRAPHS), "d")])
    refs = [ref.chunk_id for ref in store.refs(engine.fingerprint)]
    arguments: dict[str, Any] = {"chunk_ids": refs} if given else {"k": len(refs)}
    whole = engine.answer("Which codeword?", **arguments)
    for chunk_id in refs[:2]:
        store._transactions.write(lambda tables, key=chunk_id: tables.put("metas", key, b"damaged"))  # type: ignore[misc]
    again = engine.answer("Which codeword?", **arguments)
    assert again.text == whole.text
    assert [c.doc_id for c in again.citations] == [c.doc_id for c in whole.citations]
    assert caplog.text.count("is written again from its text") == 2
    assert store.verify().ok


def test_an_unchanged_document_with_lost_chunks_is_written_again(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    documents = [InputDocument("d", "\n\n".join(PARAGRAPHS), "d")]
    engine.prefill(documents)
    lost = engine.store.refs(engine.fingerprint)[1].chunk_id
    engine.store.discard([lost])
    report = engine.prefill(documents)
    assert (report.updated, report.chunks_computed) == (1, 1)
    assert engine.store.missing([lost]) == []


def test_changed_metadata_is_an_update_without_model_work(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d", metadata={"tags": ("a", "b")})])
    assert engine.prefill([InputDocument("d", PARAGRAPHS[0], "d", metadata={"tags": ("a", "b")})]).unchanged == 1
    report = engine.prefill([InputDocument("d", PARAGRAPHS[0], "d", metadata={"tags": ("c",)})])
    assert (report.updated, report.chunks_computed) == (1, 0)
    assert engine.documents()[0].metadata == {"tags": ["c"]}


def test_of_two_documents_with_one_id_the_last_one_wins(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    pair = [InputDocument("d", "The first text.", "d"), InputDocument("d", "The second text.", "d")]
    report = engine.prefill(pair)
    assert (report.added, report.updated) == (1, 1)
    assert engine.store.document(engine.fingerprint, "d").text == "The second text."
    engine.prefill(pair)
    assert engine.store.document(engine.fingerprint, "d").text == "The second text."


def test_lone_surrogates_are_text_too(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    report = engine.prefill(
        [InputDocument("bad", "hello \ud800 text", "bad"), InputDocument("good", "More words.", "good")]
    )
    assert "good" in {info.doc_id for info in engine.documents()}
    assert report.added + len(report.failed) == 2
    assert engine.answer("caf\udce9 hours?").stats.nfe > 0


# -- prune ---------------------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "docs"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Text of {name} with words.")
    return folder


def test_prune_never_empties_a_folder_at_one_blow(tmp_path: Path, tiny_model: LoadedModel) -> None:
    folder = folder_with(tmp_path, "a.txt", "sub/b.txt")
    engine = opened(tiny_model)
    engine.prefill([folder])
    shutil.rmtree(folder)
    folder.mkdir()  # an unmounted volume looks like this
    report = engine.prefill([folder], prune=True)
    assert report.pruned == []
    assert report.missing == ["a.txt", "sub/b.txt"]
    assert "mounted" in report.failed[0].reason
    assert len(engine.documents()) == 2


def test_prune_leaves_what_it_may_not_look_at(
    tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, "a.txt", "b.txt")
    engine = opened(tiny_model)
    engine.prefill([folder])
    (folder / "a.txt").unlink()
    real = os.lstat

    def refusing(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith("a.txt"):
            raise PermissionError(13, "Permission denied")
        return real(path, **kwargs)

    monkeypatch.setattr(os, "lstat", refusing)
    assert engine.prefill([folder], prune=True).pruned == []
    monkeypatch.undo()
    assert engine.prefill([folder], prune=True).pruned == ["a.txt"]


def test_a_file_that_became_a_folder_or_a_link_is_missing(tmp_path: Path, tiny_model: LoadedModel) -> None:
    folder = folder_with(tmp_path, "a.txt", "b.txt", "c.txt")
    engine = opened(tiny_model)
    engine.prefill([folder])
    (folder / "a.txt").unlink()
    (folder / "a.txt").mkdir()
    (folder / "b.txt").unlink()
    (folder / "b.txt").symlink_to(folder / "c.txt")
    assert engine.prefill([folder]).missing == ["a.txt", "b.txt"]


def test_a_moved_folder_is_taken_over_when_asked_to(tmp_path: Path, tiny_model: LoadedModel) -> None:
    folder = folder_with(tmp_path, "a.txt")
    engine = opened(tiny_model)
    engine.prefill([folder])
    folder.rename(tmp_path / "moved")
    assert engine.prefill([tmp_path / "moved"]).failed
    report = engine.prefill([tmp_path / "moved"], prune=True)
    assert (report.pruned, report.added, report.failed) == (["a.txt"], 1, [])


# -- requests ------------------------------------------------------------------------------------------------------


def test_scores_that_are_not_finite_are_an_error_not_a_refusal(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path)), dtype=torch.float32)
    engine = opened(model)
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(PARAGRAPHS)])
    model.backbone.model.lm_head.weight[70] = torch.nan
    with pytest.raises(NumericsError, match="finite"):
        engine.retrieve("Which codeword?")


def test_chunks_that_were_asked_for_are_all_read_or_refused(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument(f"d{i}", f"{text} {i}" * 2, f"d{i}") for i, text in enumerate(PARAGRAPHS * 9)])
    ids = [ref.chunk_id for ref in engine.store.refs(engine.fingerprint)]
    with pytest.raises(ContextWindowError, match="fewer chunks"):
        engine.answer("Which?", chunk_ids=ids)
    long = "word " * 390
    with pytest.raises(ContextWindowError, match="0 of"):
        engine.answer(long)


def test_an_answer_is_withheld_when_the_first_step_speaks_for_no_answer(tiny_model: LoadedModel) -> None:
    """Both signs reach the decision, and nothing is shown before it."""
    for support, withheld in (
        (Support(bias=-9.0, no_answer=0.0, margin=0.0, typical_margin=0.0), True),
        (Support(bias=9.0, no_answer=0.0, margin=0.0, typical_margin=0.0), False),
        (Support(bias=0.0, no_answer=1.0, margin=0.0, typical_margin=0.0), True),  # ln p is below 0
        (Support(bias=0.0, no_answer=-1.0, margin=0.0, typical_margin=0.0), False),
        (Support(bias=0.0, no_answer=0.0, margin=-1.0, typical_margin=0.0), True),  # the margin is above 0
    ):
        spec = replace(tiny_model.spec, family=replace(tiny_model.spec.family, support=support))
        engine = opened(replace(tiny_model, spec=spec))
        engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(PARAGRAPHS)])
        events = list(engine.stream("Which codeword?", abstain=True))
        assert isinstance(events[-1], Final)
        answer = events[-1].answer
        assert (not answer.stats.supported) == withheld
        if withheld:
            assert (len(events), answer.text, answer.citations) == (2, tiny_model.spec.family.no_answer, ())
            assert engine.answer("Which codeword?", abstain=False).text != answer.text


def test_the_caller_chooses_the_least_support(tiny_model: LoadedModel) -> None:
    """What is withheld follows from the support that is told, for any threshold; 0 withholds nothing."""
    support = Support(bias=-0.2, no_answer=0.0, margin=0.0, typical_margin=0.0)
    spec = replace(tiny_model.spec, family=replace(tiny_model.spec.family, support=support))
    engine = opened(replace(tiny_model, spec=spec))
    engine.prefill([InputDocument(f"d{i}", text, f"d{i}") for i, text in enumerate(PARAGRAPHS)])
    told = engine.answer("Which codeword?", abstain=True).stats
    assert (told.support, told.min_support, told.supported) == (pytest.approx(0.450166), 0.5, False)
    for least in (0.0, 0.45, 0.46, 1.0):
        stats = engine.answer("Which codeword?", abstain=True, min_support=least).stats
        assert (stats.support, stats.min_support, stats.supported) == (told.support, least, least < 0.4502)
    assert engine.answer("Which codeword?", min_support=1.0, abstain=False).stats.min_support is None


def test_a_least_support_is_refused_where_nothing_tells_support(tiny_model: LoadedModel) -> None:
    spec = replace(tiny_model.spec, family=replace(tiny_model.spec.family, support=None))
    engine = opened(replace(tiny_model, spec=spec))
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    assert engine.answer("Which codeword?", abstain=True).stats.min_support is None
    with pytest.raises(RequestError, match=r"min_support is 0\.3, but family .* has no calibration"):
        engine.answer("Which codeword?", min_support=0.3)


def test_a_beginning_of_the_no_answer_text_is_no_supported_answer() -> None:
    from pdllm_rag.support import says_nothing

    assert all(says_nothing(text, "Not found in it.") for text in ("", "  ", "Not found", "Not found in it."))
    assert not any(says_nothing(text, "Not found in it.") for text in ("Nothing", "Not found in it. Or is it?"))
    assert not says_nothing("x", None)


def test_a_callers_cancel_event_is_obeyed_and_left_alone(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    cancel = threading.Event()

    async def twice() -> list[str]:
        return [(await engine.aanswer("Which?", cancel=cancel)).text for _ in range(2)]

    first, second = asyncio.run(twice())
    assert first == second
    assert not cancel.is_set()
    cancel.set()
    with pytest.raises(RequestError, match="cancelled"):
        asyncio.run(engine.aanswer("Which?", options=AskOptions(cancel=cancel)))


def test_blank_ends_of_a_question_change_nothing(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    assert engine.answer("Which codeword?  \n").text == engine.answer("Which codeword?").text


def test_malformed_requests_are_named(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    for question in (None, b"x", [{"content": "x"}, {"role": "user", "content": "y"}], [{"role": "user"}]):
        with pytest.raises(RequestError):
            engine.answer(question)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        engine.retrieve(" ")
    for chunk_ids in ("ab", ["zz"], [5]):
        with pytest.raises(ValueError, match="id"):
            engine.answer("x", chunk_ids=chunk_ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="filter"):
        engine.answer("x", context="some text", filter={"a": "b"})
    with pytest.raises(ValueError, match="cache policy"):
        engine.answer("x", decoder="vanilla", policy="joint")
    assert engine.answer("x", decoder="vanilla").stats.policy == "dense"
    assert engine.answer("x", context=["", "good words", "good words"]).stats.chunks.recomputed == 1
    assert engine.answer("x", temperature=1e-40, seed=1).stats.nfe > 0


def test_a_stop_at_the_very_start_is_an_empty_answer_not_a_refusal(tiny_model: LoadedModel) -> None:
    engine = opened(tiny_model)
    engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    whole = engine.answer("Which codeword?").text
    stopped = engine.answer("Which codeword?", stop=(whole[:1],))
    assert (stopped.text, stopped.stats.finish_reason) == ("", "stop")


def test_the_store_is_opened_by_path_like_any_other(tmp_path: Path, tiny_model: LoadedModel) -> None:
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with RagEngine.open(tmp_path / "sub" / ".." / "kb", tiny_model) as engine:
        engine.prefill([InputDocument("d", PARAGRAPHS[0], "d")])
    assert store.stats().documents == 1
    store.close()
