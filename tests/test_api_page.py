"""docs/api.md is what docs/api.py makes of the source, and has something to say of every name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from test_public_names import NAMES

DOCS = Path(__file__).parent.parent / "docs"
API = runpy.run_path(str(DOCS / "api.py"))
BARE = re.compile(r"^(###.*)\n\n```py\n(?:(?!```|.*# ).*\n)+```\n\n(?=#|More of it|\Z)", re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> str:
    return str(API["page"]())


def test_the_page_is_what_its_script_makes(page: str) -> None:
    assert page == (DOCS / "api.md").read_text(encoding="utf-8"), "run `python docs/api.py`"


def test_all_public_names_stand_there(page: str) -> None:
    assert {*API["PACKAGES"]} == {*NAMES, "pdllm_store"}
    titles = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert not {name for names in NAMES.values() for name in names} - {*titles}


def test_every_name_has_a_docstring_or_a_comment(page: str) -> None:
    assert not BARE.findall(page + "\n")


def test_a_name_without_either_is_found() -> None:
    entries = [
        ("### f", "def f() -> None: ...", None),
        ("### g", "G = 1  # one", None),
        ("### h", "class h: ...", None),
    ]
    assert BARE.findall("\n".join([*(API["entry"](*one) for one in entries), ""])) == ["### f", "### h"]


def test_the_sections_of_a_docstring_become_lists() -> None:
    args = "Args:\n    a: first\n        line.\n    b, **c: see: there."
    shown = API["markdown"](f"Does.\n\n{args}\n\nRaises:\n    StoreError; ValueError for\n    a.\n\nSource: b.")
    assert [line for line in shown.splitlines() if line] == [
        "Does.", "Args:", "- `a`: first line.", "- `b, **c`: see: there.",
        "Raises:", "- StoreError; ValueError for a.", "Source: b.",
    ]  # fmt: skip
