"""The Python of the pages: the README's runs as it is pasted, the others' compiles and imports what there is."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from serving import served

from pdllm_rag import RagEngine

ROOT = Path(__file__).parent.parent
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"(pdllm_rag|pdllm_store|langchain_pdllm)\b|llama_index\.\w+\.pdllm\b")
README = PYTHON.findall((ROOT / "README.md").read_text())
SNIPPETS = [
    (page, n, text)
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for n, text in enumerate(PYTHON.findall(page.read_text()))
]


@pytest.fixture
def handbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of the handbook, in a folder to paste snippets in."""
    for name in ("people/leave-policy-2025.md", "offices/porto.md"):
        target = tmp_path / "examples/handbook" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples/handbook" / name, target)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("handbook")
def test_the_snippets_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, on the bundled model; the last one asks a server that is there."""
    *local, asking = README
    assert "openai" in asking
    assert all(len(text.splitlines()) < 10 for text in README)
    space: dict[str, Any] = {}
    for text in local:
        exec(compile(text, "a snippet of README.md", "exec"), space)
    report = space["report"]
    assert report.added == 2
    assert not report.failed
    with RagEngine.open("kb") as engine, served(engine) as site:
        assert "http://127.0.0.1:8000" in asking
        exec(compile(asking.replace("http://127.0.0.1:8000", site.url), "a snippet of README.md", "exec"), space)
    _, _, pasted, handed, _ = capsys.readouterr().out.splitlines()
    assert "'recomputed': 0" in pasted
    assert "'recognised': 4" in pasted
    assert "'recomputed': 0" in handed


def missing(text: str) -> list[str]:
    """Modules and names of ours that a text imports and that do not exist."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", alias.name) for alias in node.names]
        else:
            wanted = [(alias.name, "__name__") for alias in node.names] if isinstance(node, ast.Import) else []
        for module, name in wanted:
            if OURS.match(module) and not hasattr(importlib.import_module(module), name):
                found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: f"{snippet[0].relative_to(ROOT)}-{snippet[1]}")
def test_the_snippets_of_the_docs_compile_and_import_what_there_is(snippet: tuple[Path, int, str]) -> None:
    page, _, text = snippet
    compile(text, str(page), "exec")
    assert not missing(text)


def test_a_name_that_does_not_exist_is_found() -> None:
    assert missing("from langchain_pdllm import ChatPDLLM, Nothing") == ["langchain_pdllm.Nothing"]
    with pytest.raises(ModuleNotFoundError):
        missing("import pdllm_rag.nothing")


def test_the_store_by_itself_runs_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = PYTHON.findall((ROOT / "docs/store.md").read_text())
    exec(compile(text, "the snippet of store.md", "exec"), {})
    assert capsys.readouterr().out == "1 True\n"
