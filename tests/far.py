"""S3 for tests: moto's server on the loopback, and a proxy before it that breaks answers on purpose and counts."""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pdllm_store import ChunkNotFoundError, ObjectChunkStore
from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTONLY",
    "AWS_SECRET_ACCESS_KEY": "nobody-may-read-this",
    "AWS_SESSION_TOKEN": "nor-this-token",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
FINGERPRINT = tiny_fingerprint()
SECRETS = ("AKIATESTONLY", "nobody-may-read-this", "nor-this-token")


class Moto(NamedTuple):
    """A server of S3 with one bucket."""

    port: int
    numbers: Iterator[int] = count()

    def new_url(self) -> str:
        """A place that nobody has used."""
        return f"s3://bucket/place-{next(self.numbers)}"


@contextmanager
def moto_server() -> Iterator[Moto]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        yield Moto(port)
    finally:
        server.stop()


class Answer(NamedTuple):
    """What a client gets."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut: bool = False  # the connection ends before the body does


Fault = Callable[[Callable[[], Answer]], Answer]  # takes what asks the real server


def refused(status: int, code: str) -> Fault:
    """An error in S3's form, which repeats credentials as the real ones do."""
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{SECRETS[0]}</AWSAccessKeyId><Token>{SECRETS[2]}</Token></Error>"
    return lambda _ask: Answer(status, [("Content-Type", "application/xml")], body.encode())


def lost_answer(ask: Callable[[], Answer]) -> Answer:
    """The server does what it was asked for, and nobody learns of it."""
    ask()
    return refused(503, "SlowDown")(ask)


def cut_short(ask: Callable[[], Answer]) -> Answer:
    answer = ask()
    return answer._replace(body=answer.body[: len(answer.body) // 2], cut=True)


def flipped(ask: Callable[[], Answer]) -> Answer:
    answer = ask()
    middle = len(answer.body) // 2
    return answer._replace(body=answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :])


class Proxy:
    """Hands requests on to a server, but those that a fault is set for.

    Attributes:
        faults: what happens to the next requests that match: (method, part of the path, how often, fault).
        without: headers that are not handed on.
        requests: by method; n_bytes: of the bodies that GETs of chunks were answered with.
    """

    def __init__(self, target: int, *, without: Sequence[str] = ()) -> None:
        self.faults: list[tuple[str, str, int, Fault]] = []
        self.requests: Counter[str] = Counter()
        self.n_bytes = 0
        self.without = without
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            log_message: ClassVar[Any] = lambda *_: None

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = proxy.answer(self, body, target)
                try:
                    self.send_response_only(answer.status)
                    for name, value in answer.headers:
                        self.send_header(name, value)
                    n_more = 1 if answer.cut else 0
                    if not any(name.lower() == "content-length" for name, _ in answer.headers):
                        self.send_header("Content-Length", str(len(answer.body) + n_more))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(answer.body)
                except OSError:  # the client has given up
                    self.close_connection = True
                if answer.cut:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def break_next(self, method: str, part: str, fault: Fault, *, times: int = 1) -> None:
        with self.lock:
            self.faults.append((method, part, times, fault))

    def answer(self, request: BaseHTTPRequestHandler, body: bytes, target: int) -> Answer:
        method, path = request.command, request.path

        def ask() -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", target)
            kept = {name: value for name, value in request.headers.items() if name.lower() not in self.without}
            connection.request(method, path, body, kept)
            found = connection.getresponse()
            headers = [(k, v) for k, v in found.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            answer = Answer(found.status, headers, found.read())
            connection.close()
            return answer

        fault: Fault | None = None
        with self.lock:
            self.requests[method] += 1
            for index, (wanted, part, times, found) in enumerate(self.faults):
                if wanted == method and part in path:
                    fault = found
                    self.faults[index : index + 1] = [(wanted, part, times - 1, found)] if times > 1 else []
                    break
        answer = ask() if fault is None else fault(ask)
        if method == "GET" and "/chunks/" in path:
            with self.lock:
                self.n_bytes += len(answer.body)
        return answer

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def doc_ids(store: ObjectChunkStore) -> list[str]:
    store.refresh()
    return [info.doc_id for info in store.documents(FINGERPRINT)]


def write(store: ObjectChunkStore, doc_id: str, seeds: Sequence[int]) -> bool:
    """Put and publish as a prefill does: chunks that others have deleted since this handle looked are put again."""
    items = [random_chunk(FINGERPRINT, seed=seed) for seed in seeds]
    document = make_document(doc_id, [meta for meta, _ in items])
    while True:
        store.put(FINGERPRINT, items)
        try:
            return store.add_document(FINGERPRINT, document)
        except ChunkNotFoundError:
            continue


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def objects(url: str) -> dict[str, bytes]:
    """Every object under a file URL, but for the lock."""
    folder = folder_of(url)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def make_old(url: str, seconds: float) -> None:
    for name in objects(url):
        os.utime(folder_of(url) / name, times=(time.time() - seconds,) * 2)
