"""What exchanges are made from: passages with questions, evidence sentences with questions, and prose.

Files are read by what is in them, `.jsonl` (rows) and `.txt` (prose, a blank line between paragraphs), plain or `.gz`:

- `context`, `question`, `answer`: a question; free-form where the answer does not stand in the context;
- `context`, `instruction`, `response`: the same, or evidence where the response is one sentence of the context;
- `context`, `question`, no answer or an empty one: a question that the context does not answer.

`source` is optional in each row and chooses its weight (`Recipe.source_weights`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pdllm_rag.training.texts.words import sentences, shingles

MAX_SHARED = 0.2  # share of a text's shingles in excluded texts from which it is left out
_PROSE_CHARS = (350, 1100)  # of a passage of prose: joined until it has the first, cut before the second
_SUFFIXES = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz")


class Row(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class Evidence(NamedTuple):
    """A question and the sentence that answers it."""

    question: str
    sentence: str
    source: str


@dataclass(frozen=True)
class Passage:
    """A text and what is asked of it."""

    text: str
    source: str
    rows: tuple[Row, ...] = ()  # answers stand in the text
    free: tuple[Row, ...] = ()  # answers do not stand in it word by word, or are long
    misses: tuple[str, ...] = ()  # questions that it does not answer


@dataclass(frozen=True)
class Corpus:
    """All that was read, in the files' order; `n_excluded` texts were left out as known to excluded files."""

    passages: tuple[Passage, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    prose: tuple[str, ...] = ()
    n_excluded: int = 0

    @classmethod
    def read(cls, paths: Sequence[Path | str], *, exclude: Sequence[Path | str] = ()) -> Corpus:
        """Read files, and the files of folders in the order of their names.

        `exclude` names files (also `.json` of any form) of which no text may be trained on: a text that shares a
        fifth of its 8-word runs with them is left out.

        Raises:
            FileNotFoundError: no such path, or no file of a known kind in a folder.
            ValueError: a row that is none of the three forms, or a file of another kind.
        """
        reading = _Reading()
        for path in data_files(paths):
            if ".jsonl" in path.suffixes:
                for place, row in _rows(path):
                    reading.add(place, row)
            else:
                reading.prose += _prose(_text(path))
        corpus = reading.corpus()
        if not exclude:
            return corpus
        known: set[str] = set()
        for path in map(Path, exclude):
            for text in _all_texts(path):
                known |= shingles(text)
        return corpus.without(known)

    def without(self, known: set[str]) -> Corpus:
        """The corpus less the texts that share a fifth of their shingles with `known`."""

        def is_new(text: str) -> bool:
            own = shingles(text)
            return len(own & known) < MAX_SHARED * len(own)

        passages = tuple(passage for passage in self.passages if is_new(passage.text))
        evidence = tuple(one for one in self.evidence if is_new(one.sentence))
        prose = tuple(text for text in self.prose if is_new(text))
        kept, had = len(passages) + len(evidence) + len(prose), self.n_texts
        return Corpus(passages, evidence, prose, self.n_excluded + had - kept)

    def split(self, share: float = 0.02) -> tuple[Corpus, Corpus]:
        """What to train on, and what is held out: by a hash of each text, so that it stays the same.

        Training texts that share a fifth of their shingles with a held-out one are left out. Other paragraphs of a
        held-out text's article stay in: the split is by passage, not by topic.
        """

        def is_held(text: str) -> bool:
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()
            return int.from_bytes(digest, "big") < share * 2**32

        held = Corpus(
            tuple(passage for passage in self.passages if is_held(passage.text)),
            tuple(one for one in self.evidence if is_held(one.sentence)),
            tuple(text for text in self.prose if is_held(text)),
        )
        known: set[str] = set()
        for text in held.texts():
            known |= shingles(text)
        return replace(self.without(known), n_excluded=self.n_excluded), held

    @property
    def n_texts(self) -> int:
        """Passages, evidence sentences and passages of prose."""
        return len(self.passages) + len(self.evidence) + len(self.prose)

    @property
    def n_samples(self) -> int:
        """Questions, answered or not, and passages of prose."""
        asked = sum(len(one.rows) + len(one.free) + len(one.misses) for one in self.passages)
        return asked + len(self.evidence) + len(self.prose)

    def texts(self) -> Iterator[str]:
        """All texts."""
        yield from (passage.text for passage in self.passages)
        yield from (one.sentence for one in self.evidence)
        yield from self.prose


@dataclass
class _Reading:
    """Rows gathered by their contexts."""

    passages: dict[str, Passage] = field(default_factory=dict)
    evidence: dict[Evidence, None] = field(default_factory=dict)
    prose: list[str] = field(default_factory=list)

    def add(self, place: str, row: dict[str, Any]) -> None:
        context, question = row.get("context"), row.get("question", row.get("instruction"))
        answer, source = row.get("answer", row.get("response", "")), row.get("source", "")
        texts = (context, question, answer, source)
        if not all(isinstance(text, str) for text in texts) or not context or not question:
            raise ValueError(
                f"{place} has the fields {', '.join(sorted(row))}; expected texts context, question and (unless the "
                "context does not answer it) answer, or context, instruction and response"
            )
        if "response" in row and answer in context.split("\n") + sentences(context):
            self.evidence[Evidence(question.strip(), answer.strip(), source)] = None
            return
        passage = self.passages.get(context) or Passage(context, source)
        new = Row(question.strip(), answer.strip(" \n,;"))
        if not answer.strip():
            passage = replace(passage, misses=(*passage.misses, new.question))
        elif new.answer in context and "response" not in row:
            passage = replace(passage, rows=(*passage.rows, new))
        else:
            passage = replace(passage, free=(*passage.free, new))
        self.passages[context] = passage

    def corpus(self) -> Corpus:
        return Corpus(tuple(self.passages.values()), tuple(self.evidence), tuple(self.prose))


def data_files(paths: Sequence[Path | str]) -> Iterator[Path]:
    """The files that `Corpus.read` reads, those of a folder by name. Raises as it does."""
    for path in map(Path, paths):
        found = [path]
        if path.is_dir():
            found = [inner for inner in sorted(path.iterdir()) if inner.name.endswith(_SUFFIXES)]
            if not found:
                raise FileNotFoundError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}")
        for file in found:
            if not file.name.endswith(_SUFFIXES):
                raise ValueError(f"{file} is of no known kind; expected {', '.join(_SUFFIXES)}")
            yield file


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is no JSON ({error}); expected one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place} is {type(row).__name__}; expected one object a line")
        yield place, row


def _prose(text: str) -> list[str]:
    """Paragraphs joined to passages, none across a heading (a paragraph without a full stop)."""
    fewest, most = _PROSE_CHARS
    passages, held = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        part = paragraph.strip()
        if not part.endswith((".", "!", "?", '"', "”", ":")) or len(part) > most:
            held = ""
            continue
        held = f"{held}\n{part}" if held else part
        if fewest <= len(held) <= most:
            passages.append(held)
        if len(held) >= fewest:
            held = ""
    return passages


def _all_texts(path: Path) -> Iterable[str]:
    """Every text in a file of JSON, of rows, or of prose."""
    if ".jsonl" in path.suffixes:
        return (text for _, row in _rows(path) for text in _strings(row))
    if ".json" in path.suffixes:
        return _strings(json.loads(_text(path)))
    return re.split(r"\n\s*\n", _text(path))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
