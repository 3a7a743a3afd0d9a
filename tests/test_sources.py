"""Which files a prefill takes, and under which document ids."""

import os
import sys
from pathlib import Path

import pytest
from pdllm_store.errors import DocumentConflictError

from pdllm_rag.sources import SourceList, find


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text", encoding="utf-8")


def ids(found: SourceList) -> list[str]:
    return [file.doc_id for file in found.files]


def test_a_folder_gives_relative_ids_in_sorted_order(tmp_path):
    write(tmp_path, "b.txt", "a/z.md", "a/b/c.html", "A.PDF", "a.rst")
    found = find([tmp_path])
    assert ids(found) == ["A.PDF", "a/b/c.html", "a/z.md", "a.rst", "b.txt"]
    assert found.problems == []
    assert found.files[1].source == os.path.realpath(tmp_path / "a/b/c.html")
    assert found == find([str(tmp_path) + "/"])


def test_a_file_goes_by_its_own_name_whatever_its_ending(tmp_path):
    write(tmp_path, "deep/down/notes.log", ".hidden.md")
    assert ids(find([tmp_path / "deep/down/notes.log", tmp_path / ".hidden.md"])) == [
        "notes.log",
        ".hidden.md",
    ]


def test_a_prefix_is_put_in_front(tmp_path):
    write(tmp_path, "x/a.md")
    assert ids(find([tmp_path], id_prefix="team/")) == ["team/x/a.md"]


def test_a_pattern_stands_for_what_it_matches(tmp_path):
    write(tmp_path, "b.md", "a.md", "c.txt", "sub/d.md")
    assert ids(find([f"{tmp_path}/*.md"])) == ["a.md", "b.md"]
    assert ids(find([f"{tmp_path}/**/*.md"])) == ["a.md", "b.md", "d.md"]
    assert ids(find([f"{tmp_path}/s*"])) == ["d.md"]
    missed = find([f"{tmp_path}/*.rst"])
    assert "matches nothing" in missed.problems[0].reason


def test_a_name_with_pattern_signs_is_taken_as_it_is(tmp_path):
    write(tmp_path, "a[1].md", "a1.md")
    assert ids(find([tmp_path / "a[1].md"])) == ["a[1].md"]


def test_dot_files_and_dot_folders_are_skipped(tmp_path):
    write(tmp_path, "a.md", ".b.md", ".git/c.md")
    found = find([tmp_path])
    assert ids(found) == ["a.md"]
    assert found.problems == []


def test_unsupported_endings_are_skipped_and_text_without_an_ending_is_taken(tmp_path):
    write(tmp_path, "README", "table.csv", "a.md")
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "cut").write_bytes(b"x" * 8191 + "é".encode())
    found = find([tmp_path])
    assert ids(found) == ["README", "a.md", "cut"]
    assert found.problems == []
    reasons = {Path(problem.path).name: problem.reason for problem in found.skipped}
    assert "'.csv' is not supported" in reasons["table.csv"]
    assert ".pdf" in reasons["table.csv"]
    assert "not UTF-8 text" in reasons["program"]


def test_a_missing_path_is_a_problem_and_the_others_are_taken(tmp_path):
    write(tmp_path, "a.md")
    found = find([tmp_path / "gone.md", tmp_path / "a.md"])
    assert ids(found) == ["a.md"]
    assert found.problems == [(str(tmp_path / "gone.md"), "no such file or folder")]


def test_one_file_reached_twice_is_taken_once(tmp_path):
    write(tmp_path, "sub/a.md")
    assert ids(find([tmp_path, tmp_path / "sub", tmp_path / "sub/a.md", tmp_path])) == ["sub/a.md"]


def test_two_files_with_one_id_are_an_error_that_names_both(tmp_path):
    write(tmp_path, "x/a.md", "y/a.md")
    with pytest.raises(DocumentConflictError, match="--id-prefix") as caught:
        find([tmp_path / "x", tmp_path / "y"])
    assert str(tmp_path / "x/a.md") in str(caught.value)
    assert str(tmp_path / "y/a.md") in str(caught.value)


def test_ids_are_composed_and_sources_keep_their_spelling(tmp_path):
    write(tmp_path, "cafe\u0301/re\u0301sume\u0301.md")
    if sys.platform == "darwin":
        pytest.skip("the file system itself normalises names")
    file = find([tmp_path]).files[0]
    assert file.doc_id == "caf\u00e9/r\u00e9sum\u00e9.md"
    assert "e\u0301" in file.source
    write(tmp_path, "caf\u00e9/r\u00e9sum\u00e9.md")
    with pytest.raises(DocumentConflictError):
        find([tmp_path])


def test_links_are_followed_within_the_folder_only(tmp_path):
    write(tmp_path, "out/secret.md", "in/a.md", "in/.data/b.md", "in/.data/sub/c.md")
    root = tmp_path / "in"
    (root / "AA.md").symlink_to("a.md")  # the file itself is found: its own name wins
    (root / "b.md").symlink_to(".data/b.md")
    (root / "sub").symlink_to(".data/sub")
    (root / "escape.md").symlink_to(tmp_path / "out/secret.md")
    (root / "escape").symlink_to(tmp_path / "out")
    (root / "broken.md").symlink_to("nowhere")
    found = find([root])
    assert ids(found) == ["a.md", "b.md", "sub/c.md"]
    reasons = {Path(problem.path).name: problem.reason for problem in found.problems}
    assert "leaves the folder" in reasons["escape"]
    assert "leaves the folder" in reasons["escape.md"]
    assert reasons["broken.md"] == "the link leads nowhere"


def test_link_loops_end(tmp_path):
    write(tmp_path, "a/b/x.md")
    (tmp_path / "a/b/up").symlink_to(tmp_path)
    (tmp_path / "a/self").symlink_to("self")
    found = find([tmp_path])
    assert ids(found) == ["a/b/x.md"]
    assert [problem.reason for problem in found.problems] == ["the link leads nowhere"]


def test_a_linked_folder_may_be_an_argument(tmp_path):
    write(tmp_path, "real/a.md")
    (tmp_path / "link").symlink_to("real")
    assert ids(find([tmp_path / "link"])) == ["a.md"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system of bytes")
def test_undecodable_names_are_printable_problems(tmp_path):
    write(tmp_path, "a.md")
    bad = os.fsdecode(b"caf\xe9.md")
    (tmp_path / bad).write_text("text")
    for found in (find([tmp_path]), find([tmp_path / bad, tmp_path / "a.md"])):
        assert ids(found) == ["a.md"]
        assert found.problems[0].path.endswith("caf\\xe9.md")
        found.problems[0].reason.encode()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_a_problem_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe")
    found = find([tmp_path, tmp_path / "pipe"])
    assert [p.reason for p in found.skipped] == ["is not a regular file", "is not a regular file"]
    assert [p.reason for p in found.problems] == ["is neither a regular file nor a folder"]
