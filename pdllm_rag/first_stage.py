"""BM25 over every chunk's text, by SQLite's FTS5: which few chunks are worth scoring.

The index lives in memory and follows the store: when the store's generation has moved, only the documents that changed
are taken out and put in. Words are case-folded, compatibility-normalised (composed, decomposed and full-width spellings
are one), accent-free and stemmed for English; scripts without spaces are indexed sign by sign.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import unicodedata
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkRef, ChunkStore, DocumentNotFoundError, ModelFingerprint, RecordDamagedError

logger = logging.getLogger(__name__)

TITLE_WEIGHT = 0.5


class Candidate(NamedTuple):
    """A chunk and its BM25 score (higher is better; 0.0 for a chunk that shares no word with the question)."""

    ref: ChunkRef
    score: float


class BM25Index:
    """A lexical index that is in step with its store whenever it is asked."""

    def __init__(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._rows: dict[int, ChunkRef] = {}
        self._documents: dict[str, tuple[object, list[int]]] = {}
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE chunks USING fts5(body, title, content='', contentless_delete=1, "
            "tokenize='porter unicode61 remove_diacritics 2')"
            if sqlite3.sqlite_version_info >= (3, 43)
            else "CREATE VIRTUAL TABLE chunks USING fts5(body, title, tokenize='porter unicode61 remove_diacritics 2')"
        )

    def search(self, question: str, n: int, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """The n best chunks, best first, ties in document order; chunks without a shared word fill up to n.

        A chunk that stands in several documents is listed once, where it ranks best.

        Args:
            doc_ids: only chunks of these documents.
        """
        with self._lock:
            self._follow()
            found: dict[ChunkId, Candidate] = {}
            for candidate in self._ranked(question):
                if len(found) == n:
                    break
                if doc_ids is None or candidate.ref.doc_id in doc_ids:
                    found.setdefault(candidate.ref.chunk_id, candidate)
            return list(found.values())

    def size(self) -> int:
        """Chunks indexed now."""
        with self._lock:
            self._follow()
            return len(self._rows)

    def chunk_ids(self) -> set[ChunkId]:
        """Chunks indexed now."""
        with self._lock:
            self._follow()
            return {ref.chunk_id for ref in self._rows.values()}

    @property
    def generation(self) -> int | None:
        """The store's generation that the index last followed."""
        return self._generation

    def close(self) -> None:
        """Free the index; it is empty afterwards."""
        with self._lock:
            self._database.close()

    def _ranked(self, question: str) -> Iterator[Candidate]:
        """Every chunk, those that share a word with the question first."""
        words = list(dict.fromkeys(folded(question).split()))
        seen = set()
        if words:
            query = " OR ".join(f'"{word}"' for word in words)
            rows = self._database.execute(
                f"SELECT -bm25(chunks, 1.0, {TITLE_WEIGHT}) AS score, rowid FROM chunks WHERE chunks MATCH ? "
                "ORDER BY score DESC",
                (query,),
            )
            for score, group in groupby(rows, key=lambda row: row[0]):
                for ref in sorted(self._rows[rowid] for _, rowid in group):
                    seen.add(ref)
                    yield Candidate(ref, score)
        for ref in sorted(self._rows.values()):
            if ref not in seen:
                yield Candidate(ref, 0.0)

    def _follow(self) -> None:
        generation = self._store.generation
        if generation == self._generation:
            return
        infos = self._store.documents(self._fingerprint)
        current = {info.doc_id: (info.text_id, info.recipe, info.chunk_ids) for info in infos}
        for doc_id in [d for d, (state, _) in self._documents.items() if current.get(d) != state]:
            _, rowids = self._documents.pop(doc_id)
            for rowid in rowids:
                self._database.execute("DELETE FROM chunks WHERE rowid = ?", (rowid,))
                del self._rows[rowid]
        for doc_id, state in current.items():
            if doc_id not in self._documents:
                try:
                    self._documents[doc_id] = (state, self._insert(doc_id))
                except DocumentNotFoundError:
                    continue  # deleted meanwhile; the generation has moved on, so the next call looks again
                except RecordDamagedError as error:
                    logger.warning("document %r is left out: %s", doc_id, error)
        self._generation = generation

    def _insert(self, doc_id: str) -> list[int]:
        document = self._store.document(self._fingerprint, doc_id)
        title = folded(doc_id)
        rowids = []
        for ref in document.chunks:
            body = folded(document.text[ref.char_start : ref.char_end])
            cursor = self._database.execute("INSERT INTO chunks(body, title) VALUES (?, ?)", (body, title))
            assert cursor.lastrowid is not None
            self._rows[cursor.lastrowid] = ref
            rowids.append(cursor.lastrowid)
        return rowids


def folded(text: str) -> str:
    """Text as words between blanks: NFKC, case-folded, everything but letters, digits and marks a blank."""
    pieces = []
    for sign in unicodedata.normalize("NFKC", text).casefold():
        if _stands_alone(sign):
            pieces.append(f" {sign} ")
        elif sign.isalnum() or unicodedata.combining(sign):
            pieces.append(sign)
        else:
            pieces.append(" ")
    return "".join(pieces)


def _stands_alone(sign: str) -> bool:
    """Whether a sign belongs to a script that is written without spaces between words."""
    point = ord(sign)
    return (
        0x2E80 <= point <= 0x9FFF  # CJK radicals to unified ideographs, kana among them
        or 0xF900 <= point <= 0xFAFF
        or 0x20000 <= point <= 0x3FFFF
        or 0x0E00 <= point <= 0x0EFF  # Thai, Lao
    )
