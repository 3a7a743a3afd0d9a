"""The engine as its users see it: prefill once, ask often, and never a wrong or foreign chunk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pdllm_store import (
    DocumentConflictError,
    DocumentNotFoundError,
    LMDBStore,
    MemoryStore,
    StoreMismatchError,
    StoreNotFoundError,
)
from tiny import save_tiny_model

from pdllm_rag import AskOptions, Final, InputDocument, LoadedModel, RagEngine, TextDelta, load_model
from pdllm_rag.errors import ContextWindowError, GenerationCancelled, RequestError, UnknownModelError
from pdllm_rag.models.families import FAMILIES

TEXTS = {
    "alpha": " ".join(f"The red boat sails at {hour} in the morning." for hour in range(5)),
    "beta": " ".join(f"A green train leaves yard {yard} every day." for yard in range(5)),
    "gamma": " ".join(f"Blue kites fly {metres} metres above the hill." for metres in range(5)),
}


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    # Few steps, since most tests are not about decoding; and every chunk read, whatever its score.
    options = AskOptions(threshold=0.05, score_window=float("inf"))
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield opened


# -- prefill -------------------------------------------------------------------------------------------------------


def test_unchanged_documents_cost_no_model_work(engine: RagEngine) -> None:
    report = engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
    assert (report.added, report.updated, report.unchanged) == (0, 0, 3)
    assert (report.chunks_computed, report.tokens, report.bytes_written) == (0, 0, 0)


def test_a_changed_document_costs_only_its_changed_chunks(engine: RagEngine) -> None:
    before = {info.doc_id: info.chunk_ids for info in engine.documents()}["beta"]
    report = engine.prefill([InputDocument("beta", TEXTS["beta"] + "It never comes back.", "beta")])
    after = {info.doc_id: info.chunk_ids for info in engine.documents()}["beta"]
    assert report.updated == 1
    assert report.chunks_computed == len(set(after) - set(before)) < len(after)
    assert set(after) & set(before)


def test_a_deleted_document_is_gone_everywhere_and_can_come_back(engine: RagEngine) -> None:
    ids = {info.doc_id: info.chunk_ids for info in engine.documents()}["gamma"]
    assert engine.delete("gamma")
    assert not engine.delete("gamma")
    assert not engine.delete("never was")
    assert engine.store.missing(list(ids)) == list(dict.fromkeys(ids))
    assert all(found.ref.doc_id != "gamma" for found in engine.retrieve("Where do kites fly?", k=3))
    with pytest.raises(DocumentNotFoundError):
        engine.answer("Where do kites fly?", chunk_ids=[ids[0]])
    assert engine.prefill([InputDocument("gamma", TEXTS["gamma"], "gamma")]).added == 1
    assert any(found.ref.doc_id == "gamma" for found in engine.retrieve("Where do kites fly?", k=3))


def test_two_documents_with_one_text_share_kv(engine: RagEngine) -> None:
    report = engine.prefill([InputDocument("alpha copy", TEXTS["alpha"], "elsewhere")])
    assert (report.added, report.chunks_computed) == (1, 0)
    engine.delete("alpha")
    assert engine.retrieve("When does the boat sail?", k=1)[0].ref.doc_id == "alpha copy"


def test_an_id_held_by_another_source_is_reported_and_nothing_changes(engine: RagEngine) -> None:
    report = engine.prefill([InputDocument("alpha", "Other words.", "another place")])
    assert [failure.path for failure in report.failed] == ["alpha"]
    assert "another place" in report.failed[0].reason
    assert engine.store.document(engine.fingerprint, "alpha").text == TEXTS["alpha"]


def test_one_bad_document_does_not_stop_the_others(engine: RagEngine) -> None:
    report = engine.prefill(
        [
            InputDocument("blank", " \n\u200b\t", "blank"),
            InputDocument("good", "A sentence that is fine.", "good"),
            InputDocument("bad metadata", "Fine words.", "bad", metadata={"when": object()}),
        ]
    )
    assert report.added == 1
    assert {failure.path for failure in report.failed} == {"blank", "bad metadata"}
    assert "when" in next(f.reason for f in report.failed if f.path == "bad metadata")


def test_an_interrupted_prefill_goes_on_where_it_stopped(tiny_model: LoadedModel) -> None:
    store = MemoryStore(kv_dtype="float32")
    documents = [InputDocument(f"d{i}", f"Number {i}. {TEXTS['alpha']}", f"d{i}") for i in range(60)]
    engine = RagEngine.open(store, tiny_model, chunk_len=64)
    seen = 0

    def stop_late(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(documents, on_progress=stop_late)
    done = store.stats().chunks
    assert done > 0
    report = engine.prefill(documents)
    everything = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64).prefill(documents)
    assert report.added + report.unchanged == 60
    assert report.chunks_computed == everything.chunks_computed - done


def test_kv_is_the_same_whatever_shares_its_batch(tiny_model: LoadedModel) -> None:
    together = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    together.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
    alone = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    for name, text in reversed(TEXTS.items()):
        alone.prefill([InputDocument(name, text, name)])
    for ref in together.store.refs(together.fingerprint):
        one, other = together.store.load(ref.chunk_id), alone.store.load(ref.chunk_id)
        torch.testing.assert_close(one.k, other.k, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.v, other.v, rtol=0, atol=1e-5)


def test_folders_report_failures_and_vanished_files_and_prune_removes_them(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("First words here.")
    (folder / "sub" / "b.md").write_text("# Second\n\nMore words.")
    (folder / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    report = engine.prefill([folder])
    assert [info.doc_id for info in engine.documents()] == ["a.txt", "sub/b.md"]
    assert [failure.path for failure in report.failed] == ["picture.txt"]
    (folder / "a.txt").unlink()
    assert engine.prefill([folder]).missing == ["a.txt"]
    assert [info.doc_id for info in engine.documents()] == ["a.txt", "sub/b.md"]
    assert engine.prefill([folder], prune=True).pruned == ["a.txt"]
    assert [info.doc_id for info in engine.documents()] == ["sub/b.md"]


def test_shards_cover_a_folder_once(tmp_path: Path, tiny_model: LoadedModel) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"Text number {i}.")
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    counts = [engine.prefill([tmp_path], shard=(i, 3)).added for i in (1, 2, 3)]
    assert sum(counts) == 12
    assert len(engine.documents()) == 12
    with pytest.raises(ValueError, match="0/3"):
        engine.prefill([tmp_path], shard=(0, 3))


def test_same_named_files_of_two_folders_conflict_until_prefixed(tmp_path: Path, tiny_model: LoadedModel) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "readme.txt").write_text(f"Words of {name}.")
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    with pytest.raises(DocumentConflictError, match="id-prefix"):
        engine.prefill([tmp_path / "x", tmp_path / "y"])
    engine.prefill([tmp_path / "x"])
    assert engine.prefill([tmp_path / "y"]).failed
    assert engine.prefill([tmp_path / "y"], id_prefix="y/").added == 1


@pytest.mark.parametrize(
    "text",
    [
        "x" * 60_000,
        "🌊🐚" * 900,
        "漢字かな交じり文。" * 200,
        "مرحبا بالعالم. " * 150,
        "<|mask|> and <|endoftext|> " * 40,
    ],
    ids=["no space", "emoji", "cjk", "arabic", "special tokens"],
)
def test_no_character_of_an_odd_document_is_lost(tiny_model: LoadedModel, text: str) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=256)
    engine.prefill([InputDocument("odd", text, "odd")])
    document = engine.store.document(engine.fingerprint, "odd")
    assert "".join(text[ref.char_start : ref.char_end] for ref in document.chunks) == text
    ids = [token for ref in document.chunks for token in engine.store.meta(ref.chunk_id).token_ids[1:].tolist()]
    assert ids == tiny_model.tokenizer.encode(text)
    assert tiny_model.spec.mask_id not in ids
    assert all(engine.store.meta(ref.chunk_id).token_ids[0] == tiny_model.spec.bos_id for ref in document.chunks)


# -- answers -------------------------------------------------------------------------------------------------------


def test_streamed_text_joined_is_the_answer(engine: RagEngine) -> None:
    for question in ("When does the boat sail?", "Which train?", "🌊?"):
        events = list(engine.stream(question, abstain=False, max_new_tokens=40))
        assert isinstance(events[-1], Final)
        answer = events[-1].answer
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == answer.text
        assert answer.text == engine.answer(question, abstain=False, max_new_tokens=40).text


def test_an_answer_reports_what_it_cost_and_what_it_read(engine: RagEngine) -> None:
    cold = engine.answer("When does the red boat sail?", k=2)
    assert cold.stats.chunks.hit == 2
    assert cold.stats.chunks.recomputed == 0
    assert cold.stats.nfe >= 1
    assert set(cold.stats.ms) == {"first_stage", "draft", "score", "load", "decode", "total"}
    assert {"answer", "citations", "stats"} == set(cold.as_dict())
    for citation in cold.citations:
        text = engine.store.document(engine.fingerprint, citation.doc_id).text
        assert text[citation.char_start : citation.char_end] == citation.quote


def test_k_is_the_number_of_chunks_read_and_the_call_wins(engine: RagEngine) -> None:
    available = len(engine.store.refs(engine.fingerprint))
    for k in (1, 3, 50):
        assert len(engine.retrieve("boat", k=k, candidates=8)) == min(k, available)
        assert engine.answer("boat", k=k).stats.chunks.hit <= min(k, available)
    for bad in (0, -1, "3", 2.0, True, None):
        with pytest.raises(ValueError, match="k is"):
            engine.answer("boat", k=bad)


def test_wrong_options_name_themselves(engine: RagEngine) -> None:
    for changes, words in [
        ({"decoder": "magic"}, "static_kv"),
        ({"policy": "blend"}, "independent"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"threshold": 1.5}, "threshold"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": ("",)}, "stop"),
        ({"topk": 3}, "unknown option 'topk'"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.answer("boat", **changes)


def test_empty_questions_and_conversations_without_a_question_are_refused(engine: RagEngine) -> None:
    for empty in ("", "  \n", [], [{"role": "assistant", "content": "hello"}]):
        with pytest.raises(RequestError):
            engine.answer(empty)


def test_a_question_that_does_not_fit_is_refused_with_its_numbers(engine: RagEngine) -> None:
    window = engine.model.spec.family.window
    with pytest.raises(ContextWindowError, match=str(window)):
        engine.answer("word " * window)
    with pytest.raises(ContextWindowError, match="max_new_tokens"):
        engine.answer("boat", max_new_tokens=window)


def test_chunks_are_read_by_rank_until_the_window_is_full(tiny_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=256)
    engine.prefill([InputDocument("long", " ".join(f"Sentence number {i} stands here." for i in range(300)), "long")])
    answer = engine.answer("Which sentence?", k=40, candidates=40, abstain=False)
    assert 1 <= answer.stats.chunks.hit < 40
    used = answer.stats.context_tokens + answer.stats.prompt_tokens + 32
    assert used <= tiny_model.spec.family.window
    assert len(answer.citations) in (0, answer.stats.chunks.hit)


def test_mask_text_in_a_question_is_only_text(engine: RagEngine) -> None:
    plain = engine.model.tokenizer.encode("What does <|mask|> mean?")
    assert engine.model.spec.mask_id not in plain
    first = engine.answer("What does <|mask|> mean?", abstain=False)
    assert engine.answer("What does <|mask|> mean?", abstain=False).text == first.text


def test_answers_do_not_depend_on_what_was_asked_before(engine: RagEngine) -> None:
    questions = ["boat at dawn?", "green train?", "kites?"]
    first = [engine.answer(q, abstain=False).text for q in questions]
    again = [engine.answer(q, abstain=False).text for q in reversed(questions)][::-1]
    assert first == again


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(engine: RagEngine) -> None:
    whole = engine.answer("boat", abstain=False).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    events = list(engine.stream("boat", abstain=False, stop=(stop,)))
    final = events[-1].answer
    assert final.text == whole[: whole.index(stop)].rstrip()
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == final.text
    assert final.stats.finish_reason == "stop"


def test_answer_lengths_are_honoured_exactly(engine: RagEngine) -> None:
    for n in (1, 7, 33):
        answer = engine.answer("boat", abstain=False, max_new_tokens=n)
        assert answer.stats.tokens <= n
        assert answer.stats.tokens == n or answer.stats.finish_reason == "stop"


def test_seeds_repeat_and_temperature_zero_ignores_them(engine: RagEngine) -> None:
    def ask(**changes: object) -> str:
        return engine.answer("boat", abstain=False, **changes).text

    assert ask(temperature=1.0, seed=1) == ask(temperature=1.0, seed=1)
    assert ask(temperature=1.0, seed=1) != ask(temperature=1.0, seed=2)
    assert ask(seed=1) == ask(seed=2)


def test_chunk_ids_and_pasted_context_replace_retrieval(engine: RagEngine) -> None:
    ref = engine.store.refs(engine.fingerprint)[0]
    by_id = engine.answer("boat", chunk_ids=[ref.chunk_id], abstain=False)
    assert by_id.stats.chunks.hit == 1
    assert engine.answer("boat", chunk_ids=[ref.chunk_id.hex()], abstain=False).text == by_id.text
    text = engine.store.document(engine.fingerprint, ref.doc_id).text[ref.char_start : ref.char_end]
    before = engine.store.stats()
    pasted = engine.answer("boat", context=text, abstain=False)
    assert pasted.text == by_id.text
    assert (pasted.stats.chunks.hit, pasted.stats.chunks.recomputed) == (0, 1)
    assert engine.store.stats().chunks == before.chunks
    both = engine.answer("boat", context="A tug tows.", chunk_ids=[ref.chunk_id], abstain=False).stats.chunks
    assert (both.hit, both.recomputed) == (1, 1)


def test_filters_apply_before_scoring_and_an_empty_one_reads_nothing(tiny_model: LoadedModel) -> None:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    for name, text in TEXTS.items():
        engine.prefill([InputDocument(name, text, name, metadata={"colour": name[0], "year": 2025})])
    assert {r.ref.doc_id for r in engine.retrieve("boat", k=4, filter={"colour": "b"})} == {"beta"}
    assert {r.ref.doc_id for r in engine.retrieve("boat", k=4, filter={"doc_id": "gamma", "year": "2025"})} == {"gamma"}
    assert engine.retrieve("boat", filter={"colour": "z"}) == []
    answer = engine.answer("boat", filter={"colour": "z"}, abstain=False)
    assert answer.text == tiny_model.spec.family.no_answer
    assert (answer.citations, answer.stats.nfe, answer.stats.supported) == ((), 0, False)


def test_vanilla_and_joint_read_the_same_chunks_and_are_recorded(engine: RagEngine) -> None:
    for changes in ({"decoder": "vanilla"}, {"policy": "joint"}, {"placement": "gap"}, {"placement": "reuse"}):
        answer = engine.answer("boat", abstain=False, **changes)
        (name, value), *_ = changes.items()
        if name != "placement":
            assert getattr(answer.stats, name) == value
        fresh = "policy" in changes or "decoder" in changes
        assert answer.stats.chunks[:2] == ((0, 4) if fresh else (4, 0))
        assert answer.stats.cached_tokens == (0 if fresh else answer.stats.context_tokens)


def test_one_chunk_is_read_alike_under_every_policy_and_decoder(engine: RagEngine) -> None:
    """With one chunk there is nobody else to see, so joint is independent."""
    ref = engine.store.refs(engine.fingerprint)[0]
    independent = engine.answer("boat", chunk_ids=[ref.chunk_id], abstain=False)
    joint = engine.answer("boat", chunk_ids=[ref.chunk_id], policy="joint", abstain=False)
    assert joint.text == independent.text


def test_cancelling_stops_the_decoding(engine: RagEngine) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(GenerationCancelled):
        engine.answer("boat", cancel=cancel)


def test_async_answers_leave_the_loop_free_and_equal_the_sync_ones(engine: RagEngine) -> None:
    async def run() -> tuple[str, str]:
        one = await engine.aanswer("boat", abstain=False)
        parts = [e.text async for e in engine.astream("boat", abstain=False) if isinstance(e, TextDelta)]
        return one.text, "".join(parts)

    expected = engine.answer("boat", abstain=False).text
    assert asyncio.run(run()) == (expected, expected)


def test_many_threads_ask_at_once_and_get_their_own_answers(engine: RagEngine) -> None:
    questions = [f"{word} {i}?" for i in range(4) for word in ("boat", "train", "kites")]
    expected = [engine.answer(q, abstain=False).text for q in questions]
    got: dict[int, str] = {}

    def ask(index: int) -> None:
        got[index] = engine.answer(questions[index], abstain=False).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(questions))] == expected


# -- stores and models ---------------------------------------------------------------------------------------------


def test_a_store_survives_a_restart(tmp_path: Path, tiny_model_path: Path) -> None:
    with RagEngine.open(tmp_path / "kb", str(tiny_model_path), dtype=torch.float32, chunk_len=64) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        first = engine.answer("boat", abstain=False)
    with RagEngine.open(tmp_path / "kb", str(tiny_model_path), dtype=torch.float32, create=False) as engine:
        again = engine.answer("boat", abstain=False)
    assert again.text == first.text
    assert again.stats.chunks.hit == first.stats.chunks.hit > 0
    assert (again.stats.chunks.recomputed, again.stats.cached_tokens) == (0, again.stats.context_tokens)


def test_documents_of_another_model_are_never_used(tmp_path: Path, tiny_model: LoadedModel) -> None:
    other = load_model(str(save_tiny_model(tmp_path / "other", seed=1)), dtype=torch.float32)
    store = MemoryStore(kv_dtype="float32")
    RagEngine.open(store, tiny_model).prefill([InputDocument("a", TEXTS["alpha"], "a")])
    engine = RagEngine.open(store, other)
    assert engine.documents() == []
    with pytest.raises(StoreMismatchError, match="another model"):
        engine.answer("boat")
    assert engine.prefill([InputDocument("a", TEXTS["alpha"], "a")]).chunks_computed > 0
    ids = {f.weights_digest: engine.store.documents(f)[0].chunk_ids for f in store.fingerprints()}
    assert len(ids) == 2
    assert not set.intersection(*map(set, ids.values()))


def test_an_empty_store_says_what_to_do(tiny_model: LoadedModel) -> None:
    with pytest.raises(DocumentNotFoundError, match="pdllm prefill"):
        RagEngine.open(MemoryStore(), tiny_model).answer("boat")


def test_a_wrong_path_or_model_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        RagEngine.open(tmp_path / "none", "demo", create=False)
    with pytest.raises(UnknownModelError, match="no-such-model"):
        RagEngine.open(tmp_path / "new", "no-such-model")
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float32"])
def test_every_stored_dtype_works_and_another_one_is_refused(
    tmp_path: Path, tiny_model: LoadedModel, kv_dtype: str
) -> None:
    with RagEngine.open(tmp_path / "kb", tiny_model, kv_dtype=kv_dtype, chunk_len=64) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        assert engine.answer("boat", abstain=False, score_window=9e9).stats.chunks.hit == 4
    wrong = "float32" if kv_dtype != "float32" else "int8"
    with pytest.raises(StoreMismatchError, match=kv_dtype):
        RagEngine.open(tmp_path / "kb", tiny_model, kv_dtype=wrong)


def test_a_lost_chunk_is_computed_again_and_written_back(tmp_path: Path, tiny_model: LoadedModel) -> None:
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    engine = RagEngine.open(store, tiny_model, chunk_len=64, pool_bytes=0)
    engine.prefill([InputDocument("alpha", TEXTS["alpha"], "alpha")])
    whole = engine.answer("boat", abstain=False)
    victims = [ref.chunk_id for ref in store.refs(engine.fingerprint)]
    kept = store.load(victims[0])
    store.discard(victims)
    again = engine.answer("boat", abstain=False)
    assert again.text == whole.text
    assert (again.stats.chunks.hit, again.stats.chunks.recomputed) == (0, whole.stats.chunks.hit)
    assert whole.stats.chunks.hit > 0
    healed = engine.answer("boat", abstain=False)
    assert (healed.stats.chunks.recomputed, store.missing(victims)) == (0, [])
    torch.testing.assert_close(store.load(victims[0]).k, kept.k, rtol=0, atol=1e-5)
    store.close()


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ValueError, match="candidates"):
        AskOptions(candidates=0)
    assert AskOptions(stop="x").stop == ("x",)


def test_families_are_complete() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.chunk_len <= family.max_chunk_len <= family.context_len <= family.window
