"""Questions over far stores: the same answers as over a folder, wherever the KV comes from, by engine and commands."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import Pdllm, one_line, one_object
from far import SECRETS, Moto
from pdllm_store import KVDtype, ObjectChunkStore, StoreNotFoundError, open_store
from pdllm_store.published import chunk_name

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.components.engines import engine_key, store_generation

TEXTS = {
    "alpha": " ".join(f"The red boat sails at {hour} in the morning." for hour in range(5)),
    "beta": " ".join(f"A green train leaves yard {yard} every day." for yard in range(5)),
    "gamma": " ".join(f"Blue kites fly {metres} metres above the hill." for metres in range(5)),
}
QUESTIONS = ("When does the red boat sail?", "Which yard does the train leave?", "How high do kites fly?")
DOCUMENTS = [InputDocument(name, text, name) for name, text in TEXTS.items()]
OPTIONS = AskOptions(threshold=0.05, score_window=float("inf"), max_new_tokens=8)


def answers(model: LoadedModel, location: str, *, prefill: bool = False, **options: Any) -> list[object]:
    """Text, steps, sources and scores of every question."""
    dtype: KVDtype | None = options.pop("kv_dtype", None)
    with RagEngine.open(
        location, model, kv_dtype=dtype, chunk_len=64, options=OPTIONS, store_options=options, create=prefill
    ) as engine:
        if prefill:
            assert engine.prefill(DOCUMENTS).added == len(DOCUMENTS)
        found = [engine.answer(question) for question in QUESTIONS]
        assert all(answer.stats.chunks.recomputed == 0 for answer in found)
        return [(answer.text, answer.stats.nfe, answer.citations) for answer in found]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_answers_are_the_same_over_every_kind_of_store(
    tiny_model: LoadedModel, s3: Moto, tmp_path: Path, kv_dtype: KVDtype
) -> None:
    expected = answers(tiny_model, str(tmp_path / "kb"), prefill=True, kv_dtype=kv_dtype)
    assert len({text for text, _, _ in expected}) > 1  # type: ignore[attr-defined]
    cache = tmp_path / "cache"
    for url in ((tmp_path / "far").as_uri(), s3.new_url()):
        assert answers(tiny_model, url, prefill=True, kv_dtype=kv_dtype) == expected
        assert answers(tiny_model, url) == expected
        for _ in range(2):  # cold, then warm
            assert answers(tiny_model, url, cache=cache) == expected
        with open_store(url, cache=cache) as store:
            assert store.evict() > 0
        assert answers(tiny_model, url, cache=cache) == expected
        shutil.rmtree(cache)
    url = s3.new_url()
    assert answers(tiny_model, url, prefill=True, kv_dtype=kv_dtype, cache=cache, cache_bytes=1 << 20) == expected


def test_a_lost_chunk_is_counted_in_the_answer(tiny_model: LoadedModel, tmp_path: Path) -> None:
    url = (tmp_path / "far").as_uri()
    expected = answers(tiny_model, url, prefill=True)
    with ObjectChunkStore.open(url) as store:
        fingerprint = tiny_model.fingerprint(store.kv_dtype)
        lost = [chunk_id for info in store.documents(fingerprint) for chunk_id in info.chunk_ids]
        store._bucket.delete([chunk_name(chunk_id) for chunk_id in lost])
    with RagEngine.open(url, tiny_model, chunk_len=64, options=OPTIONS) as engine:
        answer = engine.answer(QUESTIONS[0])
        assert answer.stats.chunks.recomputed > 0
        assert (answer.text, answer.stats.nfe, answer.citations) == expected[0]


def test_a_prefill_publishes_its_documents_together(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RagEngine.open((tmp_path / "far").as_uri(), tiny_model, chunk_len=64) as engine:
        assert isinstance(engine.store, ObjectChunkStore)
        swap, placed = engine.store._bucket.swap, []
        monkeypatch.setattr(engine.store._bucket, "swap", lambda *given: placed.append(1) or swap(*given))
        assert engine.prefill(DOCUMENTS).added == len(DOCUMENTS)
        assert len(placed) == 1


def test_machines_that_prefill_parts_at_the_same_time_make_one_store(tiny_model: LoadedModel, s3: Moto) -> None:
    url, failures = s3.new_url(), []

    def prefill(part: int) -> None:
        try:
            with RagEngine.open(url, tiny_model, chunk_len=64) as engine:
                for document in DOCUMENTS[part::2]:
                    engine.prefill([document])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=prefill, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with RagEngine.open(url, tiny_model, chunk_len=64, create=False) as engine:
        assert [info.doc_id for info in engine.documents()] == sorted(TEXTS)
        assert engine.prefill(DOCUMENTS).unchanged == len(DOCUMENTS)


def test_components_take_urls(tmp_path: Path) -> None:
    url = (tmp_path / "far").as_uri()
    assert engine_key(url, "demo", "cpu") == engine_key(url + "/", "demo", "cpu") == (url, "demo", "cpu", None, None)
    assert store_generation(url) is None
    with ObjectChunkStore.open(url) as store:
        assert store_generation(url) == store.generation


# -- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def location(tmp_path: Path, folder: Path, pdllm: Pdllm, tiny_model_path: Path) -> str:
    """A store under a URL with both documents."""
    url = (tmp_path / "far").as_uri()
    report = one_object(pdllm("prefill", folder, "--store", url, "--model", tiny_model_path, "--json"))
    assert report["documents"]["added"] == 2
    assert report["bytes"]["written"] > 0
    return url


def test_prefill_and_ask_take_urls(
    pdllm: Pdllm, s3: Moto, folder: Path, tmp_path: Path, tiny_model_path: Path, location: str
) -> None:
    ask = ("ask", "How heavy is the Gannet buoy?", "--model", tiny_model_path, "--json")
    prefill = ("prefill", folder, "--model", tiny_model_path, "--json")
    places = [("--store", location), ("--store", location, "--cache", tmp_path / "cache", "--cache-bytes", "50MB")]
    places += [("--store", tmp_path / "kb"), ("--store", s3.new_url())]
    found = []
    for place in places:
        report = one_object(pdllm(*prefill, *place))
        assert report["documents"]["added"] + report["documents"]["unchanged"] == 2
        answer = one_object(pdllm(*ask, *place))
        found.append((answer["answer"], answer["citations"], answer["stats"]["nfe"]))
    assert found[1:] == found[:1] * 3
    again = one_object(pdllm(*prefill, *places[3]))
    assert (again["documents"]["unchanged"], again["chunks"]["computed"]) == (2, 0)


def test_the_store_commands_take_urls(pdllm: Pdllm, location: str, tmp_path: Path) -> None:
    place = ("--store", location)
    cached = (*place, "--cache", tmp_path / "cache")
    assert one_object(pdllm("store", "stats", *place, "--json"))["path"] == location
    assert location in pdllm("store", "stats", *place).out
    listed = one_object(pdllm("store", "list", *place, "--json"))["documents"]
    assert [entry["doc_id"] for entry in listed] == ["buoys/gannet.txt", "leave.md"]
    assert one_object(pdllm("store", "verify", *place, "--json"))["ok"] is True
    assert one_object(pdllm("store", "verify", *cached, "--repair", "--json"))["ok"] is True
    assert one_object(pdllm("store", "pin", "leave.md", *place, "--json"))["pinned"] == ["leave.md"]
    assert one_object(pdllm("store", "limit", "80MB", *cached, "--json"))["max_bytes"] == 80_000_000
    assert one_object(pdllm("store", "evict", "--unused-for", "0s", *cached, "--json"))["evicted"] == 0
    assert "fetched again" in pdllm("store", "stats", *cached).out
    for command, said in (
        (("store", "limit", "80MB"), "has no cap"),
        (("store", "evict", "--unused-for", "0s"), "no order of use"),
        (("store", "compact"), "pdllm store gc"),
        (("store", "delete", "--all", "--purge"), "pdllm store gc"),
    ):
        assert said in one_line(pdllm(*command, *place))
    assert one_object(pdllm("store", "delete", "leave.md", *place, "--json"))["deleted"] == ["leave.md"]
    dry = one_object(pdllm("store", "gc", "--grace", "0s", "--dry-run", *place, "--json"))
    assert dry["dry_run"] is True
    assert dry["chunks"] > 0
    assert "deleted" in pdllm("store", "gc", "--grace", "0s", *place).out
    assert one_object(pdllm("store", "gc", "--grace", "0s", *place, "--json"))["chunks"] == 0
    assert one_object(pdllm("store", "verify", *place, "--json"))["ok"] is True


def test_a_command_says_what_is_wrong_with_a_location(pdllm: Pdllm, tmp_path: Path, filled: Path, s3: Moto) -> None:
    nowhere = (tmp_path / "nowhere").as_uri()
    assert "there is no store at" in one_line(pdllm("store", "stats", "--store", nowhere))
    assert "a cache stands in front" in one_line(pdllm("store", "stats", "--store", filled, "--cache", tmp_path / "c"))
    assert "is a folder" in one_line(pdllm("store", "gc", "--store", filled))
    assert "make it first" in one_line(pdllm("prefill", filled.parent / "docs", "--store", "s3://nowhere/x"))
    told = pdllm("--verbose", "store", "stats", "--store", f"s3://{SECRETS[0]}:{SECRETS[1]}@bucket/x")
    assert told.status == 1
    assert not [secret for secret in SECRETS if secret in told.err + told.out]
    assert s3
    with pytest.raises(StoreNotFoundError):
        ObjectChunkStore.open(nowhere, create=False)
