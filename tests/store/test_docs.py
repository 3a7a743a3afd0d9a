"""What the store's page says runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "1 True\n"


def test_every_call_of_the_page_exists() -> None:
    from pdllm_store import LMDBStore

    calls = set(re.findall(r"^\| `(\w+)\(", PAGE.read_text(), re.MULTILINE))
    assert len(calls) >= 12
    assert not [name for name in calls if not hasattr(LMDBStore, name)]
