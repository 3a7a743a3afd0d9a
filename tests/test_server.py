"""Questions over HTTP: answers, streams, batches, the bound of the line, time limits and clients that leave."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pdllm_store import LMDBStore, MemoryStore
from serving import Site, served, wait_for
from test_engine import TEXTS

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.decoding import DecodeStep, StaticKVDecoder
from pdllm_rag.errors import NumericsError

SLOW = {"max_new_tokens": 400}  # 4 s or more from `slow_engine`


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    store = LMDBStore.open(tmp_path_factory.mktemp("served") / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, name, metadata={"kind": name[0]}) for name, text in TEXTS.items()])
        yield opened


@pytest.fixture(scope="module")
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine) as running:
        yield running


@pytest.fixture
def slow_engine(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[RagEngine]:
    """One token a step and a pause after each, so that an answer lasts while a test does something else."""
    steps = StaticKVDecoder.steps

    def with_pauses(self: StaticKVDecoder, requests: Any) -> Iterator[DecodeStep]:
        for step in steps(self, requests):
            time.sleep(0.01)
            yield step

    monkeypatch.setattr(StaticKVDecoder, "steps", with_pauses)
    options = AskOptions(threshold=1.0, score_window=float("inf"), abstain=False, candidates=4)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield opened


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is decoded before the block ends; the event tells that something would be."""
    reached, go_on, steps = threading.Event(), threading.Event(), StaticKVDecoder.steps

    def waiting(self: StaticKVDecoder, requests: Any) -> Iterator[DecodeStep]:
        reached.set()
        assert go_on.wait(60)
        yield from steps(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticKVDecoder, "steps", waiting)
        try:
            yield reached
        finally:
            go_on.set()


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    del result["stats"]["ms"], result["stats"]["model"]
    return result


def test_an_answer_is_the_object_of_ask_json_and_usage(site: Site, engine: RagEngine) -> None:
    got = without_times(site.ask("When does the boat sail?", k=2, max_new_tokens=8).json())
    usage = got.pop("usage")
    answer = engine.answer("When does the boat sail?", k=2, max_new_tokens=8)
    assert got == without_times(answer.as_dict())
    stats = answer.stats
    assert usage["prompt_tokens"] == stats.prompt_tokens + stats.context_tokens
    assert usage["completion_tokens"] == stats.tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": stats.cached_tokens}


def test_a_stream_tells_steps_and_text_and_ends_with_the_same_result(site: Site) -> None:
    whole = without_times(site.ask("boat", max_new_tokens=40).json())
    events = site.events("boat", max_new_tokens=40)
    assert events[-1][0] == "answer"
    assert without_times(events[-1][1]) == whole
    assert "".join(data["text"] for name, data in events if name == "text") == whole["answer"]
    canvas = [data for name, data in events if name == "canvas"]
    assert [data["nfe"] for data in canvas] == list(range(1, whole["stats"]["nfe"] + 1))
    rows = [row for data in canvas for row in data["rows"]]
    assert len(rows) == len(set(rows))
    assert all(len(data["rows"]) == len(data["pieces"]) == len(data["confidence"]) for data in canvas)


def test_filters_and_options_reach_the_engine(site: Site) -> None:
    answer = site.ask("boat", filter={"kind": "b"}, k=1).json()
    assert {citation["doc_id"] for citation in answer["citations"]} == {"beta"}
    assert site.ask("boat", decoder="vanilla").json()["stats"]["decoder"] == "vanilla"
    assert site.ask("boat", policy="joint").json()["stats"]["policy"] == "joint"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"question": ""}, "question"),
        ({"question": " \n"}, "question"),
        ({"question": 5}, "question"),
        ({"question": "x" * 8001}, "8,001"),
        ({"question": "boat", "k": 0}, "k"),
        ({"question": "boat", "k": 33}, "33"),
        ({"question": "boat", "k": True}, "k"),
        ({"question": "boat", "max_new_tokens": 513}, "513"),
        ({"question": "boat", "decoder": "magic"}, "static_kv"),
        ({"question": "boat", "policy": "magic"}, "joint"),
        ({"question": "boat", "policy": "joint", "decoder": "vanilla"}, "vanilla"),
        ({"question": "boat", "filter": {"a": {"b": 1}}}, "filter"),
        ({"question": "boat", "colour": "red"}, "colour"),
        ({}, "question"),
        ({"question": "boat", "decoder": "block_causal"}, "does not run on"),
    ],
)
def test_a_bad_question_is_refused_with_a_reason(site: Site, fields: dict[str, Any], word: str) -> None:
    response = site.client.post("/v1/qa", json=fields)
    assert response.status_code == 422
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert word in error["message"]


def test_an_empty_store_says_so(tiny_model: LoadedModel, tmp_path: Path) -> None:
    with RagEngine.open(tmp_path / "kb", tiny_model) as empty, served(empty) as site:
        for stream in (False, True):
            response = site.ask("boat", stream=stream)
            assert response.status_code == 409
            assert response.json()["error"]["code"] == "no_documents"
            assert str(tmp_path) not in response.text


def test_questions_that_wait_together_are_answered_in_one_batch_each_with_its_own(slow_engine: RagEngine) -> None:
    questions = [f"{word} {i}?" for i in range(3) for word in ("boat", "train", "kites")]
    expected = {question: slow_engine.answer(question).text for question in questions}
    with served(slow_engine, max_batch=4) as site:
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            with held_back() as reached:
                pool.submit(site.ask, "boat", max_new_tokens=4)
                assert reached.wait(60)
                answers = [pool.submit(site.ask, question) for question in questions]
                wait_for(lambda: site.metric("pdllm_queue_depth") == 9)
            told = [future.result().json()["answer"] for future in answers]
        assert dict(zip(questions, told, strict=True)) == expected
        assert site.metric("pdllm_batch_questions_count") == 4  # one alone, then 4, 4 and 1
        assert site.metric("pdllm_batch_questions_sum") == 10


def test_a_full_line_is_refused_with_the_time_to_come_again(slow_engine: RagEngine) -> None:
    with served(slow_engine, max_batch=1, max_waiting=2) as site:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            with held_back() as reached:
                running = pool.submit(site.ask, "boat", max_new_tokens=4)
                assert reached.wait(60)
                rest = [pool.submit(site.ask, f"train {i}", max_new_tokens=4) for i in range(5)]
                wait_for(lambda: sum(future.done() for future in rest) == 3)
            codes = sorted(future.result().status_code for future in rest)
            refused = next(future.result() for future in rest if future.result().status_code == 429)
            assert running.result().status_code == 200
        assert codes == [200, 200, 429, 429, 429]
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_decoding(slow_engine: RagEngine, stream: bool) -> None:
    with served(slow_engine) as site:
        with httpx.Client(base_url=site.url, trust_env=False) as client:
            if stream:
                with client.stream("POST", "/v1/qa", json={"question": "boat", "stream": True, **SLOW}) as response:
                    next(response.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/qa", json={"question": "boat", **SLOW}, timeout=0.3)
        wait_for(lambda: site.metric("pdllm_questions_running") == 0)
        assert site.metric("pdllm_nfe_total") == 0  # it was never answered
        assert site.ask("train").status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(slow_engine: RagEngine) -> None:
    with served(slow_engine, request_seconds=0.3) as site:
        response = site.ask("boat", **SLOW)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        events = site.events("boat", **SLOW)
        assert (events[-1][0], events[-1][1]["error"]["code"]) == ("error", "timeout")
        wait_for(lambda: site.metric("pdllm_questions_running") == 0)


def test_a_batch_that_fails_fails_its_questions_and_the_worker_goes_on(
    slow_engine: RagEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(slow_engine) as site:
        for error, status in ((NumericsError("secret words"), 500), (ZeroDivisionError("secret words"), 500)):
            with monkeypatch.context() as patch:

                def broken(*_: Any, error: Exception = error) -> Any:
                    raise error

                patch.setattr(StaticKVDecoder, "steps", broken)
                response = site.ask("boat")
            assert response.status_code == status
            assert "secret" not in response.text
            assert type(error).__name__ in response.text
        assert site.ask("boat").status_code == 200
    assert "ZeroDivisionError" in caplog.text


def test_a_server_that_stops_ends_what_runs_and_waits(slow_engine: RagEngine) -> None:
    before = set(threading.enumerate())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with served(slow_engine, max_batch=1) as site:
            running = pool.submit(site.events, "boat", **SLOW, k=1)
            wait_for(lambda: site.metric("pdllm_questions_running") == 1)
        with pytest.raises(httpx.TransportError):
            running.result(timeout=30)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("pdllm-")]


def test_health_answers_at_once_while_questions_run(slow_engine: RagEngine) -> None:
    with served(slow_engine) as site, concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(site.ask, f"boat {i}", max_new_tokens=40) for i in range(8)]
        n_asked = 0
        while not all(future.done() for future in running):
            assert site.client.get("/health").json() == {"status": "ok"}
            n_asked += 1
            time.sleep(0.02)
        assert n_asked > 3
        assert all(future.result().status_code == 200 for future in running)


def test_metrics_count_questions_tokens_steps_and_chunks(engine: RagEngine) -> None:
    with served(engine) as site:
        stats = site.ask("boat", k=2).json()["stats"]
        site.ask("")
        assert site.metric('pdllm_requests_total{method="POST",route="/v1/qa",status="200"}') == 1
        assert site.metric('pdllm_requests_total{method="POST",route="/v1/qa",status="422"}') == 1
        assert site.metric("pdllm_nfe_total") == stats["nfe"]
        assert site.metric('pdllm_tokens_total{kind="context"}') == stats["context_tokens"]
        assert site.metric('pdllm_tokens_total{kind="answer"}') == stats["tokens"]
        assert site.metric('pdllm_chunks_total{result="hit"}') == stats["chunks"]["hit"] == 2
        assert site.metric("pdllm_ttft_seconds_count") == 1
        for phase in ("retrieval", "load", "decode"):
            assert site.metric(f'pdllm_phase_seconds_count{{phase="{phase}"}}') == 1
        assert site.metric('pdllm_store_bytes{kind="used"}') > 0
        assert site.metric("pdllm_queue_depth") == 0
        assert "pdllm_store_corrupt_total 0.0" in site.client.get("/metrics").text


def test_ready_and_health_tell_the_state(site: Site, engine: RagEngine) -> None:
    assert site.client.get("/health").json() == {"status": "ok"}
    assert site.client.get("/ready").json() == {"status": "ready", "model": Path(engine.model.spec.name).name}
