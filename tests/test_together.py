"""Questions in one batch: each comes out as it would alone, whatever happens to the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import DocumentNotFoundError, MemoryStore
from test_engine import TEXTS

from pdllm_rag import AskOptions, CanvasUpdate, Final, InputDocument, LoadedModel, RagEngine, TextDelta
from pdllm_rag.errors import ContextWindowError, GenerationCancelled, NumericsError
from pdllm_rag.events import StreamEvent
from pdllm_rag.together import Asked, stream_together

QUESTIONS = ("When does the boat sail?", "train", "How high do the kites fly, and where?", "hill")


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False, max_new_tokens=12)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield opened


def apart(questions: Sequence[Asked]) -> list[list[StreamEvent | Exception]]:
    """The events of each question."""
    found: list[list[StreamEvent | Exception]] = [[] for _ in questions]
    for index, event in stream_together(questions):
        found[index].append(event)
    return found


def told(events: Sequence[StreamEvent | Exception]) -> tuple[str, list[Any], Any]:
    """Text, steps without their place in a batch, and the answer without its times."""
    assert isinstance(events[-1], Final)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    steps = [event.step for event in events if isinstance(event, CanvasUpdate)]
    answer = events[-1].answer
    shown = answer.as_dict()
    del shown["stats"]["ms"]
    return text, [(step.rows, step.tokens, step.nfe, step.finished) for step in steps], shown


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "k": st.integers(1, 4),
        "max_new_tokens": st.integers(1, 40),
        "threshold": st.sampled_from([0.05, 0.9]),
        "decoder": st.sampled_from(["static_kv", "vanilla"]),
        "decoder_options": st.sampled_from([{"order": "entropy"}, {"order": "margin"}]),  # both have it
        "stop": st.sampled_from([("e",), ("\u00e9", "ab")]),
        "filter": st.sampled_from([{"doc_id": "beta"}, {"doc_id": "none"}]),
        "abstain": st.booleans(),
    },
)


@given(st.lists(st.tuples(st.sampled_from(QUESTIONS), CHANGES), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_each_question_comes_out_as_it_would_alone(engine: RagEngine, asked: list[tuple[str, dict[str, Any]]]) -> None:
    together = apart([engine.asked(question, **changes) for question, changes in asked])
    alone = [list(engine.stream(question, **changes)) for question, changes in asked]
    assert [told(events) for events in together] == [told(events) for events in alone]


def test_questions_of_one_decoder_share_every_forward_pass(engine: RagEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    original = type(engine.options.make_decoder(engine.model)).steps

    def watched(self: Any, requests: Any) -> Any:
        batches.append(len(requests))
        return original(self, requests)

    monkeypatch.setattr(type(engine.options.make_decoder(engine.model)), "steps", watched)
    read = [
        ref.chunk_id for ref in engine.store.refs(engine.fingerprint)[:2]
    ]  # without a draft, which is decoded alone
    questions = [engine.asked(question, chunk_ids=read) for question in QUESTIONS]
    apart([*questions, engine.asked("boat", chunk_ids=read, threshold=0.5)])
    assert batches == [4, 1]


def test_one_that_cannot_be_asked_fails_alone(engine: RagEngine) -> None:
    found = apart(
        [
            engine.asked("boat"),
            engine.asked("boat " * 5000),
            engine.asked("boat", chunk_ids=["00" * 16]),
            engine.asked("train"),
        ]
    )
    assert [type(events[-1]) for events in found] == [Final, ContextWindowError, DocumentNotFoundError, Final]
    assert told(found[0]) == told(list(engine.stream("boat")))


def test_a_cancelled_question_leaves_the_batch_and_the_others_go_on(engine: RagEngine) -> None:
    cancel = threading.Event()
    slow = {"threshold": 1.0, "max_new_tokens": 40}
    questions = [engine.asked("boat", **slow), engine.asked("train", cancel=cancel, **slow)]
    found: list[list[StreamEvent | Exception]] = [[], []]
    for index, event in stream_together(questions):
        found[index].append(event)
        if len(found[1]) == 3:
            cancel.set()
    assert isinstance(found[1][-1], GenerationCancelled)
    assert sum(isinstance(event, CanvasUpdate) for event in found[1]) < 6
    assert told(found[0]) == told(list(engine.stream("boat", **slow)))


def test_a_failing_decoder_is_told_to_all_that_it_decoded(engine: RagEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise NumericsError("not finite")

    monkeypatch.setattr(type(engine.options.make_decoder(engine.model)), "steps", broken)
    read = [engine.store.refs(engine.fingerprint)[0].chunk_id]
    asked = [engine.asked(question, chunk_ids=read) for question in ("boat", "train")]
    found = apart([*asked, engine.asked("hill", chunk_ids=read, decoder="vanilla")])
    assert [type(events[-1]) for events in found] == [NumericsError, NumericsError, Final]


def test_the_model_can_be_asked_alone(engine: RagEngine) -> None:
    """As decoding the templated question over no chunks at all."""
    answer = engine.asked("boat", alone=True)
    final = list(answer.events())[-1]
    assert isinstance(final, Final)
    assert (final.answer.citations, final.answer.stats.context_tokens, final.answer.stats.supported) == ((), 0, False)
    assert final.answer.stats.nfe > 0
    with pytest.raises(ValueError, match="alone"):
        engine.asked("boat", alone=True, context="words")


def test_times_of_a_batch_are_what_each_question_waited(engine: RagEngine) -> None:
    found = apart([engine.asked(question) for question in QUESTIONS])
    for events in found:
        assert isinstance(events[-1], Final)
        ms = events[-1].answer.stats.ms
        assert ms["total"] >= ms["decode"] > 0
