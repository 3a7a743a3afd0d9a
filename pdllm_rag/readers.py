"""Reads one file into text: plain text, Markdown, reStructuredText, HTML, PDF.

- The text of a text file is kept as it is (line ends, Unicode spelling); only a byte order mark is dropped, and the
  front matter of Markdown, which is metadata.
- Encoding: byte order mark, else the charset that an HTML file declares, else strict UTF-8, else the best
  guess, which is logged. Decoding is strict: nothing is replaced or left out.
- Limits hold before the work: `max_bytes` before reading, `max_chars` while PDF and HTML are unfolded.
- A file without text raises EmptyDocumentError, one that cannot be read UnreadableDocumentError.
"""

from __future__ import annotations

import codecs
import html
import io
import logging
import re
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pdllm_rag.chunking import is_blank
from pdllm_rag.errors import EmptyDocumentError, UnreadableDocumentError
from pdllm_rag.front_matter import parted
from pdllm_rag.html_layout import indent_chars, laid_out

# fmt: off
MEDIA_TYPES = {
    ".txt": "text/plain", ".md": "text/markdown", ".markdown": "text/markdown", ".rst": "text/x-rst",
    ".html": "text/html", ".htm": "text/html", ".pdf": "application/pdf",
}
# fmt: on
MAX_BYTES = 64 * 2**20
MAX_CHARS = 16 * 2**20
PAGE_SEPARATOR = "\n\n"

logger = logging.getLogger(__name__)

# fmt: off
_BOMS = [  # the longer ones first: UTF-32-LE begins like UTF-16-LE
    (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"), (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_SIGNATURES = [
    (b"%PDF-", "a PDF"), (b"\x89PNG", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"), (b"GIF8", "a GIF"),
    (b"PK\x03\x04", "a ZIP archive (also docx, xlsx, epub)"), (b"\x1f\x8b", "a gzip archive"),
]
# What text files are really written in; rarer codecs make short texts ambiguous.
_GUESSES = [
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874",
    "koi8_r", "koi8_u", "iso8859_2", "iso8859_5", "iso8859_7", "cp437", "cp850", "cp852", "cp866",
    "mac_roman", "cp932", "euc_jp", "gb18030", "big5", "cp949",
]
_MULTIBYTE = {"cp932", "euc_jp", "gb18030", "big5", "cp949"}
_AS_BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252", "shift_jis": "cp932", "gb2312": "gb18030"}
_NO_CHARSETS = {"utf-7", "idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"}
# fmt: on
_DECLARED = re.compile(rb"""<(?:meta|\?xml)\b[^<>]{0,500}?\b(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
_TITLE = re.compile(r"<title[^<>]*>([^<>]*)</title", re.I)
_XML_DECLARATION = re.compile(r"\A\s*<\?xml[^<>]*>", re.I)
_IMAGES = re.compile(r"!\[[^\[\]]*\](?:\([^()]*\)|\[[^\[\]]*\])?|<img\b[^<>]*>|<!--[^<>]*-->", re.I)
_EMPTY_LINKS = re.compile(r"\[\s*\]\([^()]*\)")
_TEXT_CONTROLS = "\t\n\v\f\r\x08\x1b\x85"

_pypdf_lock = threading.Lock()  # held while pypdf's logger and the warning filters are redirected


class SourceText(NamedTuple):
    """The text of one file."""

    text: str
    pages: list[tuple[int, int]] | None  # code points of page 1, 2, ..., half open
    media_type: str
    encoding: str | None  # codec of a text file, None for a PDF
    title: str | None  # of HTML and PDF
    front_matter: Mapping[str, Any] = {}  # of Markdown


def read(path: str | PathLike[str], *, max_bytes: int = MAX_BYTES, max_chars: int = MAX_CHARS) -> SourceText:
    """Read a file; `max_bytes` limits the file, `max_chars` the text taken out of HTML and PDF.

    Raises:
        EmptyDocumentError: there is no text in it.
        UnreadableDocumentError: missing, too large, binary, encrypted, broken, or of an unsupported kind.
    """
    path = Path(path)
    name = printable(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableDocumentError(f"{name}: is not a regular file")
        _check_size(name, status.st_size, max_bytes)
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)  # it may have grown since
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnreadableDocumentError(f"{name}: cannot be read: {reason}") from error
    return parse(data, name=name, max_bytes=max_bytes, max_chars=max_chars)


def parse(data: bytes, *, name: str, max_bytes: int = MAX_BYTES, max_chars: int = MAX_CHARS) -> SourceText:
    """Read a file's bytes as `read` does; `name` gives the kind (by its ending) and stands in messages."""
    _check_size(name, len(data), max_bytes)
    if not data:
        raise EmptyDocumentError(f"{name}: the file is empty (0 bytes)")
    media_type = MEDIA_TYPES.get(Path(name).suffix.lower())
    if media_type == "application/pdf":
        return _parse_pdf(data, name, max_chars)
    if media_type is None:
        source = SourceText(_decode_unknown(data, name), None, "text/plain", "utf-8", None)
    else:
        text, encoding = _decode(data, name, declared=media_type == "text/html")
        if media_type == "text/html":
            return _parse_html(text, name, encoding, max_chars)
        front, text = parted(text, name) if media_type == "text/markdown" else ({}, text)
        source = SourceText(text, None, media_type, encoding, None, front)
    if is_blank(source.text):
        raise EmptyDocumentError(f"{name}: holds only white space or invisible characters")
    if media_type == "text/markdown" and is_blank(_EMPTY_LINKS.sub("", _IMAGES.sub("", source.text))):
        raise EmptyDocumentError(f"{name}: holds only images, no text; describe them in words")
    return source


def printable(text: str) -> str:
    """`text` with undecodable bytes of a file name and control characters escaped, safe for any output."""
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in readable)


def _check_size(name: str, n_bytes: int, max_bytes: int) -> None:
    if n_bytes > max_bytes:
        raise UnreadableDocumentError(
            f"{name}: has {n_bytes:,} bytes, the limit is {max_bytes:,}; split the file or raise max_bytes"
        )


def _decode_unknown(data: bytes, name: str) -> str:
    kind = _signature(data)
    try:
        if kind or b"\0" in data:
            raise ValueError
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except ValueError:  # UnicodeDecodeError is one
        found = f"looks like {kind}" if kind else "is not UTF-8 text"
        raise UnreadableDocumentError(
            f"{name}: {found} and its ending {Path(name).suffix!r} is not supported; "
            f"supported: {' '.join(MEDIA_TYPES)}, and any UTF-8 text"
        ) from None


def _decode(data: bytes, name: str, *, declared: bool) -> tuple[str, str]:
    """Text and the codec used."""
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            try:
                return data[len(bom) :].decode(encoding), encoding
            except UnicodeDecodeError as error:
                raise UnreadableDocumentError(
                    f"{name}: begins as {encoding} but is damaged at byte {len(bom) + error.start}; "
                    "save it again as UTF-8"
                ) from None
    if kind := _signature(data):
        raise UnreadableDocumentError(f"{name}: looks like {kind}, expected text; convert or rename it")
    if (at := data.find(b"\0")) >= 0:
        raise UnreadableDocumentError(
            f"{name}: has a NUL byte at {at}, so it is binary or UTF-16 without a byte order mark; save it as UTF-8"
        )
    if declared and (found := _decode_declared(data, name)):
        return found
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError as error:
        guess = _guess(data)
        if guess is None:
            raise UnreadableDocumentError(
                f"{name}: is not UTF-8 (byte {error.start}) and no known encoding gives readable text; save it as UTF-8"
            ) from None
        logger.warning("%s: not UTF-8, read as %s (a guess); if wrong, save it as UTF-8", name, guess[1])
        return guess


def _decode_declared(data: bytes, name: str) -> tuple[str, str] | None:
    match = _DECLARED.search(data[:4096])
    if match is None:
        return None
    label = match[1].decode("ascii", "replace")
    try:
        encoding = codecs.lookup(label).name
        if encoding in _NO_CHARSETS:
            raise LookupError
        encoding = _AS_BROWSERS.get(encoding, encoding)
        if encoding.startswith(("utf-16", "utf-32")):  # it could not have been read so far: the web's rule
            encoding = "utf-8"
        return data.decode(encoding), encoding
    except (LookupError, ValueError):
        logger.warning("%s: declares the charset %s, but is not in it", name, printable(label))
        return None


def _guess(data: bytes) -> tuple[str, str] | None:
    """The likeliest text and its codec; None if no codec gives readable text."""
    from charset_normalizer import from_bytes

    matches = from_bytes(data, cp_isolation=_GUESSES)
    best = matches.best()
    # Unless the language speaks for another codec, text of mostly ASCII letters is taken as Western.
    rival = next((match for match in matches if "cp1252" in match.could_be_from_charset), None)
    if best is None or best.coherence == 0 or (rival and rival.coherence >= best.coherence):
        western = _western(data, isolated=best is None or best.encoding in _MULTIBYTE)
        if western is not None:
            return western, "cp1252"
    for match in matches:
        try:
            text = data.decode(match.encoding)
        except UnicodeDecodeError:
            continue
        if _is_clean(text):
            return text, match.encoding
    return None


def _western(data: bytes, *, isolated: bool) -> str | None:
    """Text as cp1252 if few of its letters are accented and, with `isolated`, no two in a row."""
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return None
    letters = [c for c in text if c.isalpha()]
    n_accented = sum(not c.isascii() for c in letters)
    in_pairs = isolated and re.search(rb"[\x80-\xff]{2}", data)
    return None if in_pairs or not _is_clean(text) or 5 * n_accented > 2 * len(letters) else text


def _is_clean(text: str) -> bool:
    return re.search(rf"[^\x20-\x7e\xa0-\U0010ffff{_TEXT_CONTROLS}]", text) is None


def _signature(data: bytes) -> str | None:
    return next((kind for begin, kind in _SIGNATURES if data.startswith(begin)), None)


def _parse_html(text: str, name: str, encoding: str, max_chars: int) -> SourceText:
    import lxml.html  # type: ignore[import-untyped]

    too_deep = UnreadableDocumentError(f"{name}: the HTML is nested too deeply; save the page as text")
    empty = EmptyDocumentError(f"{name}: the page shows no text (scripts, styles and menus are left out)")
    body = _XML_DECLARATION.sub("", text, count=1)
    if is_blank(body):
        raise empty
    # Without `huge_tree`, what is nested deeper than 256 is dropped silently.
    parser = lxml.html.HTMLParser(huge_tree=True)
    try:
        tree = lxml.html.document_fromstring(body, parser=parser)
    except lxml.etree.ParserError:
        raise empty from None
    if any(entry.level_name == "FATAL" for entry in parser.error_log):
        raise too_deep
    _check_chars(name, indent_chars(tree, body), max_chars)
    try:
        shown = laid_out(tree)
    except RecursionError:
        raise too_deep from None
    if is_blank(shown):
        raise empty
    _check_chars(name, len(shown), max_chars)
    title = _TITLE.search(text, 0, 65536)
    return SourceText(shown, None, "text/html", encoding, _title(html.unescape(title[1]) if title else None))


def _check_chars(name: str, n_chars: int, max_chars: int) -> None:
    if n_chars > max_chars:
        raise UnreadableDocumentError(
            f"{name}: unfolds to at least {n_chars:,} characters, the limit is {max_chars:,}; "
            "split it or raise max_chars"
        )


def _title(text: object) -> str | None:
    title = " ".join(text.split()) if isinstance(text, str) else ""
    return None if is_blank(title) else title


def _parse_pdf(data: bytes, name: str, max_chars: int) -> SourceText:
    with _quiet_pypdf():
        from pypdf import PdfReader

        try:
            reader = PdfReader(io.BytesIO(data), strict=False)
            if reader.is_encrypted and not reader.decrypt(""):
                raise UnreadableDocumentError(f"{name}: the PDF is encrypted; save it without a password")
            texts = _page_texts(reader, name, max_chars)
            title = _title(reader.metadata.title if reader.metadata else None)
        except UnreadableDocumentError:
            raise
        except Exception as error:  # a damaged file makes pypdf raise nearly anything
            reason = printable(f"{type(error).__name__}: {error}")
            raise UnreadableDocumentError(
                f"{name}: the PDF cannot be read ({reason}); open and save it anew, or convert it to text"
            ) from error
    if all(is_blank(text) for text in texts):
        raise EmptyDocumentError(
            f"{name}: no text layer in {len(texts)} page(s), probably scanned; run text recognition (OCR)"
        )
    text, pages = _join_pages(texts)
    return SourceText(text, pages, "application/pdf", None, title)


def _page_texts(reader: Any, name: str, max_chars: int) -> list[str]:
    texts = []
    n_chars = 0

    def count(piece: str, *_: object) -> None:
        nonlocal n_chars
        n_chars += len(piece)
        _check_chars(name, n_chars, max_chars)

    for page in reader.pages:
        text = page.extract_text(visitor_text=count)
        # pypdf gives half a surrogate pair as it is; it can be neither tokenised nor stored.
        texts.append(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").strip())
    return texts


def _join_pages(texts: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """One text, and the code points of each page; a blank page is an empty range."""
    parts: list[str] = []
    pages = []
    at = 0
    for text in texts:
        if is_blank(text):
            pages.append((at, at))
            continue
        if parts:
            parts.append(PAGE_SEPARATOR)
            at += len(PAGE_SEPARATOR)
        parts.append(text)
        pages.append((at, at + len(text)))
        at += len(text)
    return "".join(parts), pages


@contextmanager
def _quiet_pypdf() -> Iterator[None]:
    """Keep pypdf's many remarks on damaged files off the terminal."""
    theirs = logging.getLogger("pypdf")
    handler = logging.NullHandler()
    with _pypdf_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        propagate, theirs.propagate = theirs.propagate, False
        theirs.addHandler(handler)
        try:
            yield
        finally:
            theirs.removeHandler(handler)
            theirs.propagate = propagate
