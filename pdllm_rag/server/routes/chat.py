"""POST /v1/chat/completions and GET /v1/models, shaped as OpenAI's clients expect.

- the last message, the user's, is the question; retrieval looks for it alone. Of the earlier ones those are put before
  it that `history` keeps; `history` in the answer says how many of how many;
- a prompt that holds stored chunks is read as the components read it (`resolving`), instead of what retrieval would
  find; `kv` in the answer says how much was recognised;
- a chat UI's own errands (a title for the conversation, tags, follow-ups) ask nothing of the documents: they are
  recognised by the wording of such prompts, or by `"retrieval": false`, and the model answers them alone;
- what the model cannot do (tools, several choices, log-probabilities) is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr
from starlette.requests import ClientDisconnect

from pdllm_rag.answer import Answer
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.events import Final, StreamEvent, TextDelta
from pdllm_rag.history import kept_turns
from pdllm_rag.policies import POLICIES
from pdllm_rag.resolving import Resolved
from pdllm_rag.server.failures import ApiError
from pdllm_rag.server.routes import sse
from pdllm_rag.server.services import Services, usage

_ERRANDS = re.compile(
    r"\A\s*### Task:.*<chat_history>|\A.{0,200}\btitle for (?:the|this) (?:conversation|chat)\b", re.DOTALL
)
MAX_MESSAGES = 1000


class Part(BaseModel):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[Part], Field(max_length=100)]

    def plain(self) -> dict[str, str]:
        """As the engine takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream holds."""

    include_usage: StrictBool = False


class Completion(BaseModel):
    """A request. Fields that are not listed are ignored, as OpenAI's servers do."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=16)] | None = None
    retrieval: Annotated[
        StrictBool | None,
        Field(description="false: answer without the documents; true: look in them whatever the prompt holds"),
    ] = None
    n: Literal[1, None] = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Literal[False, None] = None
    response_format: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        """The engine's options that were given."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop": stop or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["OpenAI"])
    name = services.model_name
    started = int(time.time())

    @routes.get("/v1/models", summary="The model that answers")
    async def models() -> dict[str, Any]:
        """OpenAI's list of one model, and what this server offers and admits."""
        settings, options = services.settings, services.engine.options
        own = {
            "decoders": [name for name, kind in KINDS.items() if kind.why_not(services.engine.model) is None],
            "policies": list(POLICIES),
            "defaults": {
                name: getattr(options, name) for name in ("k", "decoder", "policy", "max_new_tokens", "candidates")
            },
            "limits": {
                name: getattr(settings, name)
                for name in ("max_k", "max_answer_tokens", "max_question_chars", "max_file_bytes", "max_documents")
            },
        }
        model = {"id": name, "object": "model", "created": started, "owned_by": "pdllm-rag", "pdllm": own}
        return {"object": "list", "data": [model]}

    @routes.post("/v1/chat/completions", summary="Ask in a conversation", responses=sse.DESCRIBED)
    async def chat(body: Completion, request: Request) -> Response:
        """OpenAI's chat completion; `citations` is always there, in a stream in the last event before [DONE]."""
        if body.model != name:
            raise ApiError(404, f"there is no such model here; the one that answers is {name}", "model_not_found")
        if body.response_format and body.response_format.get("type") != "text":
            raise ApiError(422, "only text answers are offered", "unsupported", param="response_format")
        options = body.options()
        services.check_limit("max_tokens", options.get("max_new_tokens"), services.settings.max_answer_tokens)
        messages = [message.plain() for message in body.messages]
        question = messages[-1]
        alone = body.retrieval is False or (body.retrieval is None and _ERRANDS.search(question["content"]) is not None)
        resolved = Resolved(messages, None, [], 0, 0)
        if body.retrieval is None and not alone and question["role"] == "user":
            read = await services.resolve(messages)
            if read.recognised:  # else "Context:" and the like are words of a conversation
                resolved = read
        if not alone:
            services.check_question(resolved.turns[-1]["content"], resolved.unmatched_chars)
        if material := resolved.material():
            options |= {**material, "filter": {}}  # an engine's own is for retrieval
        encode, room = services.engine.model.tokenizer.encode, services.settings.max_history_tokens
        # in a thread: a long talk takes its time to be counted
        kept = await asyncio.to_thread(kept_turns, resolved.turns, encode, room)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        history = {"kept": len(kept) - 1, "given": len(messages) - 1}

        def own(answer: Answer) -> dict[str, Any]:
            pasted = {"recognised": resolved.recognised, "unmatched_chars": resolved.unmatched_chars}
            kv = {**answer.stats.chunks._asdict(), **pasted}
            return {"citations": answer.as_dict()["citations"], "history": history, "kv": kv}

        if not body.stream:
            answer = await services.answer(request, kept, alone=alone, **options)
            return JSONResponse(_completion(head, answer, own(answer)))
        events = services.ask(request, kept, alone=alone, **options)
        first = await anext(events)  # so that what fails before it has its own status
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return sse.stream(_chunks(head, first, events, own, include_usage=include_usage))

    return routes


def _completion(head: dict[str, Any], answer: Answer, own: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    choice = {"index": 0, "message": message, "finish_reason": answer.stats.finish_reason, "logprobs": None}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage(answer.stats), **own}


async def _chunks(
    head: dict[str, Any],
    first: StreamEvent,
    events: AsyncGenerator[StreamEvent, None],
    own: Callable[[Answer], dict[str, Any]],
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    def chunk(delta: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        return sse.message({**head, "object": "chat.completion.chunk", "choices": choices, **more})

    try:
        yield chunk({"role": "assistant", "content": ""})
        event = first
        while not isinstance(event, Final):
            if isinstance(event, TextDelta):
                yield chunk({"content": event.text})
            event = await anext(events)
        answer = event.answer
        told = own(answer)
        yield chunk({}, answer.stats.finish_reason, **told)
        if include_usage:
            yield chunk(None, usage=usage(answer.stats), **told)
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield sse.message(error.body())
    except ClientDisconnect:
        return
    finally:
        await events.aclose()
