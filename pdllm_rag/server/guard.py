"""What every request passes before a route sees it, and every answer behind it.

In this order: the Host header (DNS rebinding), the Origin of what changes something (other sites' pages), the key, the
size of the body, before any of it is parsed. Answers get their headers here, and are counted and logged: method, route
template, status and time, nothing that a client wrote.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdllm_rag.server.failures import ApiError, as_api_error
from pdllm_rag.server.metrics import Metrics
from pdllm_rag.server.settings import ServerSettings

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/", "/docs")  # and the page's own files: what needs no key shows no data
OPEN_PREFIX = "/static/"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
METHODS = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
GONE = 499  # in logs and metrics: the client left before its answer


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._keys = settings.key_digests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def guarded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _complete(MutableHeaders(scope=message), is_private=not _is_open(scope))
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limited(scope, receive), guarded_send)
        except ApiError as error:
            await error.response(_ASK_FOR_KEY if error.status == 401 else None)(scope, receive, guarded_send)
        except ClientDisconnect:
            status = GONE
        except Exception as error:
            if status:
                raise  # the answer has begun: the server breaks the connection off
            await as_api_error(error).response()(scope, receive, guarded_send)
        finally:
            self._note(scope, status or GONE, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        """Refuse what is not to reach a route."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._settings.admits_host(host):
            raise ApiError(421, "the Host header names another server; see allowed_hosts (--allow-host)", "wrong_host")
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers, host)
        if self._keys and not _is_open(scope) and not self._has_key(headers.get("authorization", "")):
            raise ApiError(401, "this needs a key: send it as `Authorization: Bearer KEY`", "invalid_api_key")
        length = headers.get("content-length")
        limit = self._body_limit(scope, headers)
        if length is not None and not (length.isdecimal() and len(length) < 16 and int(length) <= limit):
            raise _too_large(limit)

    def _check_origin(self, headers: Headers, host: str) -> None:
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise ApiError(403, "a page of another site sent this", "wrong_origin")
        elif origin not in self._settings.cors_origins and urlsplit(origin).netloc != host:
            message = "a page of another origin sent this; see cors_origins (--cors-origin)"
            raise ApiError(403, message, "wrong_origin")

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        equal = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, whichever fits
        return scheme.lower() == "bearer" and any(equal)

    def _body_limit(self, scope: Scope, headers: Headers) -> int:
        if scope["path"] != "/v1/documents":
            return self._settings.max_question_bytes
        is_form = headers.get("content-type", "").lower().startswith("multipart/")
        return self._settings.max_upload_bytes if is_form else self._settings.max_json_bytes

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, ending a body that grows beyond its limit without having said so."""
        limit = self._body_limit(scope, Headers(scope=scope))
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > limit:
                error = _too_large(limit)
                raise HTTPException(error.status, str(error))  # the one kind that the framework hands on from here
            return message

        return counted

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "(none)")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        logger.info("%s %s %d %.0f ms", method, route, status, seconds * 1000)


_ASK_FOR_KEY = {"WWW-Authenticate": "Bearer"}


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit:,} bytes", "too_large")


def _complete(headers: MutableHeaders, *, is_private: bool) -> None:
    """Add what every answer carries."""
    for name, value in HEADERS.items():
        headers[name] = value
    is_page = headers.get("content-type", "").startswith("text/html")
    headers["Content-Security-Policy"] = PAGE_POLICY if is_page else DATA_POLICY
    headers.setdefault("Cache-Control", "no-store" if is_private else "no-cache")
