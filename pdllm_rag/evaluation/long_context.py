"""Benchmarks of long contexts: their tasks and metrics as data, their samples from local files.

A task is a file NAME.jsonl with one sample a line: a text, a question over it, and the answers that are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

TAIL = 400  # characters at the end of a context
LETTERS = "ABCD"


class Sample(NamedTuple):
    """One question over one long text.

    query: what its chunks are chosen by.
    prompt: what stands behind them.
    answers: those that are right, or what its task's metric takes for one.
    choices: the classes or options that there are.
    """

    task: str
    id: str
    context: str
    query: str
    prompt: str
    answers: tuple[Any, ...]
    choices: tuple[str, ...]


class Task(NamedTuple):
    """How a task is asked and marked.

    prompt: what stands behind the chunks; {input} is the sample's, {options} its choices, a line each with its letter.
    metric: 0 to 1 of a prediction.
    max_new_tokens: most answer tokens, as its benchmark has them.
    query: what chunks are chosen by; {tail} is the end of the context. Where nothing comes of it, it is the prompt.
    """

    prompt: str
    metric: Callable[[str, Sample], float]
    max_new_tokens: int
    query: str = "{input}"


class Benchmark(NamedTuple):
    """Tasks by name, and the names of a row's fields: of its id, its answers and its choices."""

    name: str
    tasks: Mapping[str, Task]
    id_key: str
    answers_key: str
    choices_key: str


def task_files(benchmark: Benchmark, folder: str | PathLike[str], tasks: Sequence[str] | None) -> dict[str, Path]:
    """The file of each of these tasks, or of every task that has one.

    Raises:
        ValueError: an unknown task, one without a file, or no file at all.
    """
    files = {name: Path(folder) / f"{name}.jsonl" for name in tasks or benchmark.tasks}
    if unknown := [name for name in files if name not in benchmark.tasks]:
        raise ValueError(
            f"{benchmark.name} has no task {unknown[0]!r} here; expected some of {', '.join(benchmark.tasks)}"
        )
    found = {name: path for name, path in files.items() if path.is_file()}
    if missing := [path for path in files.values() if not path.is_file() and tasks]:
        raise ValueError(f"{missing[0]} is no file; expected a local copy of that task, one JSON object a line")
    if not found:
        names = ", ".join(f"{name}.jsonl" for name in list(files)[:3])
        raise ValueError(f"{folder} holds no task of {benchmark.name}; expected files such as {names}")
    return found


def read_samples(benchmark: Benchmark, files: Mapping[str, Path], *, limit: int | None = None) -> Iterator[Sample]:
    """The samples of each file in turn, the first `limit` of each; blank lines are skipped.

    Raises:
        ValueError: a line is malformed (named with its number), an id stands twice, or a file holds no samples.
        OSError: a file cannot be read.
    """
    for task, path in files.items():
        ids: set[str] = set()
        for number, line in _lines(path, limit):
            try:
                sample = _sample(benchmark, task, json.loads(line), number)
                if sample.id in ids:
                    raise ValueError(f"{benchmark.id_key} is {sample.id!r} again, expected another for each sample")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            ids.add(sample.id)
            yield sample
        if not ids:
            raise ValueError(f"{path} holds no samples; expected one JSON object a line")


def count_samples(files: Mapping[str, Path], *, limit: int | None = None) -> int:
    """How many samples `read_samples` gives."""
    return sum(1 for path in files.values() for _ in _lines(path, limit))


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    n_found = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and n_found == limit:
                return
            if line.strip():
                n_found += 1
                yield number, line


def _sample(benchmark: Benchmark, name: str, row: Any, number: int) -> Sample:
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}, expected a JSON object")
    context, given = row.get("context"), row.get("input", "")
    if not isinstance(context, str) or not context.strip():
        raise ValueError(f"context is {_named(context)}, expected some text")
    if not isinstance(given, str):
        raise ValueError(f"input is {_named(given)}, expected text")
    key = benchmark.answers_key
    answers = row.get(key) if isinstance(row.get(key), list) else [row.get(key)]
    if not answers or any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in answers):
        raise ValueError(f"{key} is {_named(row.get(key))}, expected a text or number, or a list of them")
    choices = row.get(benchmark.choices_key) or []
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"{benchmark.choices_key} is {_named(choices)}, expected a list of texts")
    task = benchmark.tasks[name]
    fields = {"input": given.strip(), "tail": context[-TAIL:], "options": _lettered(choices)}
    prompt = task.prompt.format(**fields)
    query = task.query.format(**fields).strip() or prompt
    return Sample(name, str(row.get(benchmark.id_key, number)), context, query, prompt, tuple(answers), tuple(choices))


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def _named(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (int, float)) else f"{type(value).__name__} {value!r:.60}"
