"""From a framework's request to the engine's arguments: what is asked, and what is to be read for it.

What is read is, in this order: chunks or texts that the call names; documents that the messages bring along as such;
context that is pasted into them (`resolving`), none if a template for it is empty; else what retrieval finds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictBool, StrictInt

from pdllm_rag.components.fields import MATERIAL, AskComponent, Number, ask_options
from pdllm_rag.history import MAX_TOKENS, kept_turns, question_start

if TYPE_CHECKING:
    from pdllm_rag.answer import AnswerStats
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.resolving import Part

OWN_OPTIONS = ("recognise", "on_unmatched", "retrieve", "max_history_tokens", "timeout")

Turns = list[dict[str, str]]

_CHUNK_ID = re.compile(r"[0-9a-f]{32}")


class Request(NamedTuple):
    """What the engine is asked.

    turns, arguments: for `engine.answer` and its kind.
    n_turns: that were given; those of `turns` were kept (`history`).
    recognised: chunks that were known by their text.
    unmatched_chars: code points of given context that are in no stored chunk.
    """

    engine: RagEngine
    turns: Turns
    arguments: dict[str, Any]
    n_turns: int
    recognised: int
    unmatched_chars: int

    def kv(self, stats: AnswerStats) -> dict[str, int]:
        """Where the chunks read came from, for a response's metadata."""
        return {**stats.chunks._asdict(), "recognised": self.recognised, "unmatched_chars": self.unmatched_chars}

    def history(self) -> dict[str, int]:
        """How many of the turns before the question were kept, for a response's metadata."""
        return {"kept": len(self.turns) - 1, "given": self.n_turns - 1}


class AnswerComponent(AskComponent):
    """A component that answers prompts with context in them.

    Attributes:
        retrieve: look for chunks where neither call nor messages bring any; False: then there is nothing to read.
        recognise: read stored chunks whose text is pasted into a prompt from the store.
        on_unmatched: what becomes of other context: "prefill" encodes it for this question, "ignore" leaves it out,
            "error" raises `UnmatchedContextError`. The response's metadata counts it in any case.
        max_history_tokens: most tokens of the turns before the question (`history`).
        timeout: seconds after which `GenerationCancelled` is raised at the next denoising step.
    """

    retrieve: StrictBool = True
    recognise: StrictBool = True
    on_unmatched: Literal["prefill", "ignore", "error"] = "prefill"
    max_history_tokens: Annotated[StrictInt, Field(ge=0)] = MAX_TOKENS
    timeout: Annotated[Number, Field(ge=0)] | None = None

    def request(self, turns: Turns, parts: Sequence[Part] | None, given: Mapping[str, Any]) -> Request:
        """Read a request; it may take a while, since it opens the engine.

        Args:
            turns: messages {"role", "content"}.
            parts: documents that came with them, None if there were none to come.
            given: options and arguments of this call.

        Raises:
            ValueError: an unknown option or a bad value; UnmatchedContextError, StoreError, ModelError.
        """
        from pdllm_rag.events import EitherEvent
        from pdllm_rag.resolving import Resolved

        given = self.checked({*ask_options(), *MATERIAL, "chunks", *OWN_OPTIONS}, given)
        own = {name: given.pop(name, None) for name in ("chunks", *OWN_OPTIONS)}
        recognise, on_unmatched, retrieve, max_history_tokens, timeout = (
            getattr(self, name) if own[name] is None else own[name] for name in OWN_OPTIONS
        )
        arguments = self.engine_options(given)
        is_named = bool(arguments.keys() & {"chunk_ids", "context"})
        if own["chunks"] is not None:
            if "chunk_ids" in arguments:
                raise ValueError(f"{type(self).__name__} got both chunks and chunk_ids; expected one of them")
            parts = [self.part(chunk) for chunk in own["chunks"]]
        elif is_named:
            parts = None
        engine = self.opened()
        if timeout is not None:
            arguments["cancel"] = EitherEvent(arguments.get("cancel"), seconds=timeout)
        resolved = Resolved(turns, None if is_named or retrieve else [], [], 0, 0)
        if parts is not None:
            resolved = engine.resolver.documents(parts, on_unmatched)._replace(turns=turns)
        elif recognise and not is_named:
            found = engine.resolver.prompt(turns, on_unmatched)
            resolved = resolved if found.chunks is None else found
        kept = kept_turns(resolved.turns, engine.model.tokenizer.encode, max_history_tokens)
        if (is_named or resolved.chunks is not None) and given.get("filter") is None:
            arguments.pop("filter", None)  # the component's own is for retrieval
        arguments.update(resolved.material(_listed(arguments.get("context"))))
        return Request(engine, kept, arguments, len(turns), resolved.recognised, resolved.unmatched_chars)

    def part(self, chunk: Any) -> Part:
        """A chunk that a call names: its id, or a document of the framework (subclasses know it).

        Raises:
            ValueError: it is neither.
        """
        from pdllm_rag.resolving import Part

        if isinstance(chunk, (str, bytes)):
            return Part("", chunk)
        raise ValueError(f"{type(self).__name__} got a chunk of type {type(chunk).__name__}; expected ids or documents")


def _listed(context: str | Sequence[str] | None) -> Sequence[str]:
    return [context] if isinstance(context, str) else context or ()


class Usage(NamedTuple):
    """Tokens of one answer. `input_tokens` holds both kinds of context tokens: read from the store, computed now."""

    input_tokens: int
    output_tokens: int
    stored_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, stats: AnswerStats) -> Usage:
        """Usage of an answer."""
        computed = stats.context_tokens - stats.cached_tokens
        return cls(stats.prompt_tokens + stats.context_tokens, stats.tokens, stats.cached_tokens, computed)


def counted(turns: Turns, brought: Sequence[list[Part] | None]) -> list[Part] | None:
    """Of the documents that each turn brings, those that the last question is about; None if none were to come.

    They are those of system messages and those since the last answer; earlier ones belong to an earlier question.
    """
    start = question_start(turns)
    counting = [
        parts
        for at, parts in enumerate(brought)
        if parts is not None and (at >= start or turns[at]["role"] == "system")
    ]
    return [part for parts in counting for part in parts] if counting else None


def document_part(document_id: str | None, text: str, metadata: Mapping[str, Any]) -> Part:
    """A framework's document: the chunk that its metadata or id names, with what retrieval said of it, or a text."""
    from pdllm_rag.given import Chosen
    from pdllm_rag.resolving import Part

    chunk_id = metadata.get("chunk_id", document_id)
    if not isinstance(chunk_id, str) or not _CHUNK_ID.fullmatch(chunk_id):
        return Part(text, None)
    return Part(text, Chosen(chunk_id, metadata.get("score"), metadata.get("margin")))
