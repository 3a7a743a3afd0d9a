"""BM25 over every chunk's text, by SQLite's FTS5: which few chunks are worth scoring.

The index lies in the store's folder of derived files, or in memory, and follows the store: when the store's generation
has moved, only the documents that changed are taken out and put in. Words are case-folded, compatibility-normalised
(composed, decomposed and full-width spellings are one), accent-free and stemmed for English; scripts without spaces are
indexed sign by sign.
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import blake3
from pdllm_store import ChunkId, ChunkRef, ChunkStore, DocumentNotFoundError, ModelFingerprint, RecordDamagedError

from pdllm_rag.lexical_file import FileUnusableError, LexicalFile
from pdllm_rag.lexical_tables import LexicalTables, doc_key
from pdllm_rag.squeezing import imprint

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Candidate(NamedTuple):
    """A chunk and its score, of its stage's own kind: higher is better.

    Exactly 0.0 says that nothing speaks for the chunk (under BM25, it shares no word with the question).
    """

    ref: ChunkRef
    score: float


@runtime_checkable
class FirstStage(Protocol):
    """Proposes chunks for a question from what is cheaper to read than their KV."""

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """At most n distinct chunks, best first, of all documents or only of these."""
        ...


class BM25Index:
    """A lexical index that is in step with its store whenever it is asked."""

    def __init__(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._generation: int | None = None
        self._file_is_usable = True
        self._memory: LexicalTables | None = None
        self._memory_lock = threading.Lock()

    def search(self, question: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """The n best chunks, best first, ties in document order; chunks without a shared word fill up to n.

        A chunk that stands in several documents is listed once, where it ranks best.

        Args:
            doc_ids: only chunks of these documents.
        """
        words = list(dict.fromkeys(folded(question).split()))

        def best(tables: LexicalTables) -> list[Candidate]:
            found: dict[ChunkId, Candidate] = {}
            for candidate in _ranked(tables, words, doc_ids):
                if len(found) == n:
                    break
                found.setdefault(candidate.ref.chunk_id, candidate)
            return list(found.values())

        return self.ask(best)

    def size(self) -> int:
        """Chunks indexed now."""
        return self.ask(LexicalTables.size)

    def chunk_ids(self) -> set[ChunkId]:
        """Chunks indexed now."""
        return self.ask(LexicalTables.chunk_ids)

    def doc_ids(self) -> set[str]:
        """Documents indexed now."""
        return self.ask(lambda tables: {ref.doc_id for _, ref in tables.all_refs(None)})

    def refs_of(self, chunk_ids: Iterable[ChunkId]) -> list[ChunkRef]:
        """The first place of each distinct chunk in document order, in the order given; unknown ids are left out."""
        wanted = dict.fromkeys(chunk_ids)

        def first(tables: LexicalTables) -> list[ChunkRef]:
            return [ref for chunk_id in wanted if (ref := tables.first_ref(chunk_id)) is not None]

        return self.ask(first)

    @property
    def generation(self) -> int | None:
        """The store's generation that the index last followed."""
        return self._generation

    def close(self) -> None:
        """Free the memory of the index; its file stays."""
        with self._memory_lock:
            if self._memory is not None:
                self._memory.close()

    # -- in step -----------------------------------------------------------------------------------------------

    def ask(self, read: Callable[[LexicalTables], T]) -> T:
        """What `read` finds in tables that are in step with the store."""
        folder = self._store.derived_dir if self._file_is_usable else None  # asked each time: it may have been removed
        if folder is not None:
            try:
                return LexicalFile(folder, self._fingerprint.digest, read_only=self._store.read_only).ask(
                    self._is_current, self._follow, read
                )
            except FileUnusableError as error:
                logger.info("the lexical index is kept in memory: %s", error)
                self._file_is_usable = False
        with self._memory_lock:
            if self._memory is None:
                self._memory = LexicalTables.in_memory(self._fingerprint.digest)
            if not self._is_current(self._memory):
                with self._memory.transaction("IMMEDIATE"):
                    self._follow(self._memory)
            return read(self._memory)

    def _is_current(self, tables: LexicalTables) -> bool:
        generation = self._store.generation
        if not tables.follows(generation):
            return False
        self._generation = generation
        return True

    def _follow(self, tables: LexicalTables) -> None:
        if self._is_current(tables):
            return  # somebody else was faster
        generation = self._store.generation
        infos = self._store.documents(self._fingerprint)
        current = {info.doc_id: _digest(info.text_id, info.recipe, info.chunk_ids) for info in infos}
        expected = {doc_key(doc_id): digest for doc_id, digest in current.items()}
        held = tables.documents()
        for name, old in held.items():
            if expected.get(name) != old.digest:
                tables.delete(old.number)
        for doc_id, digest in current.items():
            known = held.get(doc_key(doc_id))
            if known is None or known.digest != digest:
                try:
                    self._insert(tables, doc_id, digest)
                except DocumentNotFoundError:
                    continue  # deleted meanwhile; the generation has moved on, so the next call looks again
                except RecordDamagedError as error:
                    logger.warning("document %r is left out: %s", doc_id, error)
        tables.set_generation(generation)
        self._generation = generation

    def _insert(self, tables: LexicalTables, doc_id: str, digest: bytes) -> None:
        document = self._store.document(self._fingerprint, doc_id)
        texts = ((ref, document.text[ref.char_start : ref.char_end]) for ref in document.chunks)
        chunks = ((ref, folded(text), imprint(text)) for ref, text in texts)
        tables.insert(doc_id, digest, folded(doc_id), chunks)


def _ranked(tables: LexicalTables, words: Sequence[str], doc_ids: Collection[str] | None) -> Iterator[Candidate]:
    """Every chunk, those that share a word with the question first."""
    allowed = None if doc_ids is None else tables.numbers_of(doc_ids)
    seen: set[int] = set()
    if words:
        for score, group in groupby(tables.matches(words), key=lambda match: match[0]):
            numbers = [number for _, number in group if allowed is None or number in allowed]
            for number, ref in tables.refs(numbers):
                seen.add(number)
                yield Candidate(ref, score)
    for number, ref in tables.all_refs(doc_ids):
        if number not in seen:
            yield Candidate(ref, 0.0)


def _digest(text_id: bytes, recipe: str, chunk_ids: Sequence[ChunkId]) -> bytes:
    """16 bytes that change with whatever of a document is indexed."""
    recipe_bytes = recipe.encode("utf-8", "surrogatepass")
    fields = (text_id, len(recipe_bytes).to_bytes(8, "little"), recipe_bytes, *chunk_ids)
    return blake3.blake3(b"".join(fields)).digest(16)


class _Folding(dict[int, str]):
    """What each code point becomes, for `str.translate`; filled as signs are met."""

    def __missing__(self, point: int) -> str:
        sign = chr(point)
        if _stands_alone(sign):
            folded_sign = f" {sign} "
        else:
            folded_sign = sign if sign.isalnum() or unicodedata.combining(sign) else " "
        self[point] = folded_sign
        return folded_sign


_FOLDING = _Folding()


def folded(text: str) -> str:
    """Text as words between blanks: NFKC, case-folded, everything but letters, digits and marks a blank."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_FOLDING)


def _stands_alone(sign: str) -> bool:
    """Whether a sign belongs to a script that is written without spaces between words."""
    point = ord(sign)
    return (
        0x2E80 <= point <= 0x9FFF  # CJK radicals to unified ideographs, kana among them
        or 0xF900 <= point <= 0xFAFF
        or 0x20000 <= point <= 0x3FFFF
        or 0x0E00 <= point <= 0x0EFF  # Thai, Lao
    )
