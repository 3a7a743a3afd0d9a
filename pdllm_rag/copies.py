"""Copies of stored chunks in another text: where they stand, and of which chunks they are.

- a copy is the whole text of a chunk; only its white space may differ (`squeezing`);
- it may stand anywhere, unless it has fewer than `ANCHOR_SIGNS` signs: then it must fill lines (a label before it does
  not count), or follow a copy of the chunk before it in its document. A few words of a question are no copy of a chunk
  that happens to consist of them;
- where copies overlap, those are taken that cover most of the text, and of these the fewest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pdllm_store import (
    ChunkId,
    ChunkRef,
    ChunkStore,
    Document,
    DocumentNotFoundError,
    ModelFingerprint,
    RecordDamagedError,
)

from pdllm_rag.first_stage import BM25Index
from pdllm_rag.lexical_tables import LexicalTables
from pdllm_rag.squeezing import ANCHOR_SIGNS, Imprint, Squeezed, hashed, signs_of, squeeze

MAX_PLACES = 8  # documents with one and the same chunk whose next chunk is looked for behind it

_Run = tuple[int, int]  # signs [start, end) of the text
_Chain = tuple["_Chain", _Run] | None


class Copy(NamedTuple):
    """A copy of a chunk: code points [start, end) of the text that it stands in."""

    start: int
    end: int
    chunk_id: ChunkId


class Copies:
    """Finds copies of the chunks of one store and model."""

    def __init__(self, store: ChunkStore, fingerprint: ModelFingerprint, index: BM25Index) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._index = index

    def find(self, text: str) -> list[Copy]:
        """The copies in a text, from left to right; none overlaps another."""
        squeezed = squeeze(text)
        spots: dict[int, list[_Run]] = defaultdict(list)  # by hash: signs that a chunk, or its anchor, may be
        for start in squeezed.beginnings():
            if start + ANCHOR_SIGNS <= len(squeezed.signs):
                spots[hashed(squeezed.signs[start : start + ANCHOR_SIGNS])].append((start, start + ANCHOR_SIGNS))
        for start, end in _short_lines(text, squeezed):
            spots[hashed(squeezed.signs[start:end])].append((start, end))
        matches = self._index.ask(lambda tables: _matches(tables, squeezed.signs, spots))
        runs = self._confirmed(matches, squeezed.signs)
        return [
            Copy(squeezed.starts[start], squeezed.ends[end - 1], runs[start, end])
            for start, end in _covering_most(runs)
        ]

    def signs(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, str]:
        """The signs of those of the chunks that documents in the store refer to."""
        found = {}
        for ref in self._index.refs_of(chunk_ids):
            document = self._document(ref.doc_id)
            if document is not None and ref in document.chunks:
                found[ref.chunk_id] = signs_of(document.text[ref.char_start : ref.char_end])
        return found

    def _confirmed(self, matches: Iterable[tuple[_Run, ChunkRef]], signs: str) -> dict[_Run, ChunkId]:
        """The matches whose stored text stands there, and the chunks behind them that follow in the text as well."""
        documents: dict[str, Document | None] = {}
        runs: dict[_Run, ChunkId] = {}
        seen: set[tuple[str, int, int]] = set()
        for run, ref in matches:
            if ref.doc_id not in documents:
                documents[ref.doc_id] = self._document(ref.doc_id)
            document = documents[ref.doc_id]
            if document is None or ref not in document.chunks:
                continue  # changed since the index was asked
            start = run[0]
            for following in document.chunks[ref.ordinal :]:
                place = (ref.doc_id, following.ordinal, start)
                stored = signs_of(document.text[following.char_start : following.char_end])
                if place in seen or not signs.startswith(stored, start):
                    break
                seen.add(place)
                runs.setdefault((start, start + len(stored)), following.chunk_id)
                start += len(stored)
        return runs

    def _document(self, doc_id: str) -> Document | None:
        try:
            return self._store.document(self._fingerprint, doc_id)
        except (DocumentNotFoundError, RecordDamagedError):
            return None


def _matches(tables: LexicalTables, signs: str, spots: Mapping[int, list[_Run]]) -> list[tuple[_Run, ChunkRef]]:
    """Where the hash of a chunk fits, in document order."""
    numbers: dict[Imprint, list[int]] = defaultdict(list)
    for number, imprint in tables.imprints(list(spots)):
        numbers[imprint].append(number)
    digest = cache(lambda start, n_signs: hashed(signs[start : start + n_signs]))
    found: dict[int, list[_Run]] = defaultdict(list)
    for imprint, same in numbers.items():
        for start, end in spots[imprint.anchor]:
            is_short = imprint.n_signs < ANCHOR_SIGNS
            fits = end - start == imprint.n_signs if is_short else start + imprint.n_signs <= len(signs)
            if fits and digest(start, imprint.n_signs) == imprint.digest:
                for number in same[:MAX_PLACES]:
                    found[number].append((start, start + imprint.n_signs))
    return [(run, ref) for number, ref in tables.refs(list(found)) for run in found[number]]


def _short_lines(text: str, squeezed: Squeezed) -> Iterator[_Run]:
    """Runs of whole lines with fewer than `ANCHOR_SIGNS` signs."""
    n = len(squeezed.signs)
    gaps = [text[a:b] for a, b in zip([0, *squeezed.ends], [*squeezed.starts, len(text)], strict=True)]
    breaks = {at for at, gap in enumerate(gaps) if "\n" in gap or "\r" in gap} | {0, n}
    labels = {at for at in range(1, n) if squeezed.signs[at - 1] == ":" and gaps[at]}
    for start in sorted(breaks | labels):
        for end in range(start + 1, min(start + ANCHOR_SIGNS, n + 1)):
            if end in breaks:
                yield start, end


def _covering_most(runs: Iterable[_Run]) -> list[_Run]:
    """Runs of which none overlaps another and that hold the most signs, in order."""
    ordered = sorted(runs, key=lambda run: run[1])
    ends = [end for _, end in ordered]
    best: list[tuple[int, int, _Chain]] = [(0, 0, None)]  # of the first runs: signs, minus their number, the runs
    for number, (start, end) in enumerate(ordered):
        n_signs, n_runs, chain = best[bisect_right(ends, start, 0, number)]
        taken = (n_signs + end - start, n_runs - 1, (chain, (start, end)))
        best.append(max(best[number], taken, key=lambda one: one[:2]))
    chosen: list[_Run] = []
    chain = best[-1][2]
    while chain is not None:
        chain, run = chain
        chosen.append(run)
    return chosen[::-1]
