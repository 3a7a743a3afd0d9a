"""The Ray Serve example: replicas are killed and the corpus is changed under load, and every answer is right."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_campaign import processes
from serving import running, wait_for

from pdllm_rag import InputDocument, RagEngine, load_model

pytest.importorskip("ray")
QUESTIONS = [f"How many kilograms does buoy {number} weigh?" for number in range(6)]
PATIENCE = 180  # seconds; a replica starts in ten
REPLICA = "ray::ServeReplica:answers:Answers"


@pytest.fixture
def expected(tmp_path: Path, tiny_model_path: Path) -> dict[str, dict[str, str]]:
    """Two corpora, and what one engine answers over each."""
    answers: dict[str, dict[str, str]] = {}
    for name, weight in (("kb-1", 310), ("kb-2", 550)):
        with RagEngine.open(tmp_path / name, load_model(str(tiny_model_path)), chunk_len=64) as engine:
            engine.prefill([InputDocument(f"{n}", f"Buoy {n} weighs {n}{weight} kilograms.", "x") for n in range(6)])
            answers[engine.store.path] = {q: engine.answer(q, max_new_tokens=8).as_dict()["answer"] for q in QUESTIONS}
    return answers


class Clients:
    """Ask all the time and keep what comes back."""

    def __init__(self, url: str, n_clients: int) -> None:
        self.seen: list[tuple[int, str, dict[str, Any]]] = []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(url, n)) for n in range(n_clients)]

    def _ask(self, url: str, number: int) -> None:
        generator = random.Random(number)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            while not self.stopped.is_set():
                question = generator.choice(QUESTIONS)
                response = client.post("/v1/qa", json={"question": question, "max_new_tokens": 8})
                self.seen.append((response.status_code, question, response.json()))


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    asking = Clients(url, 4)
    for thread in asking.threads:
        thread.start()
    try:
        yield asking
    finally:
        asking.stopped.set()
        for thread in asking.threads:
            thread.join()


@pytest.fixture
def app(ray_cluster: None) -> Iterator[Any]:  # noqa: ARG001  (the replicas live in it)
    """The example's module; what it has started is stopped."""
    path = Path(__file__).parent.parent / "examples" / "ray_serve" / "app.py"
    spec = importlib.util.spec_from_file_location("ray_serve_app", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.serve.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*")
def test_a_killed_replica_and_a_new_corpus_under_load_cost_retries_at_most(
    app: Any, expected: dict[str, dict[str, str]], tiny_model_path: Path
) -> None:
    first, second = expected
    options = {"n_replicas": 2, "n_cpus": 0.1}
    handle = app.deploy(first, str(tiny_model_path), **options)
    with running(app.make_door(handle, str(tiny_model_path), **options)) as url, clients(url) as asking:

        def n_answered() -> int:
            return sum(status == 200 for status, _, _ in asking.seen)

        wait_for(lambda: n_answered() > 10, PATIENCE)
        before = processes(REPLICA)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(now := processes(REPLICA)) == 2 and before[0] not in now, PATIENCE)
        n_before = n_answered()
        wait_for(lambda: n_answered() > n_before + 10, PATIENCE)
        assert httpx.put(f"{url}/corpus", json={"store": second}, timeout=PATIENCE, trust_env=False).status_code == 200
        n_seen = len(asking.seen)
        wait_for(lambda: len(asking.seen) > n_seen + 20, PATIENCE)
        refused = httpx.post(f"{url}/v1/qa", json={"question": "x " * 3000}, timeout=60, trust_env=False)
        assert (refused.status_code, "window" in refused.json()["error"]) == (422, True)
    assert set(Counter(status for status, _, _ in asking.seen)) <= {200, 503}
    answered = [(question, body) for status, question, body in asking.seen if status == 200]
    wrong = [body for question, body in answered if body["answer"] != expected[body["corpus"]][question]]
    assert not wrong
    assert {body["corpus"] for _, body in answered} == {first, second}
    assert {body["corpus"] for status, _, body in asking.seen[-8:] if status == 200} == {second}
    assert not [body for status, _, body in asking.seen if status == 503 and "ask again" not in body["error"]]
