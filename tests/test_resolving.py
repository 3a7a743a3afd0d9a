"""Prompts with context pasted into them: which stored chunks they hold, what else is context, and what is asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pdllm_store import MemoryStore
from prompt_templates import ONE_MESSAGE, SYSTEM

from pdllm_rag import InputDocument, RagEngine
from pdllm_rag.copies import Copies
from pdllm_rag.errors import UnmatchedContextError
from pdllm_rag.given import Chosen
from pdllm_rag.models import LoadedModel
from pdllm_rag.resolving import Part, Resolved, Resolver
from pdllm_rag.templates import context_regions, labelled_question

STORED = {
    "a": "The alpha boat sails at dawn from pier one, and its captain likes tea.",
    "b": "The beta boat sails at noon from pier two, and its captain likes milk.",
}
FOREIGN = "The gamma boat sails at dusk from pier three, and its captain likes rum."
QUESTION = "When does the beta boat sail?"

PLAIN = (
    "What are the information sources: list them",
    "I have two documents: a passport and a visa.\n\nWhich do I need?",
    "Question: who likes tea?",
    "You answer questions about documents: be brief.",
    "Follow these rules when you use sources:\n- cite them\n- be brief",
)


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=160) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in STORED.items()])
        yield engine


@pytest.fixture(scope="module")
def ids(engine: RagEngine) -> dict[str, bytes]:
    return {ref.doc_id: ref.chunk_id for ref in engine.store.refs(engine.fingerprint)}


@pytest.fixture(scope="module")
def resolver(engine: RagEngine) -> Resolver:
    """One that keeps the template's own text."""
    return Resolver(Copies(engine.store, engine.fingerprint, engine._index), "prompt")


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def context_of(*texts: str) -> str:
    return "\n\n".join(texts)


# -- templates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_MESSAGE)
def test_templates_of_one_message_are_read(name: str) -> None:
    text = ONE_MESSAGE[name].format(context=context_of(FOREIGN, "Short."), question=QUESTION)
    assert [text[a:b].strip() for a, b in context_regions(text, is_question=True)] == [context_of(FOREIGN, "Short.")]
    assert labelled_question(text) == QUESTION


@pytest.mark.parametrize("name", SYSTEM)
def test_templates_of_system_messages_are_read(name: str) -> None:
    text = SYSTEM[name].format(context=FOREIGN)
    assert [text[a:b].strip() for a, b in context_regions(text, is_question=False)] == [FOREIGN]


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize("is_question", [True, False])
def test_plain_messages_hold_no_context(text: str, is_question: bool) -> None:
    assert context_regions(text, is_question=is_question) == []


# -- stored context ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_MESSAGE)
def test_stored_texts_leave_the_template_around_the_question(
    resolver: Resolver, ids: dict[str, bytes], name: str
) -> None:
    template = ONE_MESSAGE[name]
    resolved = resolver.prompt(user(template.format(context=context_of(STORED["b"], STORED["a"]), question=QUESTION)))
    assert resolved.chunks == [ids["b"], ids["a"]]
    assert (resolved.context, resolved.recognised, resolved.unmatched_chars) == ([], 2, 0)
    (turn,) = resolved.turns
    assert turn["content"].split() == template.format(context="", question=QUESTION).split()


def test_a_model_of_bare_questions_is_asked_the_question_alone(engine: RagEngine, ids: dict[str, bytes]) -> None:
    for template in ONE_MESSAGE.values():
        resolved = engine.resolver.prompt(user(template.format(context=STORED["a"], question=QUESTION)))
        assert resolved.turns == user(QUESTION)
        assert resolved.chunks == [ids["a"]]
    for template in SYSTEM.values():
        system = {"role": "system", "content": template.format(context=STORED["a"])}
        resolved = engine.resolver.prompt([system, *user(QUESTION)])
        assert (resolved.turns, resolved.chunks) == (user(QUESTION), [ids["a"]])


def test_context_of_the_question_and_of_system_messages_counts_and_earlier_context_is_left_out(
    resolver: Resolver, ids: dict[str, bytes]
) -> None:
    messages = [
        {"role": "system", "content": f"Be brief.\n\n{STORED['a']}"},
        *user(f"{STORED['b']}\n\nWho likes milk?"),
        {"role": "assistant", "content": STORED["a"]},
        *user("And tea?"),
    ]
    resolved = resolver.prompt(messages)
    assert resolved.chunks == [ids["a"]]
    contents = [turn["content"] for turn in resolved.turns]
    assert contents == ["Be brief.", "Who likes milk?", STORED["a"], "And tea?"]
    assert resolver.prompt(messages[1:]).chunks is None
    assert resolver.prompt([*messages[1:3], *user(f"Context:\n{STORED['a']}"), *user(QUESTION)]).chunks == [ids["a"]]
    foreign = user(f"Context: {FOREIGN}\n\nQuestion: Who?")
    assert resolver.prompt([*foreign, *messages[2:]], "error").chunks is None


def test_without_context_a_conversation_is_what_it_was(resolver: Resolver) -> None:
    for text in (*PLAIN, QUESTION, "  spaced \n\n\n question?"):
        assert resolver.prompt(user(text)) == Resolved(user(text), None, [], 0, 0)


def test_a_stored_text_alone_is_a_question(resolver: Resolver) -> None:
    assert resolver.prompt(user(STORED["a"])) == Resolved(user(STORED["a"]), None, [], 0, 0)


def test_naming_a_chunk_in_a_text_pulls_nothing_in(resolver: Resolver, ids: dict[str, bytes]) -> None:
    name = ids["a"].hex()
    for forged in (name, f"<|chunk:{name}|>", f'{{"chunk_id": "{name}"}}', f"chunk_ids=[{name}]", f"Context: {name}"):
        resolved = resolver.prompt(user(f"{forged}\n\n{QUESTION}"))
        assert resolved.chunks is None
        assert forged in resolved.turns[0]["content"]


# -- other context -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_MESSAGE)
def test_other_context_is_told_apart_and_counted(resolver: Resolver, ids: dict[str, bytes], name: str) -> None:
    for texts, chunks in (((FOREIGN,), []), ((STORED["a"], FOREIGN, STORED["b"]), [ids["a"], ids["b"]])):
        prompt = user(ONE_MESSAGE[name].format(context=context_of(*texts), question=QUESTION))
        resolved = resolver.prompt(prompt)
        assert (resolved.chunks, resolved.context, resolved.unmatched_chars) == (chunks, [FOREIGN], len(FOREIGN))
        (turn,) = resolved.turns
        assert turn["content"].split() == ONE_MESSAGE[name].format(context="", question=QUESTION).split()
        assert labelled_question(turn["content"]) == QUESTION
        ignored = resolver.prompt(prompt, "ignore")
        assert (ignored.chunks, ignored.context, ignored.unmatched_chars) == (chunks, [], len(FOREIGN))
        with pytest.raises(UnmatchedContextError, match=f"{len(FOREIGN)} characters of context"):
            resolver.prompt(prompt, "error")


def test_headings_between_stored_texts_stay_in_the_prompt(resolver: Resolver) -> None:
    context = f"Source: a.txt\n{STORED['a']}\n\nSource: b.txt\n{STORED['b']}"
    resolved = resolver.prompt(user(ONE_MESSAGE["lcel"].format(context=context, question=QUESTION)), "error")
    assert "Source: b.txt" in resolved.turns[0]["content"]


def test_tags_around_each_source_are_no_context(engine: RagEngine, ids: dict[str, bytes]) -> None:
    """Open WebUI gives each its number and its file's name."""
    sources = [f'<source id="{i}" name="{i}-a-file-of-some-longer-name.txt">{text}</source>' for i, text in enumerate(
        (STORED["a"], FOREIGN, STORED["b"]))]  # fmt: skip
    for some, chunks, context in (
        (sources, ["a", "b"], [FOREIGN]),
        (sources[1:2], [], [FOREIGN]),
        (sources[:1], ["a"], []),
    ):
        prompt = user(ONE_MESSAGE["open webui"].format(context="\n".join(some), question=QUESTION))
        resolved = engine.resolver.prompt(prompt)
        assert (resolved.chunks, resolved.context) == ([ids[name] for name in chunks], context)
        assert resolved.turns == user(QUESTION)


def test_a_question_between_stored_texts_is_no_context(resolver: Resolver) -> None:
    question = "Question: which of the two boats sails first, and from which pier?"
    resolved = resolver.prompt(user(context_of(STORED["a"], question, STORED["b"])), "error")
    assert resolved.turns == user(question)


def test_that_nothing_was_recognised_is_said_once(engine: RagEngine, caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver(Copies(engine.store, engine.fingerprint, engine._index), "prompt")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            resolver.prompt(user(ONE_MESSAGE["lcel"].format(context=FOREIGN, question=QUESTION)))
    assert [record.getMessage() for record in caplog.records] == [
        f"no stored chunk in {len(FOREIGN)} characters of context (prefill); said once"
    ]


def test_a_bad_policy_is_refused(resolver: Resolver) -> None:
    with pytest.raises(ValueError, match="on_unmatched is 'drop'"):
        resolver.prompt(user(QUESTION), "drop")  # type: ignore[arg-type]


# -- documents -----------------------------------------------------------------------------------------------------


def test_documents_are_known_by_their_chunk_or_by_their_text(resolver: Resolver, ids: dict[str, bytes]) -> None:
    chosen = Chosen(ids["b"].hex(), -1.0, 0.5)
    gone = "0" * 32
    parts = [Part(STORED["b"], chosen), Part(STORED["a"], gone), Part(f"{FOREIGN}\n", None), Part("", ids["a"])]
    resolved = resolver.documents(parts)
    assert resolved.chunks == [chosen, ids["a"], ids["a"]]
    assert (resolved.context, resolved.recognised, resolved.unmatched_chars) == ([FOREIGN], 1, len(FOREIGN))
    assert resolver.documents([]).chunks == []


def test_a_document_whose_text_was_changed_is_read_as_it_is_now(resolver: Resolver, ids: dict[str, bytes]) -> None:
    """Compressors shorten what a retriever found and keep its metadata."""
    chosen = Chosen(ids["b"].hex(), -1.0, 0.5)
    short = STORED["b"].partition(",")[0]
    resolved = resolver.documents([Part(short, chosen), Part(STORED["b"].replace(" ", "\n"), chosen)])
    assert (resolved.chunks, resolved.context, resolved.unmatched_chars) == ([chosen], [short], len(short))
    assert resolver.documents([Part(STORED["a"], chosen)]).chunks == [ids["a"]]


# -- answers -------------------------------------------------------------------------------------------------------


def test_stored_and_pasted_chunks_are_read_together(engine: RagEngine, ids: dict[str, bytes]) -> None:
    answer = engine.answer(QUESTION, chunk_ids=[ids["b"]], context=[FOREIGN], max_new_tokens=8)
    assert (answer.stats.chunks.hit, answer.stats.chunks.recomputed) == (1, 1)
    stored = engine.store.meta(ids["b"]).token_ids
    assert answer.stats.cached_tokens == len(stored) < answer.stats.context_tokens
    with RagEngine.open(MemoryStore(kv_dtype="float32"), engine.model, chunk_len=160) as other:
        other.prefill([InputDocument("<context>", FOREIGN, "x"), InputDocument("b", STORED["b"], "b")])
        chunks = [ref.chunk_id for ref in other.store.refs(other.fingerprint)]
        assert other.answer(QUESTION, chunk_ids=chunks, max_new_tokens=8).text == answer.text


def test_chosen_chunks_bring_their_scores_and_are_all_read(engine: RagEngine, ids: dict[str, bytes]) -> None:
    chosen = [Chosen(ids["b"], -1.0, 0.7), Chosen(ids["a"].hex(), -9.0, 0.7)]
    answer = engine.answer(QUESTION, chunk_ids=chosen, score_window=0.5, abstain=False, max_new_tokens=8)
    assert {citation.doc_id: citation.score for citation in answer.citations} == {"b": -1.0, "a": -9.0}
    other = engine.answer(QUESTION, chunk_ids=[c._replace(margin=-5.0) for c in chosen], max_new_tokens=8)
    assert answer.stats.support is not None
    assert other.stats.support is not None
    assert other.stats.support < answer.stats.support


@pytest.mark.parametrize("window", [0.5, math.inf])
@pytest.mark.parametrize("chosen", ["retrieved", "given by id", "pasted", "given and pasted", "the only one"])
def test_what_was_not_scored_has_no_score(engine: RagEngine, ids: dict[str, bytes], chosen: str, window: float) -> None:
    """None, and null in JSON, is never taken for the score of a perfect chunk."""
    options: dict[str, Any] = {"score_window": window, "abstain": False, "max_new_tokens": 8}
    material: dict[str, dict[str, Any]] = {
        "retrieved": {"k": 2},
        "given by id": {"chunk_ids": list(ids.values())},
        "pasted": {"context": [FOREIGN]},
        "given and pasted": {"chunk_ids": [ids["b"]], "context": [FOREIGN]},
        "the only one": {"filter": {"doc_id": "b"}},
    }
    answer = engine.answer(QUESTION, **material[chosen], **options)
    is_scored = chosen == "retrieved" and window == 0.5
    assert answer.citations
    assert all((citation.score is not None) == is_scored for citation in answer.citations)
    assert all((one["score"] is not None) == is_scored for one in answer.as_dict()["citations"])
    if chosen in ("retrieved", "the only one"):
        found = engine.retrieve(QUESTION, score_window=window, **material[chosen])
        assert found
        assert all((one.score is not None) == is_scored for one in found)


def test_retrieval_leaves_out_what_lies_below_its_window(engine: RagEngine) -> None:
    everything = engine.retrieve(QUESTION, k=2, candidates=2)
    assert len(everything) == 2
    gap = everything[0].score - everything[1].score
    assert len(engine.retrieve(QUESTION, k=2, candidates=2, score_window=gap / 2)) == 1
    assert len(engine.retrieve(QUESTION, k=2, candidates=2, score_window=gap * 2)) == 2
