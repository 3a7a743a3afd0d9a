"""The web page in a real browser: ask, watch, look up, add, delete, and what it says when something is wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium
from pdllm_store import LMDBStore
from serving import KEY, Site, served, wait_for

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine

ROOT = Path(__file__).parent.parent
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
QUESTION = "When does the boat sail?"
TEXTS = {
    "boats/red.md": "# Boats\n\nThe red boat 🚤 sails at nine in the morning. It comes back at noon.",
    "kites.txt": "Blue kites fly above the hill. They are made of paper.",
    "<img src=x onerror=alert(1)>.txt": "<script>document.title = 'taken'</script> A train is green.",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def engine(tiny_model: LoadedModel, tmp_path: Path) -> Iterator[RagEngine]:
    options = AskOptions(threshold=0.2, score_window=float("inf"), abstain=False, max_new_tokens=24)
    store = LMDBStore.open(tmp_path / "kb", kv_dtype="float32")
    with store, RagEngine.open(store, tiny_model, chunk_len=64, options=options) as opened:
        opened.prefill([InputDocument(name, text, f"upload:{name}") for name, text in TEXTS.items()])
        yield opened


@pytest.fixture
def site(engine: RagEngine) -> Iterator[Site]:
    with served(engine) as running:
        yield running


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page in a browser of its own; anything that its console calls an error fails the test."""
    opened: list[Any] = []
    wrong: list[str] = []

    def go(url: str, *, size: dict[str, int] = WIDE, may_say: str = "status of 4", **options: Any) -> Any:
        context = browser.new_context(viewport=size, reduced_motion="reduce", **options)
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            # A status that the page shows in words of its own is reported by the browser as well.
            lambda said: wrong.append(said.text) if said.type == "error" and may_say not in said.text else None,
        )
        page.goto(url)
        return page

    yield go
    for context in opened:
        context.close()
    assert not wrong


def ask(page: Any, question: str = QUESTION) -> Any:
    """Ask by keyboard; the finished answer's article."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("article .facts")
    return page.locator("article").first


def pairs(step: dict[str, Any]) -> list[tuple[int, str | None]]:
    return list(zip(step["rows"], step["pieces"], strict=True))


def test_an_answer_is_streamed_with_its_sources_and_costs(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    expected = site.ask(QUESTION).json()
    article = ask(page)
    assert article.locator("h2").inner_text() == QUESTION
    assert article.locator(".said").evaluate("e => e.firstChild.textContent") == expected["answer"]
    names = [name.partition("passage")[0].strip() for name in article.locator(".cite .name").all_inner_texts()]
    assert names == [citation["doc_id"] for citation in expected["citations"]]
    assert article.locator(".timings span").count() > 0
    assert f"{len(names)} passages from the store" in article.locator(".facts").last.inner_text()
    assert page.locator("#status").inner_text().startswith("Answer: ")
    assert article.get_attribute("aria-busy") is None


def test_the_canvas_can_be_watched_pass_by_pass(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    article = ask(page)
    steps = [data for name, data in site.events(QUESTION) if name == "canvas"]
    assert len(steps) > 2
    article.locator(".replay summary").click()
    slide = article.locator(".replay input")
    for n_passes in (0, 1, len(steps)):
        slide.fill(str(n_passes))
        committed = {row for step in steps[:n_passes] for row in step["rows"]}
        ends = [row for step in steps[:n_passes] for row, piece in pairs(step) if piece is None]
        before_end = {row for row in committed if row < min(ends, default=10**6)}
        assert article.locator(".canvas .token").count() == len(before_end)
    assert article.locator(".canvas").get_attribute("aria-hidden") == "true"
    sure = article.locator(".canvas .token").first.evaluate("e => Number(e.style.getPropertyValue('--sure'))")
    assert 0 < sure <= 1


def test_a_citation_opens_its_source_with_the_quote_marked(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    article = ask(page)
    citations = site.ask(QUESTION).json()["citations"]
    for index, citation in enumerate(citations):
        article.locator(".cite").nth(index).click()
        page.wait_for_selector("#source-text mark")
        assert page.locator("#source-title").inner_text() == citation["doc_id"]
        assert page.locator("#source-text mark").inner_text().split() == citation["quote"].split()
        assert page.locator("#source-text").inner_text().split() == TEXTS[citation["doc_id"]].split()
        page.keyboard.press("Escape")
        page.wait_for_selector("#source", state="hidden")
    article.locator(".said sup button").first.click()
    page.wait_for_selector("#source-text mark")


def test_text_of_documents_is_never_markup(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    page.get_by_text("onerror=alert(1)>.txt").click()
    page.wait_for_selector("#source-note >> text=characters")
    assert "<script>document.title" in page.locator("#source-text").inner_text()
    assert page.title().startswith("pdllm")
    assert page.locator("#list img").count() == 0


def test_files_are_added_by_choice_and_by_dropping(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    page.set_input_files(
        "#files",
        [
            {"name": "new.md", "mimeType": "text/markdown", "buffer": b"# New\n\nA green lamp stands in the yard."},
            {"name": "photo.txt", "mimeType": "text/plain", "buffer": b"\x89PNG\r\n\x1a\n"},
        ],
    )
    page.wait_for_selector("#list >> text=new.md")
    page.wait_for_selector("#uploads .failed")
    assert page.locator("#uploads .failed .state").inner_text().startswith("looks like a PNG image")
    page.get_by_label("Dismiss photo.txt").click()
    assert page.locator("#uploads .failed").count() == 0
    assert page.locator("#total").inner_text() == "4"
    page.evaluate(
        """() => {
          const carried = new DataTransfer();
          carried.items.add(new File(["A yellow submarine dives at dawn."], "dropped.txt", {type: "text/plain"}));
          for (const kind of ["dragenter", "dragover", "drop"])
            document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: carried, bubbles: true, cancelable: true}));
        }"""
    )
    page.wait_for_selector("#list >> text=dropped.txt")
    assert site.client.get("/v1/documents/dropped.txt").json()["text"] == "A yellow submarine dives at dawn."
    assert not page.locator("#drop").is_visible()


def test_a_document_is_deleted_after_asking_once_more(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    button = page.get_by_label("Delete kites.txt")
    button.focus()
    page.keyboard.press("Enter")
    assert button.inner_text() == "Really?"
    page.keyboard.press("Tab")
    assert button.inner_text() == "Delete"
    button.click()
    button.click()
    page.wait_for_selector("#total >> text=/^2$/")
    assert site.client.get("/v1/documents/kites.txt").status_code == 404


def test_an_empty_store_invites_files(tiny_model: LoadedModel, tmp_path: Path, visit: Callable[..., Any]) -> None:
    with RagEngine.open(tmp_path / "empty", tiny_model, chunk_len=64) as engine, served(engine) as site:
        page = visit(site.url)
        page.wait_for_selector("#welcome")
        page.fill("#question", QUESTION)
        page.press("#question", "Enter")
        page.wait_for_selector("#answers .notice")
        assert "holds no documents" in page.locator("#answers .notice").inner_text()
        with page.expect_file_chooser() as chosen:
            page.click("#welcome-add")
        chosen.value.set_files([{"name": "a.txt", "mimeType": "text/plain", "buffer": b"The boat is red."}])
        page.wait_for_selector("#welcome", state="hidden")
        page.get_by_text("Try again").click()
        page.wait_for_selector("article .facts")


def test_a_key_is_asked_for_kept_for_the_tab_and_used(engine: RagEngine, visit: Callable[..., Any]) -> None:
    with served(engine, api_key=KEY) as site:
        page = visit(site.url)
        page.wait_for_selector("#key-wanted")
        page.fill("#key", "a-wrong-key-to-begin-with")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-wanted")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector("#list >> text=kites.txt")
        ask(page)
        page.set_input_files("#files", [{"name": "n.txt", "mimeType": "text/plain", "buffer": b"A lamp."}])
        page.wait_for_selector("#list >> text=n.txt")
        page.reload()
        page.wait_for_selector("#list >> text=n.txt")
        assert page.evaluate("JSON.stringify(localStorage)").find(KEY) < 0
        page.goto(f"{site.url}/docs")
        page.wait_for_selector(".route")


def test_a_stopped_answer_stops_the_server(engine: RagEngine, visit: Callable[..., Any]) -> None:
    slow = engine.options.with_changes({"threshold": 1.0, "max_new_tokens": 400})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "options", slow)
        with served(engine) as site:
            page = visit(site.url)
            page.fill("#question", QUESTION)
            page.press("#question", "Enter")
            page.wait_for_selector(".canvas .token")
            assert page.locator("#send").inner_text() == "Stop"
            page.keyboard.press("Escape")
            page.wait_for_selector("text=Stopped.")
            wait_for(lambda: site.metric("pdllm_questions_running") == 0)
            assert site.metric("pdllm_nfe_total") == 0


def test_a_busy_server_can_be_asked_again_when_it_said(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    body = '{"error": {"message": "32 questions are waiting", "type": "rate_limit_error", "code": "busy"}}'
    page.route("**/v1/qa", lambda route: route.fulfill(status=429, headers={"Retry-After": "1"}, body=body), times=1)
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    button = page.locator("#answers .notice button")
    assert button.is_disabled()
    page.wait_for_selector("#answers .notice button:enabled")
    button.click()
    page.wait_for_selector("article .facts")


def test_a_server_that_is_gone_is_told_of(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url, may_say="ERR_FAILED")
    page.route("**/v1/qa", lambda route: route.abort(), times=1)
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    page.wait_for_selector("text=The server cannot be reached.")
    page.get_by_text("Try again").click()
    page.wait_for_selector("article .facts")


def test_settings_are_used_and_remembered(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    page.click("#open-settings")
    page.locator("#k").fill("1")
    page.select_option("#theme", "dark")
    page.select_option("#decoder", "vanilla")
    assert page.locator("#policy").is_disabled()
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/qa") as sent:
        article = ask(page)
    assert sent.value.post_data_json | {"k": 1, "decoder": "vanilla"} == sent.value.post_data_json
    assert article.locator(".cite").count() <= 1
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_everything_can_be_reached_and_is_named_without_a_mouse(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    ask(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, progress, meter, dialog, [role=img]")]
          .filter(e => !(e.labels?.length || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
            || e.textContent.trim())).map(e => e.outerHTML)"""
    )
    assert nameless == []
    page.click("h1")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"send", "cite", "add", "open", "delete quiet", "open-settings"} <= reached
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(site: Site, visit: Callable[..., Any], scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 for text, measured on what is on the page."""
    page = visit(site.url, color_scheme=scheme)
    ask(page)
    page.click("#open-settings")
    ratios = page.evaluate(
        """() => {
          const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
          const rgb = (colour) => { canvas.fillStyle = "#000"; canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
          const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
          const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
            if (c[3] === 255) return c; } return [255, 255, 255]; };
          return [...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(n => n.nodeType === 3
            && n.textContent.trim()) && e.checkVisibility({opacityProperty: true}) && !e.closest(".sr, .skip"))
            .map(e => { const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
              return [(a + .05) / (b + .05), e.className || e.tagName]; });
        }"""
    )
    assert len(ratios) > 30
    assert [(round(ratio, 2), name) for ratio, name in ratios if ratio < 4.5] == []


def test_a_phone_scrolls_one_way_only_and_opens_the_documents(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url, size=PHONE, has_touch=True, is_mobile=True)
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator("#documents").is_visible()
    page.click("#open-documents")
    assert page.locator("#documents").is_visible()
    page.locator("#list").get_by_text("kites.txt").click()
    page.wait_for_selector("#source-note >> text=characters")
    assert page.evaluate("document.getElementById('source').getBoundingClientRect().width <= innerWidth")
    page.click("#source [data-close]")
    page.click("#close-documents")
    assert not page.locator("#documents").is_visible()


def test_the_page_asks_nobody_but_its_server(site: Site, visit: Callable[..., Any]) -> None:
    page = visit("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("/", "/docs"):
        page.goto(f"{site.url}{path}")
        page.wait_for_load_state("networkidle")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((site.url, "data:"))] == []


def test_the_api_is_described_and_can_be_tried(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(f"{site.url}/docs")
    page.wait_for_selector(".route")
    paths = page.locator(".route summary code").all_inner_texts()
    assert {"/v1/qa", "/v1/chat/completions", "/v1/documents/{doc_id}", "/metrics"} <= set(paths)
    page.locator("summary", has_text="/v1/qa").click()
    page.locator(".route[open] textarea").fill('{"question": "boat"}')
    page.locator(".route[open]").get_by_role("button", name="Send").click()
    page.wait_for_selector(".route[open] pre >> text=citations")


@pytest.mark.slow
def test_the_picture_of_the_readme(demo_model: LoadedModel, tmp_path: Path, visit: Callable[..., Any]) -> None:
    """Kept in docs/pictures if PDLLM_PICTURES is set."""
    handbook = tmp_path / "handbook"
    for name in ("people/leave-policy-2024.md", "people/leave-policy-2025.md", "products/warranty-terms.txt"):
        (handbook / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples" / "handbook" / name, handbook / name)
    options = {"max_bytes": 250_000_000}
    with RagEngine.open(tmp_path / "kb", demo_model, store_options=options) as engine, served(engine) as site:
        engine.prefill([handbook])
        page = visit(site.url, size={"width": 1180, "height": 760})
        article = ask(page, "How many days of paid annual leave does a full-time employee get under the 2025 policy?")
        article.locator(".replay summary").click()
        article.locator(".replay input").fill("1")
        page.mouse.move(0, 0)
        picture = tmp_path / "page.png"
        page.screenshot(path=picture)
        assert 10_000 < picture.stat().st_size < 200_000
        if os.environ.get("PDLLM_PICTURES"):
            shutil.copy(picture, ROOT / "docs" / "pictures" / "page.png")
