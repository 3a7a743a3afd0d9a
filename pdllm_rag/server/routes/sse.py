"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

# What a route that may answer with events tells of it in the API's description, beside JSON.
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "an answer, or its events"}
}
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def message(data: Any, event: str | None = None) -> bytes:
    """One event; `data` becomes JSON."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def stream(messages: AsyncIterator[bytes]) -> StreamingResponse:
    """The answer that sends them as they come."""
    return StreamingResponse(messages, media_type="text/event-stream", headers=HEADERS)
