"""Public failure reports about ingestion and QA endpoints, each as the whole kind of fault, over HTTP.

Where each report comes from stands at its test; the symptoms are put in our own words.
"""

from __future__ import annotations

import concurrent.futures
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdllm_store import LMDBStore, MemoryStore
from serving import Site, served, wait_for
from test_readers import PNG
from test_readers import pdf as pdf_of
from test_server import held_back
from test_server_documents import pdf, uploaded

from pdllm_rag import AskOptions, LoadedModel, RagEngine

SENTENCE = "The Gannet buoy weighs 310 kilograms."


@pytest.fixture
def engine(tiny_model: LoadedModel, tmp_path: Path) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False)
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64, options=options) as opened:
        yield opened


@pytest.fixture
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine) as running:
        yield running


def doc_ids(site: Site) -> list[str]:
    return [entry["doc_id"] for entry in site.client.get("/v1/documents").json()["documents"]]


# -- 23: empty pieces stop the whole document (llama-farm/llamafarm 686, AegisAI 1197) -----------------------------


@pytest.mark.parametrize("text", ["", "   \n\t", "\u200b\u200b", "\ufeff", "\u00a0\u2003"])
def test_a_document_without_a_word_is_refused_with_the_reason(site: Site, text: str) -> None:
    for response in (
        site.client.post("/v1/documents", json={"documents": [{"doc_id": "blank", "text": text}]}),
        uploaded(site, ("blank.txt", text.encode())),
    ):
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "unreadable_documents"
        assert "blank" in response.json()["error"]["message"]


def test_blank_pieces_are_skipped_and_the_words_between_them_are_found(site: Site) -> None:
    pages = [""] * 5 + [SENTENCE] + [""] * 4
    files = [("pages.pdf", pdf_of(*pages)), ("gap.txt", f"text\n\n\n\n\n{SENTENCE}".encode()), ("none.txt", b" \n")]
    job = site.done(uploaded(site, *files).json()["id"])
    assert (job["state"], [entry["path"] for entry in job["documents"]["failed"]]) == ("done", ["none.txt"])
    for name in ("pages.pdf", "gap.txt"):
        citations = site.ask("What does the Gannet buoy weigh?", filter={"doc_id": name}).json()["citations"]
        assert any(SENTENCE in citation["quote"] for citation in citations)
    page = site.ask("Gannet", filter={"doc_id": "pages.pdf"}).json()["citations"][0]["page"]
    assert page == 6


# -- 24: a scanned PDF is "ready" with nothing in it (archestra 7157, pdf-qa-bot 398, cherry-studio 19095) ---------


def test_a_file_with_nothing_to_read_is_never_ready(site: Site) -> None:
    empty = {
        "scan.pdf": pdf(b"q 1 0 0 1 0 0 cm Q"),
        "script.html": b"<html><script>var a = 1;</script><style>p {}</style></html>",
        "image.md": b"![a diagram](diagram.png)",
    }
    for name, data in empty.items():
        alone = uploaded(site, (name, data))
        assert alone.status_code == 422
        assert name in alone.json()["error"]["message"]
    job = site.done(uploaded(site, ("a.txt", b"A boat."), *empty.items(), ("b.txt", b"A train.")).json()["id"])
    failed = {entry["path"]: entry["reason"] for entry in job["documents"]["failed"]}
    assert set(failed) == set(empty)
    assert "OCR" in failed["scan.pdf"]
    assert doc_ids(site) == ["a.txt", "b.txt"]
    nothing = site.ask("diagram", filter={"doc_id": "image.md"}).json()
    assert (nothing["citations"], nothing["stats"]["supported"], nothing["stats"]["nfe"]) == ([], False, 0)


# -- 25: a file that is not in UTF-8 (private-gpt 453 and 807, langchain 9005 and 8320) ----------------------------


def test_files_in_other_encodings_are_read_or_refused_and_never_stop_the_others(site: Site) -> None:
    text = "Das Café öffnet um acht – die Gäste zahlen drei Euro für den Kaffee."
    good = {
        "cp1252.txt": text.encode("cp1252"),
        "utf16.txt": text.encode("utf-16"),
        "declared.html": f'<meta charset="windows-1252"><p>{text}'.encode("cp1252"),
        "utf8.txt": text.encode(),
    }
    bad = {"picture.txt": PNG, "nul.txt": b"words\0words", "half.txt": b"\xff\xfe\x00"}
    response = uploaded(site, *good.items(), *bad.items())
    assert response.status_code == 202
    job = site.done(response.json()["id"])
    assert {entry["path"] for entry in job["documents"]["failed"]} == set(bad)
    for name in good:
        assert site.client.get(f"/v1/documents/{name}").json()["text"].strip() == text
    for name, data in bad.items():
        assert uploaded(site, (name, data)).status_code == 422


# -- 26: the same word in two Unicode spellings (aside-codemode 30, strata 809, open-genai 14) ---------------------

WORD = "r\u00e9sum\u00e9"


@pytest.mark.parametrize("stored", ["NFC", "NFD"])
@pytest.mark.parametrize("asked", ["NFC", "NFD"])
def test_both_spellings_of_a_word_find_it_and_the_source_keeps_its_own(site: Site, stored: str, asked: str) -> None:
    text = f"Send your {unicodedata.normalize(stored, WORD)} to the office."
    site.add((unicodedata.normalize(stored, f"{WORD}.txt"), text), *[(f"other{i}", f"Words {i}.") for i in range(20)])
    citations = site.ask(f"Where to send the {unicodedata.normalize(asked, WORD)}?", k=8).json()["citations"]
    assert text in [citation["quote"] for citation in citations]
    name = f"/v1/documents/{unicodedata.normalize('NFC', WORD)}.txt"
    assert site.client.get(name).json()["text"] == text


def test_one_file_under_two_spellings_of_its_name_is_one_document(site: Site) -> None:
    for form in ("NFC", "NFD"):
        site.done(uploaded(site, (unicodedata.normalize(form, f"{WORD}.txt"), b"One text.")).json()["id"])
    assert doc_ids(site) == [f"{WORD}.txt"]


# -- 27: deleted or changed documents still speak (llama_index 6152, langchain 22135, 995, 1286, 21028) ------------


def test_what_was_deleted_or_changed_is_gone_everywhere_and_can_come_back(site: Site, engine: RagEngine) -> None:
    pages = [f"Room {i} is painted in colour number {i}, as every room is. " * 3 for i in range(140)]
    text = "\n\n".join(pages)
    first = site.add(("rooms", text))
    assert first["chunks"]["computed"] > 250
    assert site.add(("rooms", text))["documents"]["unchanged"] == 1
    changed = site.add(("rooms", text.replace("Room 50 is painted in", "Room 50 was never given a")))
    assert 0 < changed["chunks"]["computed"] < 20
    quotes = [c["quote"] for c in site.ask("Room 50 is painted in colour", k=8).json()["citations"]]
    assert not [quote for quote in quotes if "Room 50 is" in quote]

    used = site.client.get("/v1/documents").json()["store"]["bytes"]["used"]
    assert site.client.delete("/v1/documents/rooms").status_code == 200
    assert site.client.delete("/v1/documents/rooms").status_code == 404
    assert site.client.delete("/v1/documents/never").status_code == 404
    assert site.client.get("/v1/documents").json()["store"]["bytes"]["used"] < used / 4
    assert site.client.get("/v1/documents").json()["store"]["chunks"] == 0
    assert site.ask("Room 50").status_code == 409
    assert engine.store.refs(engine.fingerprint) == []
    again = site.add(("rooms", text))
    assert (again["documents"]["added"], again["chunks"]["computed"]) == (1, first["chunks"]["computed"])


# -- 28: an upload without limits (AegisAI 760, LibreChat 3346, ragflow 8660) --------------------------------------
# The bounds of bodies, files, counts, nesting and ids are in test_server_security.py and test_server_documents.py.


def test_ten_thousand_tiny_documents_in_one_call_are_refused_and_nothing_is_written(site: Site) -> None:
    many = [{"doc_id": str(i), "text": "w"} for i in range(10_000)]
    assert site.client.post("/v1/documents", json={"documents": many}).status_code == 422
    assert doc_ids(site) == []


@pytest.mark.parametrize("name", ["../../x.txt", "..\\..\\x.txt", "/etc/passwd", "C:\\x.txt"])
def test_a_file_name_writes_nothing_outside_the_store(site: Site, tmp_path: Path, name: str) -> None:
    before = {path for path in tmp_path.rglob("*") if "kb" not in path.parts}
    response = uploaded(site, (name, b"Some words."))
    assert response.status_code == 202
    site.done(response.json()["id"])
    assert len(doc_ids(site)) == 1
    assert {path for path in tmp_path.rglob("*") if "kb" not in path.parts} == before


# -- 29: one question blocks everything (pdf-qa-bot 158, NexusRAG 6, ogx 1489) -------------------------------------


def test_during_a_long_answer_health_answers_questions_wait_and_documents_come_and_go(tiny_model: LoadedModel) -> None:
    options = AskOptions(threshold=1.0, score_window=float("inf"), abstain=False, candidates=4, k=4)
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options)
    with engine, served(engine, max_batch=4, max_waiting=3) as site:
        site.add(("used", f"{SENTENCE} " * 3), ("other", "A train is green."))
        alone = site.ask("Gannet", max_new_tokens=120).json()["answer"]
        expected = {f"train {i}": site.ask(f"train {i}", max_new_tokens=4).json()["answer"] for i in range(5)}
        with concurrent.futures.ThreadPoolExecutor(8) as pool, held_back() as reached:
            long = pool.submit(site.ask, "Gannet", max_new_tokens=120)
            assert reached.wait(60)
            rest = {question: pool.submit(site.ask, question, max_new_tokens=4) for question in expected}
            wait_for(lambda: sum(future.done() for future in rest.values()) == 2)
            added = site.add(("new", "A kite is blue."))
            deleted = site.client.delete("/v1/documents/used")
            for _ in range(20):
                assert site.client.get("/health").status_code == 200
                time.sleep(0.01)
            assert not long.done()
        assert (long.result().status_code, deleted.status_code, added["state"]) == (200, 200, "done")
        assert long.result().json()["answer"] == alone  # the deletion has not reached into a running answer
        statuses = sorted(future.result().status_code for future in rest.values())
        assert statuses == [200, 200, 200, 429, 429]
        assert "used" not in doc_ids(site)


# -- 30: too much context, so all of it is dropped (instructlab 3003, helm 367, ogx 2536, reor 41) -----------------


def test_a_question_is_kept_whole_or_refused_with_numbers(site: Site, tiny_model: LoadedModel) -> None:
    site.add(("doc", SENTENCE))
    window = tiny_model.spec.family.window
    long = site.ask("word " * 1500)  # a token a byte
    assert (long.status_code, long.json()["error"]["code"]) == (422, "context_length_exceeded")
    assert str(window) in long.json()["error"]["message"]
    assert site.ask("weight", max_new_tokens=512).status_code == 200


def test_chunks_are_added_by_rank_until_the_window_is_full_and_the_sources_are_those(
    site: Site, tiny_model: LoadedModel
) -> None:
    site.add(*[(f"doc{i}", f"Buoy {i}: {SENTENCE} " * 4) for i in range(40)])
    window = tiny_model.spec.family.window
    many = site.ask("What does the Gannet buoy weigh?" + " really" * ((window - 900) // 7), k=32).json()
    stats = many["stats"]
    assert stats["context_tokens"] + stats["prompt_tokens"] + stats["tokens"] <= window
    assert len(many["citations"]) == stats["chunks"]["hit"] < 32
    scores = [citation["score"] for citation in many["citations"]]
    assert len(scores) > 1


# -- spares ----------------------------------------------------------------------------------------------------


def test_the_finish_reason_tells_a_cut_answer_from_a_whole_one(site: Site) -> None:
    """litellm 25825: always "stop"."""
    site.add(("doc", SENTENCE))
    model = site.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "weight"}], "max_tokens": 1}
    cut = site.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert cut["finish_reason"] == site.ask("weight", max_new_tokens=1).json()["stats"]["finish_reason"] == "length"


def test_the_same_chunk_is_read_and_cited_once(site: Site) -> None:
    """rag-api-server 27: one source three times in the prompt."""
    site.add(("a", SENTENCE), ("b", SENTENCE), ("c", SENTENCE))
    answer = site.ask("weight", k=3).json()
    assert len(answer["citations"]) == answer["stats"]["chunks"]["hit"] == 1


def test_control_tokens_in_a_document_or_question_are_text(site: Site) -> None:
    """transformers 29279."""
    site.add(("doc", "The form says <|mask|><|im_end|> here."))
    for question in ("What does the form say?", "<|im_end|><|mask|>?"):
        answer = site.ask(question)
        assert answer.status_code == 200
        assert answer.json()["citations"][0]["quote"] == "The form says <|mask|><|im_end|> here."
