"""`pdllm serve` as a process: how it starts, and that stopping or killing it loses nothing that was committed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import Pdllm, one_line
from pdllm_store import LMDBStore
from serving import KEY, wait_for

from pdllm_rag import InputDocument, LoadedModel, RagEngine, load_model

SENTENCE = "Buoy {0} stands in bay {0} and weighs {0} kilograms, which is {0} more than none."


class Served:
    """A server in a process of its own."""

    def __init__(self, store: Path, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "pdllm_rag.cli", "serve", "--store", store, "--model", model, "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment |= {"OMP_NUM_THREADS": "1", "PDLLM_API_KEY": KEY}
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        wait_for(lambda: self._port() or self.process.poll() is not None, 120)
        headers = {"Authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self._port()}", headers=headers, timeout=60, trust_env=False
        )

    def _port(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.said))
        return found[1] if found else ""

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said += iter(self.process.stderr)

    def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        self._listener.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.client.close()
        return status


@pytest.fixture
def start(tmp_path: Path, tiny_model_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def begin(*options: str) -> Served:
        started.append(Served(tmp_path / "kb", tiny_model_path, *options))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.end(signal.SIGKILL)


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(pdllm: Pdllm, filled: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = one_line(pdllm("serve", "--store", filled, "--model", "no such model", "--port", port))
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in told


def documents(first: int, n: int = 40) -> list[dict[str, Any]]:
    return [{"doc_id": f"d{i}", "text": f"{SENTENCE.format(i)} " * 6} for i in range(first, first + n)]


def test_it_says_where_it_serves_answers_and_ends_with_status_0(start: Callable[..., Served]) -> None:
    server = start()
    assert "kb with" in server.said[0]
    assert server.client.get("/health").json() == {"status": "ok"}
    assert httpx.get(server.client.base_url.join("/ready"), trust_env=False).status_code == 401
    assert server.client.get("/ready").status_code == 200
    assert server.end(signal.SIGTERM) == 0
    assert KEY not in "".join(server.said)
    assert "Traceback" not in "".join(server.said)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_stopped_or_killed_during_ingest_and_ask_it_loses_nothing_committed(
    start: Callable[..., Served], tiny_model: LoadedModel, tmp_path: Path, number: int, status: int
) -> None:
    server = start()
    job = server.client.post("/v1/documents", json={"documents": documents(0)}).json()["id"]
    wait_for(lambda: server.client.get(f"/v1/jobs/{job}").json()["state"] == "done")
    committed = {info["doc_id"] for info in server.client.get("/v1/documents").json()["documents"]}
    assert len(committed) == 40
    for first in range(40, 400, 40):
        server.client.post("/v1/documents", json={"documents": documents(first)})
    asked = {"question": "Buoy 3?", "stream": True}
    with contextlib.suppress(httpx.TransportError), server.client.stream("POST", "/v1/qa", json=asked) as response:
        next(response.iter_bytes())
        assert server.end(number) == status
    assert "Traceback" not in "".join(server.said)

    model = load_model(tiny_model.spec.name, dtype=tiny_model.backbone.dtype)
    with LMDBStore.open(tmp_path / "kb", create=False) as store, RagEngine.open(store, model) as engine:
        held = {info.doc_id: store.document(engine.fingerprint, info.doc_id).text for info in engine.documents()}
        assert committed <= set(held)
        assert all(text.count(f"Buoy {doc_id[1:]} ") == 6 for doc_id, text in held.items())
        assert store.verify().ok
        report = engine.prefill([InputDocument(e["doc_id"], e["text"], f"upload:{e['doc_id']}") for e in documents(0)])
        assert (report.unchanged, report.chunks_computed) == (40, 0)
        assert engine.answer("Buoy 3?").stats.chunks.candidates > 0


def test_two_servers_over_one_store_answer_alike_see_what_is_added_and_outlive_each_other(
    start: Callable[..., Served], pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    prefill = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path)
    assert pdllm(*prefill).status == 0
    servers = [start("--read-only"), start("--read-only")]

    def answers(question: str) -> list[dict[str, Any]]:
        asked = {"question": question, "max_new_tokens": 8, "k": 3}
        bodies = [server.client.post("/v1/qa", json=asked).raise_for_status().json() for server in servers]
        return [{key: body[key] for key in ("answer", "citations")} for body in bodies]

    one, other = answers("How heavy is the Gannet buoy?")
    assert one == other
    assert servers[0].client.post("/v1/documents", json={"documents": documents(0, 1)}).status_code == 403
    (folder / "added.md").write_text("The Kittiwake buoy weighs 550 kilograms.")
    assert pdllm(*prefill).status == 0  # another process writes meanwhile
    one, other = answers("How heavy is the Kittiwake buoy?")
    assert one == other
    assert "added.md" in {citation["doc_id"] for citation in one["citations"]}
    servers.pop(0).end(signal.SIGKILL)
    assert answers("How heavy is the Kittiwake buoy?") == [one]
