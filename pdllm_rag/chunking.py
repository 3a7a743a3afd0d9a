"""Cuts a text into chunks of tokens.

- A document is tokenised once, as a whole; a chunk is a run of its tokens. The runs in order are the whole,
  less the blank runs (white space and zero-width characters only), which are dropped and counted.
- No chunk starts inside a code point, even where a byte-level tokenizer spreads one over several tokens.
- The character ranges tile the text: characters between two kept chunks belong to the earlier one, leading
  ones to the first, so that the joined quotes are the text again.
- `text_id` names a text whatever its Unicode spelling, line ends and trailing blanks; chunks keep them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import chain, pairwise
from typing import NamedTuple

import blake3
import numpy as np
from numpy.typing import NDArray
from pdllm_store.types import ID_BYTES

# Token ids and their code-point offsets (half open) of a whole text, as a fast tokenizer gives them. No
# special tokens are to be added, and a special token's text in a document is to be encoded as ordinary text.
Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]

MIN_CHUNK_LEN = 2  # the BOS and one token
VERSION = 1  # raised whenever the same text would be cut elsewhere

_INVISIBLE = (
    "\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
)
_VISIBLE = re.compile(rf"[^\s{_INVISIBLE}]")

_SPACE, _BREAK, _END, _WIDE_END, _CLOSER, _LOWER = 1, 2, 4, 8, 16, 32
_NOTHING, _BLANK, _LINE, _SENTENCE, _PARAGRAPH = range(5)
_MAX_CLOSERS = 3  # quotes and brackets between a full stop and the blank


class Span(NamedTuple):
    """One chunk of a text."""

    token_ids: NDArray[np.int32]  # [n], without the BOS that the prefill puts in front
    char_start: int  # code points of the original text, half open
    char_end: int


class SplitResult(NamedTuple):
    """The chunks of a text in order."""

    spans: list[Span]
    n_blank: int  # blank runs that were dropped


def split(text: str, encode: Encode, *, chunk_len: int) -> SplitResult:
    """Cut `text` into consecutive runs of at most `chunk_len - 1` tokens (the BOS is the last one).

    A run ends at the last paragraph end in its last half, else sentence end, else line end, else blank, else
    where it is full. It exceeds the limit only where one character takes more tokens than that: at most 4 in
    a byte-level vocabulary whose tokens do not straddle characters, so that the limit is strict from
    `chunk_len` 5 on.

    Raises:
        ValueError: a `chunk_len` below 2, or `encode` does not give one code-point range per token.
    """
    _check(chunk_len)
    token_ids, offsets = encode(text)
    ids = np.asarray(token_ids, dtype=np.int32)
    starts, ends = _ranges(offsets, n_tokens=len(ids), n_chars=len(text))
    edges = _edges(text, starts, ends, limit=chunk_len - 1)

    kept = [(a, b) for a, b in pairwise(edges) if not _is_blank_run(text, starts, a, b)]
    char_edges = [0, *(int(starts[a]) for a, _ in kept[1:]), len(text)]
    spans = [Span(ids[a:b], char_edges[k], char_edges[k + 1]) for k, (a, b) in enumerate(kept)]
    return SplitResult(spans, n_blank=len(edges) - 1 - len(kept))


def recipe(chunk_len: int) -> str:
    """Canonical text of everything that decides where a text is cut; raises ValueError as `split` does."""
    _check(chunk_len)
    return f"split={VERSION} chunk_len={chunk_len} cut=sentence"


def text_id(text: str) -> bytes:
    """16 bytes of BLAKE3 over the normalised text.

    The rule: Unicode NFC, line ends as `\\n`, blanks at the end of a line removed, outer white space removed.
    Two spellings of one text have one id; full-width digits and other compatibility forms stay different.
    (Unless one character carries more than 30 combining marks, which no language needs.)
    """
    lines = unicodedata.normalize("NFC", _limit_marks(text)).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    normalised = "\n".join(line.rstrip() for line in lines).strip()
    return blake3.blake3(normalised.encode("utf-8", "surrogatepass")).digest(ID_BYTES)


def is_blank(text: str) -> bool:
    """Whether there is nothing to see: white space, control and zero-width characters only."""
    return _VISIBLE.search(text) is None


def _limit_marks(text: str) -> str:
    """Break runs of more than 30 combining marks, whose normalisation takes quadratic time (UAX #15, 13)."""
    marks = "".join(re.escape(char) for char in sorted(set(text)) if unicodedata.combining(char))
    return re.sub(f"([{marks}]{{30}})(?=[{marks}])", "\\1\u034f", text) if marks else text


def _check(chunk_len: int) -> None:
    if chunk_len < MIN_CHUNK_LEN:
        raise ValueError(
            f"chunk_len is {chunk_len}, but must be at least {MIN_CHUNK_LEN} (the BOS and one token); try 160"
        )


def _ranges(
    offsets: list[tuple[int, int]], *, n_tokens: int, n_chars: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last-plus-one code point of every token, both [n_tokens]."""
    if len(offsets) != n_tokens:
        raise ValueError(f"encode gave {n_tokens} token ids and {len(offsets)} offsets, expected one offset per token")
    flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int64, count=2 * n_tokens)
    starts, ends = flat[0::2], flat[1::2]
    if n_tokens and (int(starts.min()) < 0 or int(ends.max()) > n_chars):
        raise ValueError(
            f"encode gave offsets {int(starts.min())} to {int(ends.max())} for a text of {n_chars} "
            "characters; they must count code points, not bytes"
        )
    return starts, ends


def _edges(text: str, starts: NDArray[np.int64], ends: NDArray[np.int64], *, limit: int) -> list[int]:
    """Token indices where runs begin, then the number of tokens."""
    n = len(starts)
    if n == 0:
        return [0]
    reached = np.maximum.accumulate(ends)
    # A token may begin a run if all earlier ones end at or before its first character.
    allowed = np.concatenate(([True], starts[1:] >= reached[:-1], [True]))
    rank = np.append(_break_kinds(text, starts), np.uint8(_PARAGRAPH))
    edges = [0]
    while n - edges[-1] > limit:
        edges.append(_next_edge(edges[-1], allowed, rank, limit))
    if edges[-1] < n:
        edges.append(n)
    return edges


def _next_edge(begin: int, allowed: NDArray[np.bool_], rank: NDArray[np.uint8], limit: int) -> int:
    """Where the run that starts at token `begin` ends."""
    half, full = begin + (limit + 1) // 2, begin + limit
    candidates = np.flatnonzero(allowed[half : full + 1]) + half
    if len(candidates):
        ranks = rank[candidates]
        if best := int(ranks.max()):
            return int(candidates[np.flatnonzero(ranks == best)[-1]])
        return int(candidates[-1])
    before = np.flatnonzero(allowed[begin + 1 : half])
    if len(before):
        return begin + 1 + int(before[-1])
    end = full + 1  # one character takes more tokens than a run may have: keep it whole
    while not allowed[end]:
        end += 1
    return end


def _break_kinds(text: str, places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """What ends in front of each place: paragraph, sentence, line, word, or nothing; uint8 [len(places)].

    A place anywhere in a run of white space takes the kind of the whole run, since some tokenizers put the
    blank before a word and some after it.
    """
    n = len(text)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    flags = _char_flags(text)[codes]
    space = (flags & _SPACE) != 0
    newline = (codes == ord("\n")) | ((codes == ord("\r")) & (np.append(codes[1:], 0) != ord("\n")))
    n_newlines = np.concatenate(([0], np.cumsum(newline, dtype=np.int32)))
    n_breaks = np.concatenate(([0], np.cumsum((flags & _BREAK) != 0, dtype=np.int32)))

    index = np.arange(n, dtype=np.int32)
    previous = np.maximum.accumulate(np.where(space, -1, index))  # last visible character up to here
    following = np.minimum.accumulate(np.where(space, n, index)[::-1])[::-1]  # first one from here
    left = np.where(places > 0, previous[places - 1], -1)
    right = np.append(following, n)[places]
    in_blank = (right > left + 1) & (left >= 0)
    newlines = n_newlines[right] - n_newlines[left + 1]
    breaks = n_breaks[right] - n_breaks[left + 1]

    ended = _ended(flags, _END)[left]
    lower_next = (np.append(flags, 0)[right] & _LOWER) != 0
    wide_ended = _ended(flags, _WIDE_END)[left]  # such a sentence needs no blank behind it
    sentence = (in_blank & ended & ~lower_next) | ((right == left + 1) & (left >= 0) & wide_ended)
    conditions = [in_blank & ((newlines >= 2) | (breaks > 0)), sentence, in_blank & (newlines > 0), in_blank]
    kinds = np.select(conditions, [_PARAGRAPH, _SENTENCE, _LINE, _BLANK], _NOTHING)
    return kinds.astype(np.uint8)


def _char_flags(text: str) -> NDArray[np.uint8]:
    """Flags by code point, for the characters that occur in `text`; uint8 [0x110000]."""
    table = np.zeros(0x110000, dtype=np.uint8)
    for char in set(text):
        flags = _SPACE * char.isspace() | _LOWER * char.islower()
        flags |= _BREAK * (char in "\f\u2029") | _END * (char in ".!?…。！？｡")
        flags |= _WIDE_END * (char in "。！？｡") | _CLOSER * (char in "\"'”’»)]}」』）")
        table[ord(char)] = flags
    return table


def _ended(flags: NDArray[np.uint8], end: int) -> NDArray[np.bool_]:
    """Whether a sentence ends with this character, a few closing quotes or brackets included; bool [n]."""
    ended: NDArray[np.bool_] = (flags & end) != 0
    closer = (flags & _CLOSER) != 0
    for _ in range(_MAX_CLOSERS):
        ended[1:] |= closer[1:] & ended[:-1]
    return ended


def _is_blank_run(text: str, starts: NDArray[np.int64], begin: int, end: int) -> bool:
    char_end = int(starts[end]) if end < len(starts) else len(text)
    return _VISIBLE.search(text, int(starts[begin]), char_end) is None
