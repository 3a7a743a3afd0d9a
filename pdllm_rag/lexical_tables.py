"""A lexical index as SQLite tables: FTS5 over folded words, and where the chunk behind each row stands.

- `documents` has a row for each indexed document, with a digest of what was indexed of it;
- `refs` has a row for each chunk of a document, under the number that its words have in `words`;
- `imprints` has under the same number what finds a copy of the chunk's text in another text (`squeezing`);
- `state` says for which model this is and which generation of the store it follows.

Document ids are kept as UTF-8 bytes: SQLite orders those as Python orders texts, and lone surrogates fit in. `words`
keeps the folded text, because nothing else lets every FTS5 forget a row and still rank the others rightly: with
`contentless_delete` the average length goes on counting deleted rows.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from pdllm_store import ChunkId, ChunkRef

from pdllm_rag.squeezing import Imprint

LAYOUT = 2  # raised whenever a table, the folding of words, or imprints, change their meaning
TITLE_WEIGHT = 0.5
_BATCH = 500  # parameters of one statement; SQLite's own limit is 32,766, or 999 in old builds

_SCHEMA = (
    "CREATE TABLE state (layout INTEGER, fingerprint BLOB, generation TEXT, unclean INTEGER)",
    "CREATE TABLE documents (id INTEGER PRIMARY KEY, doc_id BLOB NOT NULL UNIQUE, digest BLOB NOT NULL)",
    "CREATE TABLE refs (id INTEGER PRIMARY KEY, document INTEGER NOT NULL, ordinal INTEGER NOT NULL, "
    "chunk_id BLOB NOT NULL, char_start INTEGER NOT NULL, char_end INTEGER NOT NULL, page INTEGER, seal INTEGER)",
    "CREATE UNIQUE INDEX refs_by_place ON refs (document, ordinal)",
    "CREATE INDEX refs_by_chunk ON refs (chunk_id)",
    "CREATE TABLE imprints (id INTEGER PRIMARY KEY, anchor INTEGER, n_signs INTEGER, digest INTEGER)",
    "CREATE INDEX imprints_by_anchor ON imprints (anchor)",
    "CREATE VIRTUAL TABLE words USING fts5(body, title, tokenize='porter unicode61 remove_diacritics 2')",
)
_COLUMNS = "r.id, r.seal, d.doc_id, r.ordinal, r.chunk_id, r.char_start, r.char_end, r.page"
_BY_DOCUMENT = f"SELECT {_COLUMNS} FROM documents d CROSS JOIN refs r ON r.document = d.id"
_BY_NUMBER = f"SELECT {_COLUMNS} FROM refs r CROSS JOIN documents d ON d.id = r.document"
_IN_ORDER = "ORDER BY d.doc_id, r.ordinal"


class LexicalError(Exception):
    """SQLite cannot read or write the tables, or they are damaged or none of ours."""


class OldLayoutError(LexicalError):
    """The tables are ours, but of another version."""


class IndexedDocument(NamedTuple):
    """A row of `documents`."""

    number: int
    digest: bytes


class IndexedRef(NamedTuple):
    """A row of `refs`."""

    number: int
    ref: ChunkRef


class LexicalTables:
    """The tables behind one SQLite connection. Every method raises LexicalError."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def in_memory(cls, fingerprint: bytes) -> LexicalTables:
        """New tables that end with their connection and that any one thread at a time may use."""
        tables = cls(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        tables.create(fingerprint)
        return tables

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
        """All or nothing; what is read inside is one snapshot."""
        self.run(f"BEGIN {kind}")
        try:
            yield
            self.run("COMMIT")
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.rollback()

    # -- state -------------------------------------------------------------------------------------------------

    def are_new(self) -> bool:
        """Whether nothing at all was made here yet."""
        return next(self._rows("SELECT count(*) FROM sqlite_master")) == (0,)

    def create(self, fingerprint: bytes) -> None:
        for statement in _SCHEMA:
            self.run(statement)
        self.run("INSERT INTO state VALUES (?, ?, '', 0)", (LAYOUT, fingerprint))

    def check(self, fingerprint: bytes) -> None:
        """Raises LexicalError unless these are tables of this model and version."""
        layout, held, _, _ = self._state()
        if layout != LAYOUT:
            raise OldLayoutError(f"it has layout {layout!r}, this version reads {LAYOUT}")
        if held != fingerprint:
            raise LexicalError("it is of another model")

    def follows(self, generation: int) -> bool:
        """Whether this is the generation of the store that the tables were brought in step with."""
        return bool(self._state()[2] == str(generation))

    def set_generation(self, generation: int) -> None:
        self.run("UPDATE state SET generation = ?", (str(generation),))

    def are_unclean(self) -> bool:
        """Whether pages may still hold something of deleted documents."""
        return bool(self._state()[3])

    def set_clean(self) -> None:
        self.run("UPDATE state SET unclean = 0")

    def merge_words(self) -> None:
        """Merge all segments of the words into one: only so does every FTS5 drop the terms of deleted rows."""
        self.run("INSERT INTO words(words) VALUES ('optimize')")

    def _state(self) -> tuple[Any, ...]:
        state = next(self._rows("SELECT layout, fingerprint, generation, unclean FROM state"), None)
        if state is None:
            raise LexicalError("its state is lost")
        return state

    # -- documents ---------------------------------------------------------------------------------------------

    def documents(self) -> dict[bytes, IndexedDocument]:
        """What is indexed, by `doc_key` of the document id."""
        rows = self._rows("SELECT doc_id, id, digest FROM documents")
        return {doc_id: IndexedDocument(number, digest) for doc_id, number, digest in rows}

    def delete(self, document: int) -> None:
        """Take a document out, by its number."""
        for table, key in (("words", "rowid"), ("imprints", "id")):
            self.run(f"DELETE FROM {table} WHERE {key} IN (SELECT id FROM refs WHERE document = ?)", (document,))
        self.run("DELETE FROM refs WHERE document = ?", (document,))
        self.run("DELETE FROM documents WHERE id = ?", (document,))
        self.run("UPDATE state SET unclean = 1")

    def insert(self, doc_id: str, digest: bytes, title: str, chunks: Iterable[tuple[ChunkRef, str, Imprint]]) -> None:
        """Put in a document that is not there: its folded title, and its chunks with folded texts and imprints."""
        document = self.run("INSERT INTO documents (doc_id, digest) VALUES (?, ?)", (doc_key(doc_id), digest))
        for ref, body, imprint in chunks:
            number = self.run("INSERT INTO words (body, title) VALUES (?, ?)", (body, title))
            fields = (ref.ordinal, ref.chunk_id, ref.char_start, ref.char_end, ref.page)
            seal = _seal(number, doc_key(doc_id), *fields)
            self.run("INSERT INTO refs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (number, document, *fields, seal))
            self.run("INSERT INTO imprints VALUES (?, ?, ?, ?)", (number, *imprint))

    # -- reading -----------------------------------------------------------------------------------------------

    def size(self) -> int:
        (n,) = next(self._rows("SELECT count(*) FROM refs"))
        return int(n)

    def chunk_ids(self) -> set[ChunkId]:
        return {chunk_id for (chunk_id,) in self._rows("SELECT chunk_id FROM refs")}

    def matches(self, words: Sequence[str]) -> Iterator[tuple[float, int]]:
        """BM25 score (higher is better) and number of every row with one of the words, best first."""
        query = " OR ".join(f'"{word}"' for word in words)
        return self._rows(
            f"SELECT -bm25(words, 1.0, {TITLE_WEIGHT}) AS score, rowid FROM words WHERE words MATCH ? "
            "ORDER BY score DESC",
            (query,),
        )

    def refs(self, numbers: Sequence[int]) -> list[IndexedRef]:
        """The refs of these rows, in document order."""
        found: list[IndexedRef] = []
        for start in range(0, len(numbers), _BATCH):
            batch = numbers[start : start + _BATCH]
            marks = ", ".join("?" * len(batch))
            found += map(_indexed_ref, self._rows(f"{_BY_NUMBER} WHERE r.id IN ({marks})", batch))
        if len(found) != len(numbers):
            raise LexicalError(f"{len(numbers) - len(found)} rows of words stand in no document")
        return sorted(found, key=lambda entry: entry.ref)

    def imprints(self, anchors: Sequence[int]) -> Iterator[tuple[int, Imprint]]:
        """Number and imprint of every chunk with one of these anchors."""
        for start in range(0, len(anchors), _BATCH):
            batch = anchors[start : start + _BATCH]
            marks = ", ".join("?" * len(batch))
            query = f"SELECT id, anchor, n_signs, digest FROM imprints WHERE anchor IN ({marks})"
            for number, *fields in self._rows(query, batch):
                yield number, Imprint(*fields)

    def all_refs(self, doc_ids: Collection[str] | None = None) -> Iterator[IndexedRef]:
        """Every ref, or those of these documents, in document order."""
        if doc_ids is None:
            yield from map(_indexed_ref, self._rows(f"{_BY_DOCUMENT} {_IN_ORDER}"))
            return
        query = f"{_BY_DOCUMENT} WHERE d.doc_id = ? {_IN_ORDER}"
        for doc_id in sorted(set(doc_ids)):
            yield from map(_indexed_ref, self._rows(query, (doc_key(doc_id),)))

    def numbers_of(self, doc_ids: Collection[str]) -> set[int]:
        """The rows of these documents."""
        select = "SELECT r.id FROM documents d CROSS JOIN refs r ON r.document = d.id WHERE d.doc_id = ?"
        return {number for doc_id in set(doc_ids) for (number,) in self._rows(select, (doc_key(doc_id),))}

    def first_ref(self, chunk_id: ChunkId) -> ChunkRef | None:
        """The first place of a chunk in document order."""
        numbers = [number for (number,) in self._rows("SELECT id FROM refs WHERE chunk_id = ?", (chunk_id,))]
        return self.refs(numbers)[0].ref if numbers else None

    # -- SQLite ------------------------------------------------------------------------------------------------

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; the number of the row that it inserted, if it did."""
        try:
            return self._connection.execute(statement, parameters).lastrowid or 0
        except sqlite3.Error as error:
            raise LexicalError(str(error)) from error

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            # `yield from` would close the cursor, which fails, unraisably, if its connection was closed first.
            for row in self._connection.execute(query, parameters):  # noqa: UP028
                yield row
        except sqlite3.Error as error:
            raise LexicalError(str(error)) from error


def doc_key(doc_id: str) -> bytes:
    return doc_id.encode("utf-8", "surrogatepass")


def _text(doc_id: bytes) -> str:
    try:
        return doc_id.decode("utf-8", "surrogatepass")
    except (AttributeError, UnicodeDecodeError) as error:
        raise LexicalError(f"{doc_id!r} is no document id") from error


def _seal(*fields: object) -> int:
    """A checksum: SQLite has none of its own, and a ref with a flipped bit would point to another text."""
    return zlib.crc32(repr(fields).encode())


def _indexed_ref(row: tuple[Any, ...]) -> IndexedRef:
    number, seal, *fields = row
    if seal != _seal(number, *fields):
        raise LexicalError(f"the seal of row {number} does not match")
    return IndexedRef(number, ChunkRef(_text(fields[0]), *fields[1:]))
