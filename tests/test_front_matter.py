"""The YAML block at the top of a Markdown file is metadata; a text that begins with a rule is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import MemoryStore

from pdllm_rag import LoadedModel, RagEngine
from pdllm_rag.errors import EmptyDocumentError, UnreadableDocumentError
from pdllm_rag.front_matter import MAX_CHARS, parted
from pdllm_rag.readers import parse

BOAT = "---\ntitle: The boat\ntags: [sea, \u00f8l]\nyear: 2025\nwhen: 2025-03-01\n---\n# Boat\n\nIt sails.\n"


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64) as opened:
        yield opened


def metadata(engine: RagEngine, doc_id: str) -> dict[str, object]:
    return dict(engine.store.document(engine.fingerprint, doc_id).metadata)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("---\ntitle: A\n---\n", {"title": "A"}),
        ("---\r\ntitle: A\r\n---\r\n", {"title": "A"}),
        ("---  \n# why\ntitle: A\n...\n", {"title": "A"}),
        (
            '---\n"two words": 1\nnested: {a: [1, null]}\n---\n',
            {"two words": 1, "nested": {"a": [1, None]}},
        ),
        ("---\nwhen: 2025-03-01\nat: 2025-03-01 10:00:00\n---\n", {"when": "2025-03-01", "at": "2025-03-01T10:00:00"}),
        ("---\nlist:\n- a\n- b\n---\n", {"list": ["a", "b"]}),
        ("---\n---\n", {}),
        ("---\nabout:\n---\n", {"about": None}),
    ],
)
def test_front_matter_is_metadata_and_no_part_of_the_text(block: str, expected: dict[str, object]) -> None:
    for rest in ("Body.\n", "\n---\ntitle: not this one\n---\n"):
        source = parse((block + rest).encode(), name="a.md")
        assert (dict(source.front_matter), source.text) == (expected, rest)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "---\n\nA text below a rule.\n"),
        ("a.md", "---\n\ntitle: A\n---\n"),
        ("a.md", "---\nWords between\n---\nrules.\n"),
        ("a.md", "---\n# A heading\n\nnote: this\n---\n"),
        ("a.md", "---\nhttps://example.org is a place\n---\n"),
        ("a.md", "----\ntitle: A\n----\n"),
        ("a.md", " ---\ntitle: A\n---\n"),
        ("a.md", "\n---\ntitle: A\n---\n"),
        ("a.md", "Text\n---\ntitle: A\n---\n"),
        ("a.txt", "---\ntitle: A\n---\nBody.\n"),
        ("a.rst", "---\ntitle: A\n---\nBody.\n"),
    ],
)
def test_a_text_that_begins_with_a_rule_is_kept_whole(name: str, text: str) -> None:
    source = parse(text.encode(), name=name)
    assert (dict(source.front_matter), source.text) == ({}, text)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("---\ntitle: A\n\nBody.\n", 1, "is not closed"),
        (f"---\ntitle: {'A' * MAX_CHARS}\n---\n", 1, "is not closed by a line of dashes within 65,536 characters"),
        ("---\ntitle: A\nnote: one: two\n---\n", 3, "mapping values are not allowed"),
        ("---\ntitle: [A\n---\n", 3, "expected ',' or ']'"),
        ("---\nkey:\tvalue\n---\n", 2, "cannot start any token"),
        ("---\na: &x [1]\nb: *x\n---\n", 3, "aliases"),
        ("---\na: &x [*x]\n---\n", 2, "aliases"),
        (f"---\na: {'[' * 9000}{']' * 9000}\n---\n", 1, "nested too deeply"),
        ("---\na: !!python/object/apply:os.getcwd []\n---\n", 2, "could not determine a constructor"),
        ("---\nwhen: 2025-02-30\n---\n", 1, "day is out of range"),
        ("---\n2025: A\n---\n", 1, "the key 2025; expected text"),
        ("---\na: .nan\n---\n", 1, "not JSON compliant"),
        ('---\na: "\\ud800"\n---\n', 1, "surrogates not allowed"),
        ("---\na: !!binary aGk=\n---\n", 1, "bytes"),
        ("---\na: !!bool x\n---\n", 1, "KeyError"),
        ('---\na: !!int ""\n---\n', 1, "IndexError"),
        ("---\na: !!timestamp x\n---\n", 1, "AttributeError"),
        ("---\na: \x01\n---\n", 2, "signs that YAML does not admit"),
    ],
)
def test_malformed_front_matter_says_file_line_and_what_to_do(text: str, line: int, problem: str) -> None:
    with pytest.raises(UnreadableDocumentError, match=rf"^notes/a\.md: line {line}: the front matter ") as raised:
        parse(text.encode(), name="notes/a.md")
    assert problem in str(raised.value)
    assert "put an empty line below it" in str(raised.value)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab12:-.,[]{}!&*#|>'\"? \n\t\r\u00e9", max_size=40))
def test_whatever_stands_there_is_kept_or_refused_and_no_word_behind_it_is_lost(block: str) -> None:
    text = f"---\na: {block}\n---\nBody.\n"
    with contextlib.suppress(UnreadableDocumentError):
        found, rest = parted(text, "a.md")
        assert "a" in found
        assert text.endswith(rest)
        assert rest.endswith("Body.\n")


def test_front_matter_alone_is_no_document() -> None:
    with pytest.raises(EmptyDocumentError, match=r"a\.md"):
        parse(b"---\ntitle: A\n---\n\n", name="a.md")


def test_a_folder_is_read_with_what_its_files_say_and_where_they_lie(engine: RagEngine, tmp_path: Path) -> None:
    for name, text in {"sea/boat.MD": BOAT, "plain.txt": "No more.\n", "bad.md": "---\na: [1\n---\nBad.\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    report = engine.prefill([tmp_path])
    assert (report.added, [failure.path for failure in report.failed]) == (2, ["bad.md"])
    assert report.failed[0].reason.startswith("line 3: the front matter is no YAML")
    assert engine.store.document(engine.fingerprint, "sea/boat.MD").text == "# Boat\n\nIt sails.\n"
    assert metadata(engine, "plain.txt") == {"media_type": "text/plain", "folder": "", "suffix": ".txt"}
    assert metadata(engine, "sea/boat.MD") == {
        "title": "The boat",
        "tags": ["sea", "\u00f8l"],
        "year": 2025,
        "when": "2025-03-01",
        "media_type": "text/markdown",
        "folder": "sea",
        "suffix": ".md",
    }


def test_changed_front_matter_is_taken_over_without_computing_anything(engine: RagEngine, tmp_path: Path) -> None:
    file = tmp_path / "boat.md"
    file.write_text(BOAT)
    engine.prefill([file])
    assert engine.prefill([file]).unchanged == 1
    file.write_text(BOAT.replace("2025\n", "2026\n"))
    report = engine.prefill([file])
    assert (report.updated, report.chunks_computed) == (1, 0)
    assert metadata(engine, "boat.md")["year"] == 2026


def test_what_a_file_is_stands_above_what_it_says_of_itself(
    engine: RagEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.md").write_text("---\nfolder: secret\nowner: me\n---\nBody.\n")
    engine.prefill([tmp_path])
    assert metadata(engine, "a.md")["folder"] == ""
    assert "a.md: its front matter has ['folder']" in caplog.text


def test_a_shard_lets_go_of_a_file_that_went_to_another_by_its_front_matter(engine: RagEngine, tmp_path: Path) -> None:
    file = tmp_path / "boat.md"
    shards = {}
    for year in range(2000, 2040):  # its bytes decide, and no more than these are needed
        file.write_text(BOAT.replace("year: 2025", f"year: {year}"))
        report = engine.prefill([tmp_path], shard=(1, 2))
        shards[year] = report.added + report.updated
        held = [info.metadata["year"] for info in engine.documents()]
        assert held == ([year] if shards[year] else [])
    assert {0, 1} == set(shards.values())
