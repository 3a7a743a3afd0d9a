"""What was found of each question or sample, kept in a file, so that a run goes on where it was cut short."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any


class KeptRows:
    """Rows by what they are of, a JSON object per line of a file; a last line that was cut short is left out.

    Args:
        path: of the file; None keeps rows in memory only.
        run: what all rows of a file have in common, in JSON form.
        names: fields of a row whose values say what it is of.

    Raises:
        ValueError: the file holds rows of another run, or something else.
        OSError: it cannot be read or written.
    """

    def __init__(
        self, path: str | PathLike[str] | None, run: Mapping[str, Any], *, names: Sequence[str] = ("id", "question")
    ) -> None:
        self._path = None if path is None else Path(path)
        self._run = json.loads(json.dumps(dict(run)))
        self._names = tuple(names)
        self._rows: dict[tuple[str, ...], dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def __contains__(self, of: tuple[str, ...]) -> bool:
        return of in self._rows

    def __getitem__(self, of: tuple[str, ...]) -> dict[str, Any]:
        return self._rows[of]

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row.

        Raises:
            ValueError: there is one already of the same.
        """
        of = self._of(row)
        if of in self:
            raise ValueError(f"{self._names[-1]} {of[-1]!r} came twice; expected it once, or under ids of its own")
        self._rows[of] = dict(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                print(json.dumps({**row, "run": self._run}), file=lines)

    def _of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(row[name] for name in self._names)

    def _read(self, path: Path) -> None:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                of, run = self._of(row), dict(row.pop("run"))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}; expected a line of an earlier run") from error
            for name in {**run, **self._run}:
                if run.get(name) != self._run.get(name):
                    raise ValueError(
                        f"{path}, line {number}: of another run, with {name} {run.get(name)!r}, and it is "
                        f"{self._run.get(name)!r} now; name another file, or ask as before"
                    )
            self._rows[of] = row
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
