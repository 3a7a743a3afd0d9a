"""What was found of each question, kept in a file, so that a run goes on where it was cut short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pdllm_rag.evaluation.qa import Question


class KeptRows:
    """Rows by question, a JSON object per line of a file; a last line that was cut short is left out.

    Args:
        path: of the file; None keeps rows in memory only.
        run: what all rows of a file have in common, in JSON form.

    Raises:
        ValueError: the file holds rows of another run, or something else.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: str | PathLike[str] | None, run: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._run = json.loads(json.dumps(dict(run)))
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def __contains__(self, question: Question) -> bool:
        return (question.id, question.text) in self._rows

    def __getitem__(self, question: Question) -> dict[str, Any]:
        return self._rows[question.id, question.text]

    def add(self, question: Question, row: Mapping[str, Any]) -> None:
        """Keep a question's row.

        Raises:
            ValueError: there is one already.
        """
        if question in self:
            raise ValueError(f"question {question.id!r} came twice; expected it once, or under ids of its own")
        self._rows[question.id, question.text] = dict(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                print(json.dumps({"id": question.id, "question": question.text, **row, "run": self._run}), file=lines)

    def _read(self, path: Path) -> None:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                key, run = (row["id"], row["question"]), row.pop("run")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}; expected a line of an earlier run") from error
            if run != self._run:
                raise ValueError(f"{path}, line {number}: of another run ({run}, not {self._run}); name another file")
            self._rows[key] = row
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
