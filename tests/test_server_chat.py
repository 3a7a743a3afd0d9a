"""The OpenAI-shaped routes, by OpenAI's own client and by the letter."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pdllm_store import MemoryStore
from prompt_templates import ONE_MESSAGE
from serving import KEY, Site, parsed, served
from test_engine import TEXTS

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine

TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title summarizing the chat history.\n### Output:\nJSON\n"
    "### Chat History:\n<chat_history>\nUSER: When does the boat sail?\n</chat_history>"
)


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield opened


@pytest.fixture(scope="module")
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine, api_key=KEY, max_history_tokens=60) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(site: Site, model: str, messages: list[Any], **fields: Any) -> Any:
    return site.client.post("/v1/chat/completions", json={"model": model, "messages": messages, **fields})


def test_the_model_is_listed_under_its_name_not_its_folder(model: str, engine: RagEngine, site: Site) -> None:
    assert model == Path(engine.model.spec.name).name
    own = site.client.get("/v1/models").json()["data"][0]["pdllm"]
    assert own["defaults"]["k"] == engine.options.k
    assert own["limits"]["max_k"] == 32
    assert own["limits"]["max_answer_tokens"] == 512
    assert "static_kv" in own["decoders"]


def test_a_completion_is_the_engines_answer(client: openai.OpenAI, model: str, engine: RagEngine) -> None:
    got = client.chat.completions.create(model=model, messages=user("When does the boat sail?"), max_tokens=12)
    answer = engine.answer("When does the boat sail?", max_new_tokens=12)
    assert got.choices[0].message.content == answer.text
    assert got.choices[0].finish_reason == answer.stats.finish_reason
    assert got.usage is not None
    assert got.usage.completion_tokens == answer.stats.tokens
    assert got.usage.prompt_tokens == answer.stats.prompt_tokens + answer.stats.context_tokens
    assert got.usage.prompt_tokens_details.cached_tokens == answer.stats.cached_tokens
    assert got.model_extra["citations"] == answer.as_dict()["citations"]
    assert got.model_extra["history"] == {"kept": 0, "given": 0}


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_joins_to_the_completion(client: openai.OpenAI, model: str, include_usage: bool) -> None:
    whole = client.chat.completions.create(model=model, messages=user("train"), max_tokens=40)
    more = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(
        client.chat.completions.create(model=model, messages=user("train"), max_tokens=40, stream=True, **more)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].model_extra["citations"] == whole.model_extra["citations"]
    assert [chunk.usage for chunk in chunks if chunk.usage] == ([whole.usage] if include_usage else [])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_last_event_before_done_has_the_citations(site: Site, model: str) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        response = chat(site, model, user("boat"), stream=True, **options)
        events = [parsed(block) for block in response.text.strip().split("\n\n")]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert events[-1] == ("message", "[DONE]")
        assert isinstance(events[-2][1]["citations"], list)


def test_citations_are_there_when_there_are_none(site: Site, model: str) -> None:
    assert chat(site, model, user("boat"), retrieval=False).json()["citations"] == []


def test_stop_ends_the_answer_and_seed_makes_it_repeatable(client: openai.OpenAI, model: str) -> None:
    def text(**options: Any) -> str:
        got = client.chat.completions.create(model=model, messages=user("boat"), max_tokens=30, **options)
        return got.choices[0].message.content or ""

    whole = text()
    stop = whole[3:5]
    assert text(stop=stop) == text(stop=[stop]) == whole[: whole.find(stop)].rstrip()
    assert text(temperature=1.5, seed=7) == text(temperature=1.5, seed=7)
    assert len({text(temperature=1.5, seed=seed) for seed in range(6)}) > 1


def test_parts_of_a_message_are_joined(site: Site, model: str) -> None:
    parts = [{"type": "text", "text": "When does "}, {"type": "text", "text": "the boat sail?"}]
    assert answer_of(chat(site, model, user(parts))) == answer_of(chat(site, model, user("When does the boat sail?")))


def answer_of(response: Any) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_the_last_turn_is_looked_for_and_earlier_ones_are_kept_within_the_limit(
    site: Site, model: str, engine: RagEngine
) -> None:
    earlier = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Words of long ago. " * 5},
        {"role": "assistant", "content": "Trains are green."},
        {"role": "user", "content": "And kites?"},
        {"role": "assistant", "content": "Blue."},
    ]
    got = chat(site, model, [*earlier, *user("When does the boat sail?")], max_tokens=8)
    # by the newest: "Blue.", "And kites?", then "Trains are green.", which would open the talk and goes; system is kept
    kept = [earlier[0], *earlier[3:], *user("When does the boat sail?")]
    assert got.json()["history"] == {"kept": 3, "given": 5}
    assert answer_of(got) == engine.answer(kept, max_new_tokens=8).text
    assert got.json()["citations"] == engine.answer(kept, max_new_tokens=8).as_dict()["citations"]


@pytest.mark.parametrize(
    "prompt", [TITLE, "Provide a concise, 5-word-or-less title for the conversation, using title case conventions."]
)
def test_a_chat_uis_own_errands_read_no_document(site: Site, model: str, engine: RagEngine, prompt: str) -> None:
    got = chat(site, model, user(prompt), max_tokens=8)
    assert got.status_code == 200, got.text
    assert (got.json()["citations"], got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) == ([], 0)
    assert got.json()["usage"]["prompt_tokens"] == len(engine.model.tokenizer.render(
        engine.model.spec.family.template, user(prompt)).ids)  # fmt: skip
    asked = chat(site, model, user("What title for the boat?"), max_tokens=8)
    assert asked.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.UnprocessableEntityError, "messages"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, openai.UnprocessableEntityError, "user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, openai.UnprocessableEntityError, "role"),
        ({"messages": user("")}, openai.UnprocessableEntityError, "empty"),
        ({"messages": user("x" * 8001)}, openai.UnprocessableEntityError, "8,001"),
        ({"max_tokens": 1000}, openai.UnprocessableEntityError, "1,000"),
        ({"temperature": -1}, openai.UnprocessableEntityError, "temperature"),
        ({"n": 2}, openai.UnprocessableEntityError, "n"),
        ({"logprobs": True}, openai.UnprocessableEntityError, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.UnprocessableEntityError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.UnprocessableEntityError, "text"),
    ],
)
def test_errors_come_in_the_envelope(
    client: openai.OpenAI, model: str, fields: dict[str, Any], error: type[openai.APIStatusError], word: str
) -> None:
    with pytest.raises(error) as refusal:
        client.chat.completions.create(**{"model": model, "messages": user("boat"), **fields})
    assert word in refusal.value.message
    assert isinstance(refusal.value.body, dict)
    assert set(refusal.value.body) == {"message", "type", "code", "param"}


def test_a_wrong_key_is_an_authentication_error(site: Site, model: str) -> None:
    with (
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="not-the-right-key", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model=model, messages=user("boat"))


def test_an_error_amid_a_stream_is_an_event_that_the_client_raises(
    engine: RagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = type(engine.options.make_decoder(engine.model))
    original = decoder.steps

    def breaks_off(self: Any, requests: Any) -> Any:
        yield next(original(self, requests))
        raise ZeroDivisionError

    with served(engine) as site, openai.OpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "steps", breaks_off)
            read = [engine.store.refs(engine.fingerprint)[0].doc_id]
            patch.setattr(engine, "options", engine.options.with_changes({"filter": {"doc_id": read[0]}, "k": 8}))
            with pytest.raises(openai.APIError, match="ZeroDivisionError"):
                list(client.chat.completions.create(model=model, messages=user("boat"), max_tokens=500, stream=True))
        assert answer_of(chat(site, model, user("boat")))


def test_the_stream_is_json_line_by_line(site: Site, model: str) -> None:
    response = chat(site, model, user("boat"), stream=True)
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


# -- context pasted into prompts -------------------------------------------------------------------------------

STORED = TEXTS["beta"].replace(". ", ".\n")  # its chunks are short, so each must fill a line
FOREIGN = "The grey ferry crosses at noon from the pier behind the market hall."


@pytest.mark.parametrize("name", ONE_MESSAGE)
@pytest.mark.parametrize("held", ["stored", "both"])
def test_a_prompt_with_stored_chunks_is_read_as_the_components_read_it(
    site: Site, model: str, engine: RagEngine, name: str, held: str
) -> None:
    context = {"stored": STORED, "both": f"{STORED}\n\n{FOREIGN}"}[held]
    prompt = user(ONE_MESSAGE[name].format(context=context, question="When does the train leave?"))
    resolved = engine.resolver.prompt(prompt)
    expected = engine.answer(resolved.turns, **resolved.material(), max_new_tokens=8)
    got = chat(site, model, prompt, max_tokens=8).json()
    assert got["choices"][0]["message"]["content"] == expected.text
    assert got["citations"] == expected.as_dict()["citations"]
    sources = {"stored": {"beta"}, "both": {"beta", "<context>"}}[held]
    assert {citation["doc_id"] for citation in got["citations"]} == sources
    kv = got["kv"]
    n_chunks = len({ref.chunk_id for ref in engine.store.refs(engine.fingerprint) if ref.doc_id == "beta"})
    assert kv["recognised"] == kv["hit"] == n_chunks
    assert kv["unmatched_chars"] == (len(FOREIGN) if held == "both" else 0)
    last = chat(site, model, prompt, max_tokens=8, stream=True).text.strip().split("\n\n")[-2]
    assert parsed(last)[1]["kv"] == kv


CONVERSATION = [
    [*user("When does the train leave?")],
    [*user("Hi, I bought a ticket.\nQuestion: when does the train leave?")],
    [*user("When does the train leave? I got\n```\nERR 5\n```\nfrom it")],
    [*user("How do I write <source>x</source> in HTML?")],
    [*user("Sources: a friend told me.\n---\nWhen does the train leave?\n---")],
    [{"role": "system", "content": "You help customers.\n\n---\n\nBe brief and kind.\n\n---"}, *user("The train?")],
    [{"role": "system", "content": "Cite every statement. Source: [n]. Documents:\n"}, *user("The train?")],
    *([*user(ONE_MESSAGE["lcel"].format(context=context, question="The train?"))] for context in (FOREIGN, "")),
]


@pytest.mark.parametrize("messages", CONVERSATION)
def test_without_stored_text_a_message_is_looked_for_as_it_stands(
    site: Site, model: str, engine: RagEngine, messages: list[dict[str, str]]
) -> None:
    expected = engine.answer(messages, max_new_tokens=8)
    got = chat(site, model, messages, max_tokens=8).json()
    assert got["choices"][0]["message"]["content"] == expected.text
    assert got["citations"] == expected.as_dict()["citations"]
    assert got["kv"]["hit"] > 0 == got["kv"]["recognised"] == got["kv"]["unmatched_chars"]


def test_a_pasted_prompt_that_is_to_be_looked_for_is(site: Site, model: str) -> None:
    prompt = user(ONE_MESSAGE["lcel"].format(context=STORED, question="When does the train leave?"))
    assert chat(site, model, prompt, max_tokens=8).json()["kv"]["recognised"] > 0
    assert chat(site, model, prompt, max_tokens=8, retrieval=True).json()["kv"]["recognised"] == 0


def test_the_limit_of_a_question_counts_what_is_to_be_encoded_for_it(site: Site, model: str) -> None:
    """Stored text is read from the store, however much of it there is."""
    for context, status in (("\n".join([STORED] * 50), 200), (f"{FOREIGN} " * 120, 422)):
        prompt = user(ONE_MESSAGE["stuff"].format(context=context, question="When does the train leave?"))
        assert len(prompt[0]["content"]) > 8000
        assert chat(site, model, prompt, max_tokens=8).status_code == status


def test_context_does_not_make_a_question_of_an_answer(site: Site, model: str) -> None:
    system = {"role": "system", "content": f"Use these documents:\n\n{TEXTS['beta']}"}
    refused = chat(site, model, [system, *user("And?"), {"role": "assistant", "content": "Yes."}])
    assert refused.status_code == 422


def test_a_pasted_prompt_passes_over_the_filter_of_the_engine(
    engine: RagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "options", engine.options.with_changes({"filter": {"doc_id": "alpha"}}))
    prompt = user(ONE_MESSAGE["lcel"].format(context=STORED, question="When does the train leave?"))
    with served(engine) as site:
        name = site.client.get("/v1/models").json()["data"][0]["id"]
        got = chat(site, name, prompt, max_tokens=8).json()
    assert {citation["doc_id"] for citation in got["citations"]} == {"beta"}


@pytest.mark.parametrize("unit", ["<context>x</context>", "<context", "following context ", ". . "])
def test_the_longest_body_does_not_hold_the_server_up(engine: RagEngine, unit: str) -> None:
    """It takes a second or two, and at the square of its length a minute."""
    started = time.perf_counter()
    engine.resolver.prompt([{"role": "system", "content": unit * (2**18 // len(unit))}, *user("Who?")])
    assert time.perf_counter() - started < 30
