"""Finds the files that a prefill is to read and gives each its document id.

- A file argument's id is its own name; a file found in a folder has its path relative to that folder, with
  `/`. Ids are NFC; `source` and `path` keep the spelling of the disk.
- A pattern (`*`, `?`, `[`, `**`) stands for what it matches, as if a shell had expanded it.
- Folders are searched in sorted order. Names that begin with a dot are skipped, links are followed within the
  folder only, and a file that is reached twice is taken once.
- What cannot be taken is a Problem, never an abort; two different files with one id are an error. Files of kinds that
  are not read, which a folder may hold among others, are skipped.
"""

from __future__ import annotations

import codecs
import glob
import os
import unicodedata
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from pdllm_store.errors import DocumentConflictError

from pdllm_rag.readers import MEDIA_TYPES, printable

_HEAD_BYTES = 8192  # enough to tell a text without an ending from a binary


class SourceFile(NamedTuple):
    """A file to be read."""

    path: Path
    doc_id: str
    source: str  # absolute real path


class Problem(NamedTuple):
    """Something that was named or found but not taken."""

    path: str  # printable
    reason: str


class SourceList(NamedTuple):
    """Files in order of argument, then of path; problems, and files skipped, in order of their finding."""

    files: list[SourceFile]
    problems: list[Problem]
    skipped: list[Problem]


def find(paths: Iterable[str | PathLike[str]], *, id_prefix: str = "") -> SourceList:
    """List the files behind `paths` (files, folders, patterns); `id_prefix` goes in front of every id.

    Raises:
        DocumentConflictError: two different files would have one id.
    """
    problems: list[Problem] = []
    skipped: list[Problem] = []
    by_id: dict[str, SourceFile] = {}
    seen: set[str] = set()
    for path, name in _candidates(paths, problems, skipped):
        source = os.path.realpath(path)
        if not (_is_unicode(name) and _is_unicode(source)):
            problems.append(_problem(path, "the name is not valid UTF-8; rename the file or its folder"))
            continue
        if source in seen:
            continue
        doc_id = unicodedata.normalize("NFC", id_prefix + name)
        if doc_id in by_id:
            raise DocumentConflictError(
                f"two files would have the document id {printable(doc_id)!r}: "
                f"{printable(by_id[doc_id].source)} and {printable(source)}; "
                "rename one, or add them one after another with different --id-prefix"
            )
        seen.add(source)
        by_id[doc_id] = SourceFile(Path(path), doc_id, source)
    return SourceList(list(by_id.values()), problems, skipped)


def _candidates(
    paths: Iterable[str | PathLike[str]], problems: list[Problem], skipped: list[Problem]
) -> Iterator[tuple[str, str]]:
    """Path and id (without prefix) of every file in question."""
    for argument in paths:
        for path in _expand(os.fspath(argument), problems):
            if os.path.isdir(path):
                yield from sorted(_walk(path, problems, skipped), key=lambda found: found[1].split("/"))
            elif os.path.isfile(path):
                yield path, os.path.basename(path)
            elif os.path.exists(path):
                problems.append(_problem(path, "is neither a regular file nor a folder"))
            else:
                link = "the link leads nowhere" if os.path.islink(path) else "no such file or folder"
                problems.append(_problem(path, link))


def _expand(argument: str, problems: list[Problem]) -> list[str]:
    if os.path.lexists(argument) or not glob.has_magic(argument):
        return [argument]
    matches = sorted(glob.glob(argument, recursive=True))
    if not matches:
        problems.append(_problem(argument, "the pattern matches nothing"))
    return matches


def _walk(top: str, problems: list[Problem], skipped: list[Problem]) -> Iterator[tuple[str, str]]:
    """Path and relative name of the files below `top`, real ones before links to them."""
    root = os.path.realpath(top)
    folders = [(top, "")]
    linked_folders: list[tuple[str, str]] = []
    linked_files: list[tuple[str, str]] = []
    visited: set[str] = set()
    files: set[str] = set()
    while folders or linked_folders:
        # Links wait until every real folder is done, so that a file keeps its own name where it has one.
        folder, name = folders.pop() if folders else linked_folders.pop(0)
        real = os.path.realpath(folder)
        if real in visited:
            continue
        visited.add(real)
        for entry in _entries(folder, problems):
            relative = name + entry.name
            if entry.is_symlink() and (reason := _link_refusal(entry, root)):
                problems.append(_problem(entry.path, reason))
            elif entry.is_dir():
                (linked_folders if entry.is_symlink() else folders).append((entry.path, relative + "/"))
            elif reason := _refusal(entry):
                skipped.append(_problem(entry.path, reason))
            elif entry.is_symlink():
                linked_files.append((entry.path, relative))
            else:
                files.add(os.path.realpath(entry.path))
                yield entry.path, relative
    for path, relative in linked_files:
        real = os.path.realpath(path)
        if real not in files:
            files.add(real)
            yield path, relative


def _entries(folder: str, problems: list[Problem]) -> list[os.DirEntry[str]]:
    """Visible entries of a folder, sorted, those with undecodable names left out."""
    try:
        with os.scandir(folder) as scan:
            entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        problems.append(_problem(folder, f"the folder cannot be listed: {error.strerror}"))
        return []
    good = [entry for entry in entries if _is_unicode(entry.name)]
    bad = [entry for entry in entries if not _is_unicode(entry.name)]
    problems.extend(_problem(entry.path, "the name is not valid UTF-8; rename it") for entry in bad)
    return good


def _link_refusal(entry: os.DirEntry[str], root: str) -> str | None:
    """Why a link is not followed, None if it is."""
    real = os.path.realpath(entry.path)
    if not os.path.exists(real):
        return "the link leads nowhere"
    if os.path.commonpath([root, real]) != root:
        return f"the link leaves the folder (to {printable(real)}); name its target as an argument"
    return None


def _refusal(entry: os.DirEntry[str]) -> str | None:
    """Why a file found in a folder is skipped, None if it is to be read."""
    if not entry.is_file():
        return "is not a regular file"
    suffix = os.path.splitext(entry.name)[1].lower()
    if suffix in MEDIA_TYPES:
        return None
    supported = f"supported: {' '.join(MEDIA_TYPES)}, and text without an ending"
    if suffix:
        return f"the ending {suffix!r} is not supported; {supported}"
    try:
        with open(entry.path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None  # reading it will say so
    return None if _looks_like_text(head) else f"has no ending and is not UTF-8 text; {supported}"


def _looks_like_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 without NULs (a character cut short at the end may be)."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _problem(path: str, reason: str) -> Problem:
    return Problem(printable(path), reason)
