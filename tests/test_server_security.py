"""Who gets in, what is refused before it is parsed, and what never leaves: keys, paths, words in logs."""

from __future__ import annotations

import ast
import hmac
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import Pdllm, one_line
from pdllm_store import MemoryStore
from pydantic import SecretStr
from serving import KEY, Site, served, wait_for
from test_engine import TEXTS

from pdllm_rag import InputDocument, LoadedModel, RagEngine
from pdllm_rag.server import ServerSettings, create_app, guard
from pdllm_rag.server.settings import LEAST_KEY_CHARS

ROUTES = [
    ("POST", "/v1/qa"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/documents/alpha"),
    ("DELETE", "/v1/documents/alpha"),
    ("GET", "/v1/jobs/x"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
]
OTHER_SITE = "https://evil.example"


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64) as opened:
        opened.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield opened


@pytest.fixture(scope="module")
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine, cors_origins=("https://app.example",), allowed_hosts=("qa.example",)) as running:
        yield running


@pytest.fixture(scope="module")
def locked(engine: RagEngine) -> Iterator[Site]:
    with served(engine, api_key=KEY) as running:
        yield running


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"]
)
def test_every_route_but_health_wants_the_key(locked: Site, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    response = locked.client.request(method, path, headers=headers, content=b"{}")
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_the_list_of_routes_above_is_whole(engine: RagEngine) -> None:
    schema = create_app(engine).openapi()
    served_routes = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    listed = {(method, path.replace("alpha", "{doc_id}").replace("/x", "/{job_id}")) for method, path in ROUTES}
    assert served_routes - {("GET", "/health")} == listed - {("GET", "/openapi.json")}


def test_the_key_opens_and_health_and_the_page_need_none(locked: Site) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.get("/v1/documents/alpha", headers=headers).json()["text"] == TEXTS["alpha"]
    for path in ("/health", "/", "/docs", "/static/page.css"):
        assert locked.client.get(path).status_code == 200


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key is compared by ==, and a fitting first key does not end the comparison."""
    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    file = tmp_path / "keys"
    file.write_text("another-key-of-some-length\nand-one-more-key-here\n")
    settings = ServerSettings(api_key=SecretStr(KEY), api_key_file=file)
    checked = guard.Guard(None, settings, None)  # type: ignore[arg-type]
    assert checked._has_key(f"Bearer {KEY}")
    assert len(compared) == 3
    assert all(len(given) == len(known) == 32 for given, known in compared)
    tree = ast.parse(Path(guard.__file__).read_text())
    inside = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_has_key")
    equalities = [n for n in ast.walk(inside) if isinstance(n, ast.Compare)]
    assert [ast.unparse(n.left) for n in equalities] == ["scheme.lower()"]


@pytest.mark.parametrize("key", ["", "short", "with a blank in the middle", "x" * (LEAST_KEY_CHARS - 1), "ключ" * 8])
def test_a_key_that_is_none_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="openssl rand") as refusal:
        ServerSettings(api_key=SecretStr(key)).key_digests()
    assert not key or key not in str(refusal.value)
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(ValueError, match="empty"):
        ServerSettings(api_key_file=tmp_path / "keys").key_digests()


def test_a_key_shows_in_no_representation() -> None:
    assert KEY not in repr(ServerSettings(api_key=SecretStr(KEY)))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_KEY": KEY, "MAX_BATCH": "3", "ALLOWED_HOSTS": "a.example, b.example", "PORT": "0"}.items():
        monkeypatch.setenv(f"PDLLM_{name}", value)
    settings = ServerSettings()
    assert (settings.max_batch, settings.allowed_hosts, settings.port) == (3, ("a.example", "b.example"), 0)
    assert len(settings.key_digests()) == 1


# -- where it listens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "qa.example"])
def test_a_public_address_needs_a_key(host: str, engine: RagEngine, pdllm: Pdllm, filled: Path) -> None:
    with pytest.raises(ValueError, match="no API key"):
        create_app(engine, ServerSettings(host=host))
    create_app(engine, ServerSettings(host=host, api_key=SecretStr(KEY)))
    create_app(engine, ServerSettings(host=host, without_key=True))
    assert "--without-key" in one_line(pdllm("serve", "--store", filled, "--host", host))


def test_the_default_is_this_machine_only() -> None:
    assert ServerSettings().host == "127.0.0.1"
    assert ServerSettings().is_loopback


def test_there_is_no_option_that_takes_a_key_itself(pdllm: Pdllm, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pdllm("serve", "--store", "kb", "--api-key", KEY)
    assert "--api-key" in capsys.readouterr().err


# -- other sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:8000", 200), ("qa.example", 200), ("QA.example.:80", 200),
        ("evil.example", 421), ("evil.example:8000", 421), ("127.0.0.1.evil.example", 421), ("8.8.8.8", 421), ("", 421),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/v1/documents", "/"])
def test_a_foreign_host_header_is_refused(site: Site, host: str, status: int, path: str) -> None:
    """DNS rebinding: a name of the attacker's that leads to this machine."""
    assert site.client.get(path, headers={"Host": host}).status_code == status


def test_on_a_public_address_any_address_is_admitted_but_no_unknown_name() -> None:
    settings = ServerSettings(host="0.0.0.0", allowed_hosts=("qa.example",))
    assert [settings.admits_host(host) for host in ("10.0.0.7:8000", "qa.example", "evil.example")] == [1, 1, 0]
    assert ServerSettings(allowed_hosts=("*",)).admits_host("whatever.example")


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({"Origin": "SELF"}, True),
        ({"Origin": "https://app.example"}, True),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": OTHER_SITE}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "https://app.example.evil.example"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
    ],
)
def test_another_sites_page_changes_nothing(site: Site, headers: dict[str, str], is_let_in: bool) -> None:
    given = {name: site.url if value == "SELF" else value for name, value in headers.items()}
    upload = site.client.post("/v1/documents", files={"file": ("x.bin", b"\0")}, headers=given)
    deletion = site.client.delete("/v1/documents/none", headers=given)
    assert (upload.status_code, deletion.status_code) == ((422, 404) if is_let_in else (403, 403))


def test_a_preflight_is_answered_for_listed_origins_only_and_needs_no_key(engine: RagEngine) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with served(engine, api_key=KEY, cors_origins=("https://app.example",), max_waiting=1) as site:
        allowed = site.client.options("/v1/qa", headers={"Origin": "https://app.example", **asked})
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://app.example"
        refused = site.client.options("/v1/qa", headers={"Origin": OTHER_SITE, **asked})
        assert refused.status_code == 400
        assert "Access-Control-Allow-Origin" not in refused.headers
        # errors too, or the page cannot read them
        for response in (
            site.client.post("/v1/qa", headers={"Origin": "https://app.example"}),
            site.client.post("/v1/qa", content=b"{", headers={"Origin": "https://app.example", **bearer()}),
            site.client.get("/nowhere", headers={"Origin": "https://app.example", **bearer()}),
        ):
            assert response.status_code in (401, 404, 422)
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert "Retry-After" in response.headers["Access-Control-Expose-Headers"]


def test_without_a_list_no_other_origin_may_read(engine: RagEngine) -> None:
    with served(engine) as site:
        response = site.client.get("/v1/documents", headers={"Origin": OTHER_SITE})
        assert not [name for name in response.headers if name.startswith("access-control")]


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


# -- bodies --------------------------------------------------------------------------------------------------


def sent_raw(site: Site, head: str, body: Iterator[bytes]) -> bytes:
    """What comes back on a plain socket, whatever the server reads of the body."""
    port = int(site.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode())
        try:
            for part in body:
                connection.sendall(part)
        except OSError:
            pass  # the server has closed the connection
        try:
            return connection.recv(65536)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(("path", "limit"), [("/v1/qa", 256 * 2**10), ("/v1/documents", 8 * 2**20)])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(site: Site, path: str, limit: int) -> None:
    head = f"POST {path} HTTP/1.1"
    answer = sent_raw(site, head, iter([f"Content-Length: {limit + 1}\r\n\r\n".encode()]))  # and no body at all
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent_raw(site, head, iter([b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n"])).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("path", ["/v1/qa", "/v1/chat/completions", "/v1/documents"])
def test_a_body_without_a_length_is_cut_off_at_the_limit(site: Site, path: str) -> None:
    def endless() -> Iterator[bytes]:
        yield b"Transfer-Encoding: chunked\r\n\r\n"
        for _ in range(1000):  # 64 MB at most; the limit is 8 MiB or less
            yield b"10000\r\n" + b" " * 0x10000 + b"\r\n"

    assert sent_raw(site, f"POST {path} HTTP/1.1", endless())[:12] in (b"HTTP/1.1 413", b"")


@pytest.mark.parametrize("path", ["/v1/qa", "/v1/chat/completions", "/v1/documents"])
@pytest.mark.parametrize("body", ["[" * 100_000, '{"a":' * 20_000, '{"question":' + "[" * 50_000 + "]" * 50_000 + "}"])
def test_deep_nesting_is_refused(site: Site, path: str, body: str) -> None:
    response = site.client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert site.client.get("/health").status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b"\xff\xfe", b"null", b"[]", b'{"question": "\\ud800"}'])
@pytest.mark.parametrize("path", ["/v1/qa", "/v1/chat/completions", "/v1/documents"])
def test_malformed_bodies_are_refused_in_the_envelope(site: Site, path: str, content: bytes) -> None:
    response = site.client.post(path, content=content, headers={"Content-Type": "application/json"})
    if b"ud800" in content and path == "/v1/qa":
        assert response.status_code in (200, 422)  # a lone surrogate is a sign that no vocabulary has
        return
    assert response.status_code == 422
    assert set(response.json()["error"]) == {"message", "type", "code", "param"}


def test_a_form_is_no_question(site: Site) -> None:
    response = site.client.post("/v1/qa", data={"question": "boat"})
    assert response.status_code in (415, 422)


# -- what leaves ---------------------------------------------------------------------------------------------


def test_every_answer_carries_the_secure_headers(site: Site) -> None:
    for path in ("/", "/docs", "/health", "/v1/documents", "/nowhere", "/static/nothing.js"):
        headers = site.client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy.replace("http-equiv", "")
    assert site.client.get("/v1/documents").headers["Cache-Control"] == "no-store"


def test_nothing_that_a_client_wrote_is_logged_at_info(locked: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = locked.client
    client.post("/v1/qa", json={"question": "whisperedwords boat"}, headers=bearer())
    client.post("/v1/qa", json={"question": 5, "whisperedwords": 1}, headers=bearer())
    client.get("/v1/documents/whisperedwords?start=1", headers=bearer())
    client.post("/v1/qa", json={}, headers={"Authorization": "Bearer whisperedwords"})
    documents = {"documents": [{"doc_id": "d", "text": "whisperedwords are written here."}]}
    job = client.post("/v1/documents", json=documents, headers=bearer()).json()
    jobs = f"/v1/jobs/{job['id']}"
    wait_for(lambda: client.get(jobs, headers=bearer()).json()["state"] == "done")
    client.delete("/v1/documents/d", headers=bearer())
    logged = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith(("pdllm", "uvicorn.error")))
    assert "POST /v1/qa 200" in logged
    assert "GET /v1/documents/{doc_id:path} 404" in logged
    assert "whisperedwords" not in logged
    assert KEY not in logged


def test_static_files_stay_in_their_folder(site: Site) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        response = httpx.get(httpx.URL(site.url).copy_with(raw_path=path.encode()), trust_env=False)
        assert response.status_code in (404, 405)


def test_an_unexpected_error_comes_in_the_envelope_without_its_words(
    engine: RagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("/secret/path")

    with served(engine) as site:
        monkeypatch.setattr(engine, "documents", broken)
        response = site.client.get("/v1/documents")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["X-Content-Type-Options"] == "nosniff"
