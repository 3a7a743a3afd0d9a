"""What the tests of the command line share: what a command did, and two small documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEXTS = {
    "leave.md": "Annual leave is 28 days. It is agreed with the team lead. Unused days expire in March.",
    "buoys/gannet.txt": "The Gannet buoy weighs 310 kilograms. Its battery lasts 18 months in cold water.",
}


class Outcome(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


Pdllm = Callable[..., Outcome]


def write_texts(folder: Path) -> Path:
    """Write both documents."""
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def one_line(outcome: Outcome) -> str:
    """The error line of a command that failed."""
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("pdllm: error: ")
    return outcome.err


def one_object(outcome: Outcome) -> dict[str, Any]:
    """The JSON object that is all of stdout."""
    assert outcome.out.count("\n") == 1
    content: dict[str, Any] = json.loads(outcome.out)
    return content
