from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pdllm_rag import InputDocument, RagEngine

T = TypeVar("T")
DELAY = 0.2  # seconds; a loop that is blocked for so long misses heartbeats

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


@pytest.fixture(scope="session")
def place(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`store` and `model` of ten chunks in five documents."""
    folder = tmp_path_factory.mktemp("kb")
    texts = {
        name: f"The {name} boat sails at dawn from pier {i}. Its captain likes tea." for i, name in enumerate(NAMES)
    }
    with RagEngine.open(folder, str(tiny_model_path), chunk_len=40) as engine:
        documents = [InputDocument(n, text, f"{n}.txt", metadata={"colour": n[0]}) for n, text in texts.items()]
        assert engine.prefill(documents).chunks_computed == 10
    return {"store": str(folder), "model": str(tiny_model_path)}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes questions take `DELAY` seconds longer; options of an answer that takes many denoising steps."""
    stream, retrieve = RagEngine.stream, RagEngine.retrieve

    def slow_stream(self: RagEngine, *given: Any, **arguments: Any) -> Any:
        return delayed(stream(self, *given, **arguments))

    def delayed(events: Any) -> Any:
        time.sleep(DELAY)
        yield from events

    def slow_retrieve(self: RagEngine, *given: Any, **arguments: Any) -> Any:
        time.sleep(DELAY)
        return retrieve(self, *given, **arguments)

    monkeypatch.setattr(RagEngine, "stream", slow_stream)
    monkeypatch.setattr(RagEngine, "retrieve", slow_retrieve)
    return {"max_tokens": 16, "threshold": 1.0, "steps": 16, "k": 2, "candidates": 2}


@pytest.fixture
def cancels(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """The cancel events that engines were given, as they are given."""
    seen: list[threading.Event] = []
    stream = RagEngine.stream

    def recording(self: RagEngine, question: Any, **arguments: Any) -> Any:
        seen.append(arguments["cancel"])
        return stream(self, question, **arguments)

    monkeypatch.setattr(RagEngine, "stream", recording)
    return seen


async def with_heartbeat(work: Awaitable[T]) -> T:
    """The result of `work`, during which a task that sleeps for 10 ms at a time must never be late by 150 ms."""
    gaps: list[float] = []

    async def beat() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0.02)
    try:
        return await work
    finally:
        await asyncio.sleep(0.02)
        heart.cancel()
        assert max(gaps) < 0.15 < DELAY


@pytest.fixture
def heartbeat() -> Any:
    return with_heartbeat


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the asynchronous tests of LangChain's suites; a plugin for them would set its mode for all tests here."""
    if not asyncio.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
