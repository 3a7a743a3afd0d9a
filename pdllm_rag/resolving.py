"""From a prompt with context pasted into it to the chunks that it holds and the question that is left.

- copies of stored chunks (`copies`) are taken out of system and user messages; the chunks are to be read instead;
- text in no chunk is context too where it stands between two copies, or where templates put context (`templates`);
- all other text is the question and the template around it. A message that would leave no question is one as a whole;
- what was pasted before the last answer is left out: it belongs to an earlier question. System messages always count;
- a template into which nothing was put (`templates.is_template`) holds no chunks: whoever filled it has looked already.

Nothing in a text names a chunk: whoever pastes one has its whole text already.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pdllm_store import ChunkId

from pdllm_rag.chunking import is_blank
from pdllm_rag.copies import Copies, Copy
from pdllm_rag.errors import UnmatchedContextError
from pdllm_rag.events import Messages
from pdllm_rag.given import Chosen, id_of
from pdllm_rag.history import question_start
from pdllm_rag.squeezing import ANCHOR_SIGNS, signs_of
from pdllm_rag.templates import context_regions, is_template, labelled_question, without_tags

logger = logging.getLogger(__name__)

OnUnmatched = Literal["prefill", "ignore", "error"]
AskedIn = Literal["prompt", "question"]

_BLANK_LINES = re.compile(r"\n\s*\n")


class Part(NamedTuple):
    """A document that comes with a question: its text ("" if only the chunk is known) and the chunk it is said to be.

    A text that is not that chunk's (any more), up to white space and Unicode form, is looked for as one without.
    """

    text: str
    chunk: ChunkId | str | Chosen | None


class Resolved(NamedTuple):
    """What a prompt, or documents, hold.

    turns: messages {"role", "content"} without the context.
    chunks: stored chunks in order, for `RagEngine.answer`; None if there was neither context nor a template for it.
    context: texts that are to be encoded now.
    recognised: chunks that were found by their text.
    unmatched_chars: code points of context in no stored chunk, whatever becomes of it.
    """

    turns: list[dict[str, str]]
    chunks: list[ChunkId | str | Chosen] | None
    context: list[str]
    recognised: int
    unmatched_chars: int

    def material(self, texts: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of `RagEngine.answer` that say what to read, beside these texts; none if it is to retrieve."""
        context = [*texts, *self.context]
        found: dict[str, Any] = {"context": context} if context else {}
        if self.chunks or (self.chunks is not None and not context):
            found["chunk_ids"] = self.chunks
        return found


class Resolver:
    """Resolves prompts over one store and model.

    Args:
        asked: what of a prompt that holds context is asked: "prompt", all that is left of it; or "question", the
            labelled question alone (without a label the last message), and no system message.
    """

    def __init__(self, copies: Copies, asked: AskedIn) -> None:
        self._copies = copies
        self._asked = asked
        self._warned = False

    def prompt(self, messages: Messages, on_unmatched: OnUnmatched = "prefill") -> Resolved:
        """Take the context out of a conversation.

        Args:
            on_unmatched: what becomes of context in no stored chunk: "prefill" encodes it for this question, "ignore"
                leaves it out, "error" raises.

        Raises:
            UnmatchedContextError: there is some, and `on_unmatched` is "error".
            ValueError: `on_unmatched` is something else.
        """
        _check(on_unmatched)
        turns: list[dict[str, str]] = []
        copies: list[Copy] = []
        unmatched: list[str] = []
        templates = False
        last = len(messages) - 1
        start = question_start(messages)
        for number, message in enumerate(messages):
            text = message["content"]
            if message["role"] in ("system", "user"):
                text, found, others = self._parted(text, is_question=number == last)
                if message["role"] == "system" or number >= start:
                    copies += found
                    unmatched += others
                    templates = templates or is_template(message["content"], is_question=number == last)
            turns.append({"role": message["role"], "content": text})
        if not copies and not unmatched and not templates:
            return Resolved(turns, None, [], 0, 0)
        if self._asked == "question":
            question = turns[-1]["content"]
            turns = [turn for turn in turns[:-1] if turn["role"] != "system"]
            turns.append({"role": "user", "content": labelled_question(question) or question})
        return self._resolved(turns, [copy.chunk_id for copy in copies], copies, unmatched, on_unmatched)

    def documents(self, parts: Sequence[Part], on_unmatched: OnUnmatched = "prefill") -> Resolved:
        """Resolve documents that are known to be context; there are no turns. For the rest see `prompt`."""
        _check(on_unmatched)
        named = [part.chunk for part in parts if part.chunk is not None]
        stored = self._copies.signs([id_of(chunk) for chunk in named])
        chunks: list[ChunkId | str | Chosen] = []
        copies: list[Copy] = []
        unmatched: list[str] = []
        for text, chunk in parts:
            if chunk is not None and (not text or stored.get(id_of(chunk)) == signs_of(text)):
                chunks.append(chunk)
                continue
            found = self._copies.find(text)
            copies += found
            chunks += [copy.chunk_id for copy in found]
            gaps = _gaps([(copy.start, copy.end) for copy in found], 0, len(text))
            unmatched += [text[a:b].strip() for a, b in gaps if not is_blank(text[a:b])]
        return self._resolved([], chunks, copies, unmatched, on_unmatched)

    def _parted(self, text: str, *, is_question: bool) -> tuple[str, list[Copy], list[str]]:
        """What is left of a message, the copies in it, and its other context."""
        copies = self._copies.find(text)
        cuts = [(copy.start, copy.end) for copy in copies]
        regions = context_regions(text, is_question=is_question)
        if copies:
            regions.append((copies[0].start, copies[-1].end))
        unmatched = []
        starts = [copy.start for copy in copies]
        for begin, end in regions:
            is_known = bisect_left(starts, begin) < bisect_left(starts, end)
            near = cuts[max(0, bisect_left(cuts, (begin, 0)) - 1) : bisect_left(cuts, (end, 0))]
            for a, b in _gaps(near, begin, end):
                n_signs = len(signs_of(without_tags(text[a:b])))
                is_long = n_signs >= ANCHOR_SIGNS and labelled_question(text[a:b]) is None
                if is_long or (n_signs and not is_known):  # else a heading, a separator, the question
                    a += len(text[a:b]) - len(text[a:b].lstrip())
                    unmatched.append(text[a:b].rstrip())
                    insort(cuts, (a, a + len(unmatched[-1])))
        if not cuts:
            return text, [], []
        rest = _BLANK_LINES.sub("\n\n", "".join(text[a:b] for a, b in _gaps(cuts, 0, len(text)))).strip()
        return (text, [], []) if is_question and is_blank(rest) else (rest, copies, unmatched)

    def _resolved(
        self,
        turns: list[dict[str, str]],
        chunks: list[ChunkId | str | Chosen],
        copies: Sequence[Copy],
        unmatched: list[str],
        on_unmatched: OnUnmatched,
    ) -> Resolved:
        n_chars = sum(map(len, unmatched))
        if unmatched and on_unmatched == "error":
            raise UnmatchedContextError(
                f"{n_chars} characters of context are in no chunk of the store, the first are {unmatched[0][:40]!r}; "
                "prefill their documents, or choose on_unmatched 'prefill' or 'ignore'"
            )
        if unmatched and not chunks and not self._warned:
            self._warned = True
            logger.warning("no stored chunk in %d characters of context (%s); said once", n_chars, on_unmatched)
        recognised = len({copy.chunk_id for copy in copies})
        return Resolved(turns, chunks, unmatched if on_unmatched == "prefill" else [], recognised, n_chars)


def _gaps(cuts: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What cuts, in order, leave of [begin, end)."""
    for start, stop in cuts:
        if begin < min(start, end):
            yield begin, min(start, end)
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


def _check(on_unmatched: str) -> None:
    if on_unmatched not in get_args(OnUnmatched):
        raise ValueError(f"on_unmatched is {on_unmatched!r}; expected one of {', '.join(get_args(OnUnmatched))}")
