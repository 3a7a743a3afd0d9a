"""Between LangChain's messages and the engine's: question, chunk references, answer with citations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    UsageMetadata,
)
from langchain_core.messages.content import Citation as CitationBlock

from pdllm_rag.components.answering import Request, Usage, counted, document_part

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer, Citation
    from pdllm_rag.resolving import Part

_ROLES = ("system", "user", "assistant")
_SAID = ("chunk_id", "score", "margin")  # metadata that `PDLLMRetriever` gives and an answer uses


class Reading(NamedTuple):
    """What messages ask: turns {"role", "content"}, and the documents that they bring along as such, None for none."""

    turns: list[dict[str, str]]
    parts: list[Part] | None


def as_message(docs: Sequence[Document], question: str) -> HumanMessage:
    """A question about exactly these documents, for `ChatPDLLM`.

    Each document becomes a text block whose `extras` name its chunk, so that `ChatPDLLM` reads the stored one; other
    chat models read the text. Documents of another retriever are looked for in the store by their text. Without
    documents `ChatPDLLM` answers that there is nothing to read.
    """
    blocks: list[str | dict[str, Any]] = []
    for doc in docs:
        extras = {name: doc.metadata[name] for name in _SAID if name in doc.metadata}
        blocks.append({"type": "text", "text": doc.page_content, "extras": {"chunk_id": None, **extras}})
    blocks.append({"type": "text", "text": question, "extras": {"n_chunks": len(docs)}})
    return HumanMessage(content=blocks)


def read_messages(messages: Sequence[BaseMessage]) -> Reading:
    """Turns and documents of a conversation. Blocks of `as_message` and "text-plain" blocks are documents.

    Those before the last answer belong to an earlier question and are left out; those of system messages count.

    Raises:
        ValueError: a role, part or tool call that the model cannot take; nothing is left out silently.
    """
    turns: list[dict[str, str]] = []
    brought: list[list[Part] | None] = []  # by message
    for message in messages:
        texts = []
        parts: list[Part] | None = None
        for text, extras in _text_parts(message):
            if "chunk_id" in extras or "n_chunks" in extras:
                parts = parts or []
            if parts is not None and "chunk_id" in extras:
                parts.append(document_part(None, text, extras))
            else:
                texts.append(text)
        turns.append({"role": _role(message), "content": "\n".join(texts)})
        brought.append(parts)
    return Reading(turns, counted(turns, brought))


def answer_message(answer: Answer, request: Request) -> AIMessage:
    """An answer as one message."""
    block: dict[str, Any] = {"type": "text", "text": answer.text, "annotations": _annotations(answer)}
    metadata = response_metadata(answer, request)
    return AIMessage(content=[block], usage_metadata=_usage(answer), response_metadata=metadata)


def delta_message(text: str) -> AIMessageChunk:
    """A piece of an answer's text."""
    return AIMessageChunk(content=[{"type": "text", "text": text, "index": 0}])


def final_message(answer: Answer, request: Request) -> AIMessageChunk:
    """What comes after an answer's text: citations, usage, metadata."""
    return AIMessageChunk(
        content=[{"type": "text", "text": "", "annotations": _annotations(answer), "index": 0}],
        usage_metadata=_usage(answer),
        response_metadata=response_metadata(answer, request),
        chunk_position="last",
    )


def response_metadata(answer: Answer, request: Request) -> dict[str, Any]:
    """Circumstances of an answer.

    nfe: forward passes of decoding.
    kv: chunks read from the store (hit) and computed now (recomputed), candidates considered, chunks that were
        recognised by their text, and code points of given context that no stored chunk holds.
    history: turns before the question that were given and kept.
    support: probability that the documents hold the answer, or None; `supported` is False for one that is withheld.
    timings: milliseconds by phase.
    """
    stats = answer.stats
    return {
        "model_provider": "pdllm",
        "model_name": stats.model,
        "finish_reason": stats.finish_reason,
        "nfe": stats.nfe,
        "kv": request.kv(stats),
        "history": request.history(),
        "policy": stats.policy,
        "decoder": stats.decoder,
        "supported": stats.supported,
        "support": stats.support,
        "timings": dict(stats.ms),
        "citations": answer.as_dict()["citations"],
    }


def generation_info(answer: Answer, request: Request) -> dict[str, Any]:
    """What a completion says besides its text: metadata and usage."""
    return {**response_metadata(answer, request), "usage_metadata": _usage(answer)}


def _usage(answer: Answer) -> UsageMetadata:
    usage = Usage.of(answer.stats)
    counts = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "input_token_details": {"cache_read": usage.stored_tokens, "cache_creation": usage.computed_tokens},
    }
    return cast(UsageMetadata, counts)  # its optional keys look required to mypy below Python 3.11


def _annotations(answer: Answer) -> list[CitationBlock]:
    return [_annotation(citation) for citation in answer.citations]


def _annotation(citation: Citation) -> CitationBlock:
    extras = citation.as_dict()
    quote = extras.pop("quote")
    block = {"type": "citation", "title": citation.doc_id, "cited_text": quote, "extras": extras}
    return cast(CitationBlock, block)


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, AIMessage):
        if message.tool_calls or message.invalid_tool_calls:
            raise ValueError("ChatPDLLM got a message with tool calls, which it does not support; expected text only")
        return "assistant"
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return message.role
    kind = f"chat message of role {message.role!r}" if isinstance(message, ChatMessage) else f"{message.type!r} message"
    raise ValueError(f"ChatPDLLM got a {kind}; expected human, ai and system messages")


def _text_parts(message: BaseMessage) -> Iterator[tuple[str, dict[str, Any]]]:
    parts = [message.content] if isinstance(message.content, str) else message.content
    for part in parts:
        if isinstance(part, str):
            yield part, {}
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            yield part["text"], part.get("extras") or {}
        elif part.get("type") == "text-plain" and isinstance(part.get("text"), str):
            yield part["text"], {"chunk_id": None, **(part.get("extras") or {})}
        else:
            raise ValueError(f"ChatPDLLM got a message part of type {part.get('type')!r}; expected text parts only")
