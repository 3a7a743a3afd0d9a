"""Many clients at once, each asking for its own code word: the short form is a test, the long form this script.

    python tests/server_load.py --clients 32 --seconds 300 --out docs/numbers/server_load.json

starts `pdllm serve` over a store of its own with the bundled model, at batch 8 and for a fifth of the time at batch 1,
and writes what happened. Everything stays on this machine. `control` is the same probe of a process that does nothing
but answer: what the machine itself makes a request wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "kelp", "larch")
HEALTH_SECONDS = 0.05  # between two probes


def code_word(client: int) -> str:
    """A word that no other client has."""
    return f"{WORDS[client % len(WORDS)]}{client}"


def documents(n_clients: int) -> list[dict[str, str]]:
    """One for each client."""
    texts = [f"The code word of station {i} is {code_word(i)}. Station {i} lies by the sea." for i in range(n_clients)]
    return [{"doc_id": f"station-{i}", "text": text} for i, text in enumerate(texts)]


def question(client: int) -> dict[str, Any]:
    """What a client asks, of its own document."""
    asked = f"What is the code word of station {client}?"
    return {"question": asked, "filter": {"doc_id": f"station-{client}"}, "max_new_tokens": 16}


@dataclass
class Result:
    """What the clients saw. Times in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of answered questions
    health: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)  # the same, of a process that does nothing else
    rss_mb: list[float] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # answers that hold what is another client's
    n_own: int = 0  # answers that hold the client's own code word
    answers: dict[int, set[str]] = field(default_factory=dict)
    elapsed: float = 0.0

    def note(self, client: int, n_clients: int, answer: dict[str, Any]) -> None:
        """Take in one answer."""
        text = answer["answer"]
        told = {text, *(citation["quote"] for citation in answer["citations"])}
        foreign = {code_word(other) for other in range(n_clients)} - {code_word(client)}
        words = {word.strip(".,") for part in told for word in part.split()}
        sources = {citation["doc_id"] for citation in answer["citations"]}
        if words & foreign or sources - {f"station-{client}"}:
            self.mixed.append(f"client {client} got {text!r} from {sources}")
        self.n_own += code_word(client) in text
        self.answers.setdefault(client, set()).add(text)

    def summary(self) -> dict[str, Any]:
        """Figures of a run."""
        took = sorted(self.seconds)
        return {
            "seconds": round(self.elapsed, 1),
            "statuses": {str(status): n for status, n in sorted(self.statuses.items())},
            "questions_per_s": round(len(took) / self.elapsed, 3),
            "seconds_median": round(statistics.median(took), 3),
            "seconds_p95": round(took[int(0.95 * (len(took) - 1))], 3),
            "health_ms": waits(self.health),
            "control_ms": waits(self.control),
            "rss_mb": self.rss_mb,
            "mixed_answers": len(self.mixed),
            "answers_with_their_code_word": self.n_own,
        }


def waits(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds that probes took."""
    ms = sorted(1000 * value for value in seconds)
    if not ms:
        return {"probes": 0}
    quantiles = {f"p{share}": round(ms[int(share / 100 * (len(ms) - 1))], 1) for share in (50, 99)}
    return {"probes": len(ms), **quantiles, "max": round(ms[-1], 1), "above_200": sum(value > 200 for value in ms)}


async def load(
    url: str, *, n_clients: int, seconds: float, control: str | None = None, pid: int | None = None
) -> Result:
    """Let clients ask, one question after the other each, and probe health all the while.

    Args:
        control: address of another process, which is probed as well.
        pid: process whose memory is read thirty times.
    """
    result = Result()
    started = time.perf_counter()
    limits = httpx.Limits(max_connections=n_clients + 2)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:

        async def ask(client: int) -> None:
            while time.perf_counter() - started < seconds:
                begun = time.perf_counter()
                response = await http.post("/v1/qa", json=question(client))
                result.statuses[response.status_code] += 1
                if response.status_code == 200:
                    result.seconds.append(time.perf_counter() - begun)
                    result.note(client, n_clients, response.json())
                elif response.status_code == 429:
                    await asyncio.sleep(min(2.0, float(response.headers["Retry-After"])))

        async def probe(address: str, took: list[float]) -> None:
            while True:
                begun = time.perf_counter()
                (await http.get(address)).raise_for_status()
                took.append(time.perf_counter() - begun)
                await asyncio.sleep(HEALTH_SECONDS)

        async def weigh(process: int) -> None:
            while True:
                result.rss_mb.append(rss_mb(process))
                await asyncio.sleep(seconds / 30)

        watching = [asyncio.create_task(probe("/health", result.health))]
        watching += [asyncio.create_task(probe(control, result.control))] if control else []
        watching += [asyncio.create_task(weigh(pid))] if pid else []
        await asyncio.gather(*(ask(client) for client in range(n_clients)))
        for task in watching:
            assert not task.done(), task.exception()  # every probe was answered
            task.cancel()
    result.elapsed = time.perf_counter() - started
    return result


def rss_mb(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def fill(url: str, n_clients: int) -> None:
    """Bring the documents in."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        job = http.post("/v1/documents", json={"documents": documents(n_clients)}).raise_for_status().json()
        while job["state"] in ("queued", "running"):
            time.sleep(0.2)
            job = http.get(f"/v1/jobs/{job['id']}").json()
        assert job["state"] == "done", job


def measure(store: str, *, max_batch: int, n_clients: int, seconds: float) -> dict[str, Any]:
    """One server process under load."""
    command = [sys.executable, "-m", "pdllm_rag.cli", "serve", "--store", store, "--port", "0"]
    environment = {**os.environ, "PDLLM_MAX_WAITING": "20"}
    server = subprocess.Popen(
        [*command, "--max-batch", str(max_batch)], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        url = "http://" + line.partition("http://")[2].split()[0]
        fill(url, n_clients)
        asyncio.run(load(url, n_clients=n_clients, seconds=min(20.0, seconds / 5)))  # warm: pools and allocators fill
        with idle_server() as control:
            result = asyncio.run(load(url, n_clients=n_clients, seconds=seconds, control=control, pid=server.pid))
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert not result.mixed, result.mixed[:5]
    return {"max_batch": max_batch, **result.summary()}


@contextmanager
def idle_server() -> Iterator[str]:
    """A process that answers and does nothing else; its address."""
    code = (
        "import http.server as h\n"
        "class Idle(h.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "s = h.ThreadingHTTPServer(('127.0.0.1', 0), Idle); print(s.server_port, flush=True); s.serve_forever()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.terminate()
        process.wait(timeout=60)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "kb")
        runs = [
            measure(store, max_batch=size, n_clients=args.clients, seconds=seconds)
            for size, seconds in ((8, args.seconds), (1, args.seconds / 5))
        ]
    record = {
        "command": f"python tests/server_load.py --clients {args.clients} --seconds {args.seconds:g}",
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "load_before": os.getloadavg()[0]},
        "runs": runs,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
