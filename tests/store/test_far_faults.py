"""What a network and a service can do to a far store: a typed error that says what to do, or the right KV."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from far import SECRETS, Answer, Fault, Moto, Proxy, cut_short, flipped, lost_answer, refused
from pdllm_store import (
    ChunkId,
    ChunkKV,
    ChunkMeta,
    ObjectChunkStore,
    RecordDamagedError,
    StoreAccessError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
    TieredChunkStore,
    open_store,
)
from pdllm_store.published import chunk_name
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()
EXPIRED = refused(400, "ExpiredToken")
FORBIDDEN = refused(403, "AccessDenied")
BUSY = refused(503, "SlowDown")

Open = Callable[[], ObjectChunkStore]


@pytest.fixture
def proxy(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the server of S3; one of its faults ends whatever waits when the test does."""
    proxy = Proxy(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_TIMEOUT", "1s")
    yield proxy
    proxy.close()


@pytest.fixture(params=["object", "tiered"])
def open_far(proxy: Proxy, s3: Moto, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a store that another machine has filled with chunks 0 to 2, so that nothing of it is cached."""
    assert proxy
    url = s3.new_url()
    with ObjectChunkStore.open(url) as elsewhere:
        add_chunks(elsewhere, FINGERPRINT, "d", range(3))
    made: list[ObjectChunkStore] = []

    def open_one() -> ObjectChunkStore:
        cache = {} if request.param == "object" else {"cache": tmp_path / f"cache-{len(made)}"}
        made.append(open_store(url, retry_s=0.5, **cache))  # type: ignore[arg-type]
        return made[-1]

    yield open_one
    for store in made:
        store.close()


def chunk(seed: int) -> tuple[ChunkMeta, ChunkKV]:
    return random_chunk(FINGERPRINT, seed=seed)


IDS = [chunk(seed)[0].chunk_id for seed in range(3)]


def compute(asked: list[ChunkId]) -> Callable[[Sequence[ChunkMeta]], Iterator[list[tuple[ChunkMeta, ChunkKV]]]]:
    """Computes chunks 0 to 2 again, and notes which."""

    def recompute(metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        asked.extend(meta.chunk_id for meta in metas)
        yield [chunk(IDS.index(meta.chunk_id)) for meta in metas]

    return recompute


def assert_right(kv: dict[ChunkId, ChunkKV]) -> None:
    for seed, chunk_id in enumerate(IDS):
        assert torch.equal(kv[chunk_id].k, chunk(seed)[1].k)
        assert torch.equal(kv[chunk_id].v, chunk(seed)[1].v)


def assert_tells_no_secret(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    told = "".join(traceback.format_exception(error)) + caplog.text
    assert not [secret for secret in SECRETS if secret in told]


# -- what passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [BUSY, refused(500, "InternalError"), refused(429, "TooManyRequests"), cut_short])
def test_what_passes_is_tried_again(open_far: Open, proxy: Proxy, fault: Fault) -> None:
    store = open_far()
    proxy.break_next("GET", "/chunks/", fault, times=2)
    assert_right(store.fetch(IDS).kv)
    assert store.stats().recomputed == 0
    assert proxy.requests["GET"] >= 5
    proxy.break_next("PUT", "/chunks/", BUSY)
    proxy.break_next("PUT", "/segments/", BUSY)
    proxy.break_next("GET", "/store", BUSY)
    add_chunks(store, FINGERPRINT, "e", [7])
    assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["d", "e"]


def test_chunks_travel_side_by_side(open_far: Open, proxy: Proxy) -> None:
    store = open_far()
    together = threading.Barrier(len(IDS), timeout=20)

    def waiting(ask: Callable[[], Answer]) -> Answer:
        together.wait()  # until all of them are asked for
        return ask()

    proxy.break_next("GET", "/chunks/", waiting, times=len(IDS))
    assert_right(store.fetch(IDS).kv)
    proxy.break_next("PUT", "/chunks/", waiting, times=len(IDS))
    assert store.put(FINGERPRINT, [chunk(seed) for seed in (7, 8, 9)]) > 0


def test_a_write_whose_answer_does_not_come_is_repeated(open_far: Open, proxy: Proxy, s3: Moto) -> None:
    assert s3
    store = open_far()
    begun = time.monotonic()

    def too_late(ask: Callable[[], Answer]) -> Answer:
        answer = ask()
        time.sleep(1.5)
        return answer

    proxy.break_next("PUT", "/chunks/", too_late)
    add_chunks(store, FINGERPRINT, "e", [7])
    assert time.monotonic() - begun > 1  # it did time out
    assert torch.equal(store.load(chunk(7)[0].chunk_id).k, chunk(7)[1].k)


@pytest.mark.parametrize("fault", [BUSY, refused(500, "InternalError")])
def test_a_service_that_stays_away_is_an_error_and_never_another_answer(
    open_far: Open, proxy: Proxy, fault: Fault
) -> None:
    store = open_far()
    asked: list[ChunkId] = []
    store.recompute_with(FINGERPRINT, compute(asked))
    proxy.break_next("GET", "/chunks/", fault, times=1000)
    for read in (lambda: store.fetch(IDS), lambda: store.load(IDS[0])):
        with pytest.raises(StoreUnavailableError, match=r"50[03].*try again later"):
            read()
    assert asked == []  # a chunk that cannot be reached is not lost
    proxy.faults.clear()
    assert_right(store.fetch(IDS).kv)


def test_an_answer_that_does_not_come_is_an_error(open_far: Open, proxy: Proxy) -> None:
    store = open_far()
    released = threading.Event()

    def stalled(ask: Callable[[], Answer]) -> Answer:
        released.wait(20)
        return ask()

    proxy.break_next("GET", "/chunks/", stalled, times=1000)
    with pytest.raises(StoreUnavailableError, match=r"timed out.*try again later"):
        store.fetch(IDS)
    proxy.faults.clear()
    released.set()
    assert_right(store.fetch(IDS).kv)


def test_nobody_there_is_an_error(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailableError, match="no connection"):
        ObjectChunkStore.open(s3.new_url(), retry_s=0.1)


# -- who may not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [FORBIDDEN, EXPIRED, refused(401, "InvalidToken")])
def test_refused_credentials_are_told_at_once_and_never_repeated(
    open_far: Open, proxy: Proxy, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = open_far()
    asked: list[ChunkId] = []
    store.recompute_with(FINGERPRINT, compute(asked))
    (meta,) = add_chunks(store, FINGERPRINT, "e", [7])
    for method, part, action in (
        ("GET", "/chunks/", lambda: store.fetch(IDS)),
        ("GET", "/store", store.refresh),
        ("PUT", "/chunks/", lambda: store.put(FINGERPRINT, [chunk(8)])),
        ("PUT", "/manifests/", lambda: store.add_document(FINGERPRINT, make_document("f", [meta]))),
        ("PUT", "/store", lambda: store.add_document(FINGERPRINT, make_document("f", [meta]))),
        ("GET", "list-type", lambda: store.collect_garbage(grace_s=0)),
    ):
        n_before = proxy.requests[method]
        proxy.break_next(method, part, fault, times=1000)
        with pytest.raises(StoreAccessError, match="credentials are there, are not expired") as caught:
            action()
        assert_tells_no_secret(caught.value, caplog)
        assert proxy.requests[method] - n_before <= 4  # not tried again
        proxy.faults.clear()
    assert asked == []
    store.refresh()
    assert [info.doc_id for info in store.documents(FINGERPRINT)] == ["d", "e"]
    assert_right(store.fetch(IDS).kv)


def test_without_credentials_it_says_so(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254:1")
    with pytest.raises(StoreError, match=r"credentials|no connection"):
        ObjectChunkStore.open(s3.new_url(), retry_s=0.1)


def test_a_bucket_that_is_not_there_is_told(s3: Moto) -> None:
    assert s3
    for create in (True, False):
        with pytest.raises(StoreError, match="make it first" if create else "no store at s3://nowhere/x"):
            ObjectChunkStore.open("s3://nowhere/x", create=create)


# -- what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "short", "wrong byte", "another chunk"])
def test_a_lost_or_damaged_chunk_is_computed_again_and_counted(open_far: Open, damage: str) -> None:
    store = open_far()
    bucket, name = store._bucket, chunk_name(IDS[1])
    content = bytes(bucket.get(name) or b"")
    wrong = {
        "short": content[:-1],
        "wrong byte": content[:-1] + bytes([content[-1] ^ 1]),
        "another chunk": bytes(bucket.get(chunk_name(IDS[0])) or b""),
    }
    bucket.delete([name]) if damage == "missing" else bucket.replace(name, wrong[damage])
    for read in (lambda: store.load(IDS[1]), lambda: store.fetch(IDS)):
        with pytest.raises(RecordDamagedError, match=IDS[1].hex()):
            read()
    assert store.verify().damaged == [IDS[1]]
    asked: list[ChunkId] = []
    store.recompute_with(FINGERPRINT, compute(asked))
    fetched = store.fetch(IDS)
    assert_right(fetched.kv)
    assert fetched.recomputed == {IDS[1]} == set(asked)
    assert store.stats().recomputed == 1
    again = open_far()  # it was written back
    assert_right(again.fetch(IDS).kv)
    assert again.stats().recomputed == 0
    assert again.verify().ok


def test_bytes_that_change_on_the_way_are_not_believed(open_far: Open, proxy: Proxy) -> None:
    store = open_far()
    for layers in (None, range(1, 2)):
        proxy.break_next("GET", "/chunks/", flipped)
        n_layers = 3 if layers is None else 1
        out = [ChunkKV(*(torch.zeros(n_layers, 5, 2, 4) for _ in range(2)))]
        with pytest.raises(RecordDamagedError):
            store.load_into(IDS[:1], out, layers=layers)
    assert_right(store.fetch(IDS).kv)  # and nothing of it was kept
    proxy.break_next("GET", "/segments/", flipped)
    with pytest.raises(RecordDamagedError, match="not those it is named by"):
        open_far()
    proxy.break_next("GET", "/store", flipped)
    with pytest.raises(StoreError, match="not ours"):
        open_far()


def test_a_lost_answer_of_publishing_is_no_conflict(open_far: Open, proxy: Proxy) -> None:
    store = open_far()
    store.put(FINGERPRINT, [chunk(7)])
    proxy.break_next("PUT", "/store", lost_answer)
    assert store.add_document(FINGERPRINT, make_document("e", [chunk(7)[0]])) is False  # not replaced by itself
    fresh = open_far()
    assert [info.doc_id for info in fresh.documents(FINGERPRINT)] == ["d", "e"]
    assert fresh.generation == store.generation


def test_a_service_that_ignores_conditions_is_refused(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(s3.port, without=("if-match", "if-none-match"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(StoreError, match="overwrite each other"):
        ObjectChunkStore.open(url := s3.new_url())
    proxy.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    with pytest.raises(StoreNotFoundError):  # nothing was made there
        ObjectChunkStore.open(url, create=False)


def test_the_cache_alone_answers_what_it_holds(proxy: Proxy, s3: Moto, tmp_path: Path) -> None:
    with TieredChunkStore.open(s3.new_url(), cache=tmp_path / "cache", retry_s=0.2) as store:
        add_chunks(store, FINGERPRINT, "d", range(3))
        proxy.break_next("GET", "", BUSY, times=1000)
        assert_right(store.fetch(IDS).kv)
        with pytest.raises(StoreUnavailableError):  # what is published now is not known
            store.refresh()
