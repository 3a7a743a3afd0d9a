"""The application: an engine behind routes, guarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from pdllm_rag.engine import RagEngine
from pdllm_rag.server import failures
from pdllm_rag.server.guard import Guard
from pdllm_rag.server.ingest import Ingest
from pdllm_rag.server.metrics import Metrics
from pdllm_rag.server.parsing import FileReader
from pdllm_rag.server.routes import chat, documents, operation, qa
from pdllm_rag.server.services import Services
from pdllm_rag.server.settings import ServerSettings
from pdllm_rag.server.worker import Worker

STATIC = Path(__file__).parent / "static"


def create_app(engine: RagEngine, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application over an engine, which stays its caller's to close, after the application's shutdown.

    Raises:
        ValueError: a public address without a key; OSError for the key file.
    """
    settings = settings or ServerSettings()
    settings.check_bind()
    services = _services(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.worker.start()
        services.ingest.start()
        yield
        for part in (services.worker, services.ingest, services.reader):
            await asyncio.to_thread(part.close)

    app = FastAPI(
        title="pdllm-rag", summary="Questions over your documents.", lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    failures.install(app)
    for module in (qa, chat, documents, operation):
        app.include_router(module.router(services))
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for path, name in (("/", "index.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _page(name), include_in_schema=False)
    app.add_middleware(Guard, settings=settings, metrics=services.metrics)
    if settings.cors_origins:  # outermost: errors carry its headers, and pre-flights need no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("Authorization", "Content-Type"),
            expose_headers=("Retry-After", "Location"),
        )
    return app


def _services(engine: RagEngine, settings: ServerSettings) -> Services:
    metrics = Metrics(engine.store.stats)
    worker = Worker(max_batch=settings.max_batch, max_waiting=settings.max_waiting, on_batch=metrics.batch.observe)
    ingest = Ingest(engine, max_jobs=settings.max_jobs)
    metrics.gauges = {
        "queue_depth": lambda: worker.n_waiting,
        "questions_running": lambda: worker.n_running,
        "jobs_waiting": lambda: ingest.n_waiting,
    }
    reader = FileReader(
        seconds=settings.parse_seconds,
        n_bytes=settings.parse_bytes,
        max_bytes=settings.max_file_bytes,
        max_chars=settings.max_document_chars,
    )
    return Services(engine, settings, worker, ingest, reader, metrics)


def _page(name: str) -> Callable[[], Awaitable[FileResponse]]:
    async def page() -> FileResponse:
        return FileResponse(STATIC / name)

    return page
