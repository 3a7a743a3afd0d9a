"""A server in this process, on a real socket, for tests to ask over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn

from pdllm_rag import RagEngine
from pdllm_rag.server import ServerSettings, create_app

KEY = "correct-horse-battery"


class Site:
    """A running server and a client of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        """POST /v1/qa."""
        return self.client.post("/v1/qa", json={"question": question, **fields})

    def events(self, question: str, **fields: Any) -> list[tuple[str, Any]]:
        """The server-sent events of a streamed question."""
        response = self.ask(question, stream=True, **fields)
        assert response.status_code == 200, response.text
        return [parsed(block) for block in response.text.strip().split("\n\n")]

    def done(self, job_id: str) -> dict[str, Any]:
        """A job when it has ended."""
        job: dict[str, Any] = {}
        wait_for(lambda: job.update(self.client.get(f"/v1/jobs/{job_id}").json()) or job["state"] not in ACTIVE)
        return job

    def add(self, *documents: tuple[str, str]) -> dict[str, Any]:
        """Bring texts in, to the end of their job."""
        given = [{"doc_id": doc_id, "text": text} for doc_id, text in documents]
        response = self.client.post("/v1/documents", json={"documents": given})
        assert response.status_code == 202, response.text
        return self.done(response.json()["id"])

    def metric(self, line: str) -> float:
        """A figure of /metrics by its name and labels; 0 where it is not there."""
        found = [row for row in self.client.get("/metrics").text.splitlines() if row.startswith(f"{line} ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


ACTIVE = ("queued", "running")


def parsed(block: str) -> tuple[str, Any]:
    """Name and data of one event."""
    fields = dict(line.split(": ", 1) for line in block.splitlines())
    return fields.get("event", "message"), fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])


def wait_for(reached: Callable[[], object], seconds: float = 60) -> None:
    """Until something is so; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve an application while the block runs; its address."""
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


@contextlib.contextmanager
def served(engine: RagEngine, **settings: Any) -> Iterator[Site]:
    """Serve an engine while the block runs."""
    with running(create_app(engine, ServerSettings(**settings))) as url:
        site = Site(url)
        with site.client:
            yield site
