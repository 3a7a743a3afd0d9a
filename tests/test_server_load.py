"""Many clients at once, and many that leave. The long form of the first is the script `server_load.py`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pdllm_store import LMDBStore
from server_load import documents, load, question
from serving import Site, served, wait_for

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine

N_CLIENTS = 32


@pytest.fixture
def engine(tiny_model: LoadedModel, tmp_path: Path) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.3, score_window=float("inf"), abstain=False)
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(entry["doc_id"], entry["text"], "test") for entry in documents(N_CLIENTS)])
        yield opened


@pytest.fixture
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine, max_waiting=16, max_batch=8) as running:
        yield running


def test_under_load_there_are_answers_and_honest_refusals_and_each_client_gets_its_own(
    site: Site, engine: RagEngine
) -> None:
    alone = {}
    for client in range(N_CLIENTS):
        asked = question(client)
        alone[client] = {engine.answer(asked.pop("question"), **asked).text}
    result = asyncio.run(load(site.url, n_clients=N_CLIENTS, seconds=5))
    assert set(result.statuses) <= {200, 429}
    assert result.statuses[200] >= N_CLIENTS / 2
    assert result.mixed == []
    assert {client: texts for client, texts in alone.items() if client in result.answers} == result.answers
    assert site.metric("pdllm_batch_questions_count") < result.statuses[200]  # some were answered together
    assert len(result.health) > 0


def test_clients_that_leave_after_the_first_event_leave_nothing_behind(tiny_model: LoadedModel, tmp_path: Path) -> None:
    options = AskOptions(threshold=1.0, score_window=float("inf"), abstain=False)
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64, options=options) as engine:
        engine.prefill([InputDocument(entry["doc_id"], entry["text"], "test") for entry in documents(4)])
        with served(engine, max_waiting=100, max_batch=16) as site:
            expected = site.ask("station 1", max_new_tokens=8).json()["answer"]
            n_answered = site.metric("pdllm_nfe_total")
            before = {thread.name for thread in threading.enumerate()}

            async def leave(http: httpx.AsyncClient, number: int) -> int:
                asked = {"question": f"station {number % 4}", "max_new_tokens": 500, "stream": True}
                async with http.stream("POST", "/v1/qa", json=asked) as response:
                    await anext(response.aiter_bytes())
                    return response.status_code

            async def all_leave() -> list[int]:
                limits = httpx.Limits(max_connections=100)
                async with httpx.AsyncClient(base_url=site.url, timeout=120, limits=limits, trust_env=False) as http:
                    return await asyncio.gather(*(leave(http, number) for number in range(100)))

            assert asyncio.run(all_leave()) == [200] * 100
            wait_for(lambda: site.metric("pdllm_questions_running") + site.metric("pdllm_queue_depth") == 0)
            assert site.ask("station 1", max_new_tokens=8).json()["answer"] == expected
            assert site.metric("pdllm_nfe_total") == 2 * n_answered  # not one of the hundred was decoded to its end
            new = {thread.name for thread in threading.enumerate()} - before
            assert not [name for name in new if not name.startswith(("AnyIO", "asyncio"))]  # bounded pools of the loop
            assert slots_in_use(store.path) == []


def slots_in_use(path: str) -> list[str]:
    """Lines of LMDB's reader table that hold a transaction open, as another process sees them."""
    code = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True, max_dbs=16).readers())"
    table = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
    return [line for line in table.splitlines() if re.fullmatch(r"\s*\d+\s+\w+\s+\d+\s*", line)]
