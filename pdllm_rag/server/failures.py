"""What goes wrong, as clients see it: a status, and OpenAI's envelope {"error": {message, type, code, param}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pdllm_store import (
    DocumentNotFoundError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StoreReadOnlyError,
)
from starlette.exceptions import HTTPException

from pdllm_rag.errors import ContextWindowError, GenerationCancelled, RequestError

logger = logging.getLogger(__name__)

NO_DOCUMENTS = "the store holds no documents of this model; add some with POST /v1/documents or `pdllm prefill`"


class ApiError(Exception):
    """An error as it is answered.

    Attributes:
        code: a word for programs.
        retry_after: seconds.
    """

    def __init__(
        self, status: int, message: str, code: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The envelope."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": self.param}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The whole answer."""
        more = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        return JSONResponse(self.body(), self.status, {**more, **(headers or {})})


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error that answering a question raised; paths of the host stay out of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationCancelled):
        return ApiError(503, "the server is stopping, or gave the question up; ask again", "cancelled", retry_after=1)
    if isinstance(error, ContextWindowError):
        return ApiError(422, str(error), "context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(422, str(error), "bad_question", param="question")
    if isinstance(error, (DocumentNotFoundError, StoreMismatchError)):
        return ApiError(409, NO_DOCUMENTS, "no_documents")
    if isinstance(error, StoreReadOnlyError):
        return ApiError(403, "the store was opened read-only; start the server without --read-only", "read_only")
    if isinstance(error, StoreFullError):
        return ApiError(507, "the store is full; delete documents or raise its cap", "store_full")
    logger.error("a request failed", exc_info=error)
    if isinstance(error, StoreError):
        return ApiError(503, "the store cannot be read now; the server's log says why", "store_error")
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says why", "internal_error")


def install(app: FastAPI) -> None:
    """Let every error that a route raises come in the envelope."""

    async def ours(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def of_framework(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, RecursionError):
            return ApiError(422, "the JSON is nested too deeply", "bad_request").response()
        code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "bad_request")
        return ApiError(error.status_code, str(error.detail), code).response(error.headers)

    async def of_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
        return ApiError(422, f"{place or 'body'}: {first['msg']}{more}", "bad_request", param=place or None).response()

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(RequestValidationError, of_validation)
