"""What is known of a document besides its text: how it is kept, which documents a filter admits, and its pages."""

from __future__ import annotations

import datetime
import json
import os
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pdllm_store import ChunkRef, Document, DocumentInfo

PAGE_ENDS = "page_ends"  # metadata of a document with pages: the code point behind each page's last
MAX_NAMED = 20  # keys of metadata that a message lists

_OWN = ("doc_id", "source")  # of every document


def plain(value: Any, name: str = "metadata") -> Any:
    """Metadata as a store keeps it: JSON's types only.

    Dates and times become ISO 8601 text, paths text, tuples and sets lists (sets in order), numpy's scalars Python's.

    Raises:
        ValueError: something else, or a key that is no text; the key is named.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} has the key {wrong[0]!r}; expected text")
        return {key: plain(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(entry, name) for entry in value), key=lambda entry: (str(type(entry)), entry))
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item(), name)
    raise ValueError(f"{name} is of type {type(value).__name__}; expected text, numbers, dates, paths, lists, mappings")


def admitted(documents: Collection[DocumentInfo], wanted: Mapping[str, Any]) -> tuple[set[str], str]:
    """Ids of the documents that have all of this metadata, and, if there are none, why.

    A value is compared by its text, which is JSON's for what is no text (`true`, `2025`), in NFC; a list has the values
    of its entries as well. A document's own `doc_id` and `source` count as metadata, before any of that name.

    Raises:
        ValueError: a wanted value that no metadata can have.
    """
    asked = {key: _text(plain(value, f"filter[{key!r}]")) for key, value in wanted.items()}
    found = {info.doc_id for info in documents if all(text in _texts(info, key) for key, text in asked.items())}
    if found:
        return found, ""
    known = {*_OWN, *(key for info in documents for key in info.metadata)}
    if unknown := sorted(asked.keys() - known):
        named = ", ".join(sorted(known - {PAGE_ENDS})[:MAX_NAMED])
        return found, f"no document has the metadata {unknown[0]!r} that the filter asks for; there are {named}"
    return found, f"no document has the values that the filter asks for ({', '.join(sorted(asked))})"


def shown(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A document's metadata as it is listed beside its chunks: without the table of its pages, which may be long."""
    return {key: value for key, value in metadata.items() if key != PAGE_ENDS}


def page_ends(document: Document, ref: ChunkRef) -> Sequence[int]:
    """The code point behind the last one of each page; none for a document without pages."""
    ends: Sequence[int] = document.metadata.get(PAGE_ENDS, ()) if ref.page is not None else ()
    return ends


def pages_of(ends: Sequence[int], start: int, text: str) -> tuple[int | None, int | None]:
    """The first and last page that a text from code point `start` on stands on; the last is None if it is the first."""
    chars = start + len(text) - len(text.lstrip()), start + max(len(text.rstrip()), 1) - 1
    first, last = (min(bisect_right(ends, char) + 1, len(ends)) or None for char in chars)
    return first, None if last == first else last


def _texts(info: DocumentInfo, key: str) -> set[str]:
    """What a document's value may be compared with; nothing where it has none."""
    if key not in _OWN and key not in info.metadata:
        return set()
    value = getattr(info, key) if key in _OWN else info.metadata[key]
    return {_text(value), *map(_text, value if isinstance(value, list) else ())}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return unicodedata.normalize("NFC", text)
