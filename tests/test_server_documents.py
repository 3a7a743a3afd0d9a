"""Documents over HTTP: in as text and as files, listed, read, deleted, while questions are answered."""

from __future__ import annotations

import concurrent.futures
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from pdllm_store import LMDBStore, MemoryStore
from serving import Site, served, wait_for
from test_engine import TEXTS

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.errors import DocumentError, UnreadableDocumentError
from pdllm_rag.server.parsing import FileReader

STRANGE_IDS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../b",
    "...",
    "a//b",
    "%2e%2e",
    "re\u0301sume\u0301",
    "a?b#c&d=e",
    "☃ x",
]


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as opened:
        yield opened


@pytest.fixture
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine) as running:
        yield running


def uploaded(site: Site, *files: tuple[str, bytes]) -> httpx.Response:
    return site.client.post("/v1/documents", files=[("file", file) for file in files])


def pdf(content: bytes) -> bytes:
    """One page with this content stream, compressed."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    page = writer.add_blank_page(600, 800)
    stream = DecodedStreamObject()
    stream.set_data(content)
    page[NameObject("/Contents")] = writer._add_object(stream.flate_encode(9))
    names = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in names.items()})
    fonts = DictionaryObject({NameObject("/F1"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_texts_go_in_are_listed_read_and_deleted(site: Site) -> None:
    job = site.add(*TEXTS.items())
    assert job["state"] == "done"
    assert job["documents"] | {"failed": []} == job["documents"]
    assert job["documents"]["added"] == job["documents"]["done"] == 3
    listed = site.client.get("/v1/documents").json()
    assert [entry["doc_id"] for entry in listed["documents"]] == ["alpha", "beta", "gamma"]
    assert (listed["total"], listed["store"]["chunks"]) == (3, sum(e["chunks"] for e in listed["documents"]))
    page = site.client.get("/v1/documents", params={"offset": 1, "limit": 1}).json()
    assert [entry["doc_id"] for entry in page["documents"]] == ["beta"]
    read = site.client.get("/v1/documents/alpha").json()
    assert (read["text"], read["start"], read["end"], read["chars"]) == (TEXTS["alpha"], 0, *[len(TEXTS["alpha"])] * 2)
    assert site.client.delete("/v1/documents/alpha").json() == {"doc_id": "alpha", "deleted": True}
    assert site.client.delete("/v1/documents/alpha").status_code == 404
    assert site.client.get("/v1/documents/alpha").status_code == 404


def test_a_citation_can_be_looked_up_by_its_offsets(site: Site) -> None:
    site.add(*TEXTS.items())
    for citation in site.ask("boat").json()["citations"]:
        place = {"start": citation["char_start"], "end": citation["char_end"]}
        read = site.client.get(f"/v1/documents/{citation['doc_id']}", params=place).json()
        assert read["text"] == citation["quote"]
        assert citation["ordinal"] in [chunk["ordinal"] for chunk in read["chunks"]]


@pytest.mark.parametrize("doc_id", STRANGE_IDS)
def test_an_id_is_data_whatever_it_looks_like(site: Site, doc_id: str) -> None:
    assert site.add((doc_id, TEXTS["alpha"]))["state"] == "done"
    listed = [entry["doc_id"] for entry in site.client.get("/v1/documents").json()["documents"]]
    assert len(listed) == 1
    path = f"/v1/documents/{quote(listed[0], safe='')}"
    url = httpx.URL(site.url).copy_with(raw_path=path.encode())  # as it stands: no client is to tidy it
    assert site.client.get(url).json()["text"] == TEXTS["alpha"]
    assert site.client.delete(url).status_code == 200
    assert site.client.get("/v1/documents").json()["total"] == 0


@pytest.mark.parametrize("doc_id", ["", ".", "..", "x" * 481, "é" * 241, "a\nb", "a\x00b", "\x1b[31m"])
def test_an_id_that_is_none_is_refused(site: Site, doc_id: str) -> None:
    body = {"documents": [{"doc_id": doc_id, "text": "words"}]}
    assert site.client.post("/v1/documents", json=body).status_code == 422


def test_files_are_read_by_their_kind(site: Site) -> None:
    files = [
        ("notes.md", b"---\nowner: me\n---\n# Notes\n\nThe boat is red."),
        ("page.html", b"<title>Trains</title><p>The train is <b>green</b>.<script>no()</script>"),
        ("latin.txt", "Das Boot gehört der Gräfin, die es für späte Überfahrten braucht.".encode("cp1252")),
        ("sheet.pdf", pdf(b"BT /F1 12 Tf (The kite is blue.) Tj ET")),
    ]
    response = uploaded(site, *files)
    assert response.status_code == 202
    assert response.headers["Location"] == f"/v1/jobs/{response.json()['id']}"
    job = site.done(response.json()["id"])
    assert (job["state"], job["documents"]["added"], job["documents"]["failed"]) == ("done", 4, [])
    listed = {entry["doc_id"]: entry["metadata"] for entry in site.client.get("/v1/documents").json()["documents"]}
    assert listed["page.html"] == {"media_type": "text/html", "title": "Trains", "folder": "", "suffix": ".html"}
    assert listed["notes.md"] == {"media_type": "text/markdown", "owner": "me", "folder": "", "suffix": ".md"}
    assert site.client.get("/v1/documents/notes.md").json()["text"] == "# Notes\n\nThe boat is red."
    assert "page_ends" not in listed["sheet.pdf"]
    texts = {name: site.client.get(f"/v1/documents/{name}").json()["text"] for name, _ in files}
    assert "gehört der Gräfin" in texts["latin.txt"]
    assert texts["sheet.pdf"] == "The kite is blue."
    assert "no()" not in texts["page.html"]


def test_a_bad_file_is_named_and_the_others_go_in(site: Site) -> None:
    files = [("good.txt", b"The boat is red."), ("fake.txt", b"\x89PNG\r\n\x1a\n"), ("empty.md", b" \n")]
    response = uploaded(site, *files)
    assert response.status_code == 202
    failed = {entry["path"]: entry["reason"] for entry in site.done(response.json()["id"])["documents"]["failed"]}
    assert set(failed) == {"fake.txt", "empty.md"}
    assert "PNG" in failed["fake.txt"]
    refused = uploaded(site, *files[1:])
    assert refused.status_code == 422
    assert "fake.txt: looks like a PNG" in refused.json()["error"]["message"]


def test_an_upload_again_replaces_its_own_and_no_other_sources_document(site: Site, engine: RagEngine) -> None:
    engine.prefill([InputDocument("handbook.txt", TEXTS["alpha"], "/home/somebody/handbook.txt")])
    job = site.done(uploaded(site, ("handbook.txt", b"Other words.")).json()["id"])
    assert (job["state"], job["documents"]["failed"][0]["path"]) == ("failed", "handbook.txt")
    assert site.client.get("/v1/documents/handbook.txt").json()["text"] == TEXTS["alpha"]
    for words, counted in ((b"First words.", "added"), (b"First words.", "unchanged"), (b"New words.", "updated")):
        job = site.done(uploaded(site, ("mine.txt", words)).json()["id"])
        assert job["documents"][counted] == 1


def test_limits_of_files_and_documents(engine: RagEngine) -> None:
    limits = {"max_file_bytes": 1000, "max_documents": 3, "max_document_chars": 500, "max_upload_bytes": 20_000}
    with served(engine, **limits) as site:
        assert uploaded(site, ("a.txt", b"x" * 1001)).status_code == 413
        assert uploaded(site, ("a.txt", b"word " * 101)).status_code == 422
        assert uploaded(site, *[(f"{i}.txt", b"words") for i in range(4)]).status_code == 422
        assert uploaded(site, ("a.txt", b"x" * 30_000)).status_code == 413
        many = [{"doc_id": str(i), "text": "words"} for i in range(4)]
        assert site.client.post("/v1/documents", json={"documents": many}).status_code == 422
        long = [{"doc_id": "a", "text": "w" * 501}]
        assert site.client.post("/v1/documents", json={"documents": long}).status_code == 422
        assert site.client.get("/v1/documents").json()["total"] == 0


def test_a_form_without_files_and_other_bodies_are_refused(site: Site) -> None:
    assert site.client.post("/v1/documents", data={"text": "words"}).status_code == 415
    assert site.client.post("/v1/documents", files={"file": ("", b"words")}).status_code == 422
    headers = {"Content-Type": "multipart/form-data"}  # without a boundary
    assert site.client.post("/v1/documents", content=b"words", headers=headers).status_code == 422
    assert site.client.post("/v1/documents", content=b"words").status_code == 415


def test_jobs_wait_up_to_a_bound(engine: RagEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda *a, **k: go_on.wait(60) and original(*a, **k))
    with served(engine, max_jobs=2) as site:
        codes, jobs = [], []
        for number in range(4):
            body = {"documents": [{"doc_id": f"d{number}", "text": f"words {number}"}]}
            response = site.client.post("/v1/documents", json=body)
            codes.append(response.status_code)
            jobs += [response.json()["id"]] if response.status_code == 202 else []
            wait_for(lambda: site.metric("pdllm_jobs_waiting") == max(0, len(jobs) - 1))  # noqa: B023
        assert codes == [202, 202, 202, 429]
        assert response.headers["Retry-After"]
        assert site.client.get(f"/v1/jobs/{jobs[2]}").json()["state"] == "queued"
        go_on.set()
        assert [site.done(job)["state"] for job in jobs] == ["done"] * 3
        assert site.client.get("/v1/jobs/nothing").status_code == 404


def test_a_job_tells_how_far_it_is(engine: RagEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with served(engine) as site:
        original = engine.prefill

        def watched(documents: Any, on_progress: Any) -> Any:
            def note(progress: Any) -> None:
                on_progress(progress)
                seen.append(site.client.get(f"/v1/jobs/{job_id[0]}").json() if job_id else {})

            wait_for(lambda: job_id)
            return original(documents, on_progress=note)

        job_id: list[str] = []
        monkeypatch.setattr(engine, "prefill", watched)
        body = {"documents": [{"doc_id": f"d{i}", "text": f"{i} {TEXTS['alpha']}"} for i in range(20)]}
        job_id.append(site.client.post("/v1/documents", json=body).json()["id"])
        site.done(job_id[0])
    assert [job["state"] for job in seen] == ["running"] * len(seen)
    assert sorted(job["tokens"] for job in seen) == [job["tokens"] for job in seen]
    assert [job["documents"]["done"] for job in seen][-1] == 20


def test_a_stopped_server_stops_its_job_after_a_batch_and_keeps_what_went_in(
    tiny_model: LoadedModel, tmp_path: Path
) -> None:
    documents = [(f"d{i}", f"{i} {TEXTS['alpha']}") for i in range(60)]
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64) as engine:
        with served(engine) as site:
            body = {"documents": [{"doc_id": name, "text": text} for name, text in documents]}
            job = site.client.post("/v1/documents", json=body).json()["id"]
            wait_for(lambda: site.client.get(f"/v1/jobs/{job}").json()["tokens"] > 0)
        n_chunks = store.stats().chunks
        assert n_chunks > 0
        report = engine.prefill([InputDocument(name, text, f"upload:{name}") for name, text in documents])
        assert report.added + report.unchanged == 60
        assert store.stats().chunks == n_chunks + report.chunks_computed


def test_a_read_only_store_takes_no_documents(tiny_model: LoadedModel, tmp_path: Path) -> None:
    with RagEngine.open(tmp_path / "kb", tiny_model, kv_dtype="float32") as engine:
        engine.prefill([InputDocument("alpha", TEXTS["alpha"], "alpha")])
    options = {"read_only": True}
    with RagEngine.open(tmp_path / "kb", tiny_model, store_options=options) as engine, served(engine) as site:
        assert site.client.get("/v1/documents").json()["store"]["read_only"]
        for response in (
            site.client.post("/v1/documents", json={"documents": [{"doc_id": "x", "text": "words"}]}),
            site.client.delete("/v1/documents/alpha"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (403, "read_only")
        assert site.ask("boat").status_code == 200


# -- hostile files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    opened = FileReader(seconds=4, n_bytes=300 * 2**20, max_bytes=2**22, max_chars=100_000)
    yield opened
    opened.close()


BOMBS: dict[str, Callable[[], bytes]] = {
    "unfolds.pdf": lambda: pdf(b"BT /F1 12 Tf " + b"(x) Tj " * 400_000 + b"ET"),
    "zeros.pdf": lambda: pdf(b"\0" * 100_000_000),
    "deep.pdf": lambda: pdf(b"[" * 1_000_000),
    "broken.pdf": lambda: b"%PDF-1.7\n" + b"1 0 obj <<" * 10_000,
    "deep.html": lambda: b"<div>" * 500_000 + b"x",
    "tables.html": lambda: b"<table><tr><td>" * 5_000 + b"x",
    "indented.html": lambda: b"<ul>" * 200 + b"<li>x" * 20_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unfolds_without_end_is_refused_within_bounds(reader: FileReader, name: str) -> None:
    data = BOMBS[name]()
    assert len(data) < 4_000_000
    with pytest.raises(DocumentError, match=name.replace(".", r"\.")):
        reader.read(data, name)
    assert reader.read(b"The boat is red.", "good.txt").text == "The boat is red."


def test_a_file_that_takes_too_long_is_given_up() -> None:
    reader = FileReader(seconds=0.2, n_bytes=2**30, max_bytes=2**26, max_chars=2**24)
    try:
        with pytest.raises(UnreadableDocumentError, match=r"longer than 0\.2 s"):
            reader.read(pdf(b"BT /F1 12 Tf " + b"(words) Tj " * 1_000_000 + b"ET"), "slow.pdf")
        assert reader.read(b"fine", "good.txt").text == "fine"
    finally:
        reader.close()


# -- while questions are answered ----------------------------------------------------------------------------


def test_documents_come_and_go_while_questions_are_answered(site: Site) -> None:
    site.add(*TEXTS.items())
    stop = threading.Event()

    def churn() -> int:
        n_rounds = 0
        while not stop.is_set():
            assert site.add(("extra", f"{TEXTS['beta']} {n_rounds}"))["state"] == "done"
            assert site.client.delete("/v1/documents/extra").status_code == 200
            n_rounds += 1
        return n_rounds

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        churning = pool.submit(churn)
        answers = list(pool.map(lambda i: site.ask(f"boat {i}", max_new_tokens=8), range(24)))
        stop.set()
        assert churning.result() > 0
    assert {response.status_code for response in answers} == {200}
