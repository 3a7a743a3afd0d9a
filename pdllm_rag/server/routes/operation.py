"""For whoever runs the server: health, readiness, metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from pdllm_rag.server.failures import ApiError
from pdllm_rag.server.metrics import CONTENT_TYPE
from pdllm_rag.server.services import Services


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        """Open to everybody."""
        return {"status": "ok"}

    @routes.get("/ready", summary="Whether questions are answered")
    async def ready() -> dict[str, str]:
        """503 while the server is stopping, or if its worker has died."""
        if not services.worker.is_alive:
            raise ApiError(503, "the server is stopping", "stopping", retry_after=5)
        return {"status": "ready", "model": services.model_name}

    @routes.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def metrics() -> Response:
        """Text format 0.0.4."""
        page = await asyncio.to_thread(services.metrics.page)
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    return routes
