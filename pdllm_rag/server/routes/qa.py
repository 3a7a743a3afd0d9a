"""POST /v1/qa: a question over the documents, answered as `pdllm ask --json` does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from starlette.requests import ClientDisconnect

from pdllm_rag.answer import Answer
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.events import CanvasUpdate, Final, StreamEvent, TextDelta
from pdllm_rag.policies import POLICIES
from pdllm_rag.server.failures import ApiError
from pdllm_rag.server.routes import sse
from pdllm_rag.server.services import Services, as_json, usage

Count = Annotated[StrictInt, Field(ge=1)]
Text = Annotated[StrictStr, Field(max_length=1000)]


class Question(BaseModel):
    """A question. What is left out is as the server's engine has it."""

    model_config = ConfigDict(extra="forbid")

    question: Annotated[StrictStr, Field(min_length=1, description="the question")]
    k: Annotated[Count | None, Field(description="most chunks that the model reads")] = None
    filter: Annotated[
        dict[Text, Text | StrictInt | StrictFloat | StrictBool] | None,
        Field(max_length=16, description="metadata that a document must have; doc_id and source count as metadata"),
    ] = None
    decoder: Annotated[Literal[tuple(KINDS)] | None, Field(description="how the answer is denoised")] = None  # type: ignore[valid-type]
    policy: Annotated[Literal[tuple(POLICIES)] | None, Field(description="where chunk KV comes from")] = None  # type: ignore[valid-type]
    max_new_tokens: Annotated[Count | None, Field(description="longest answer")] = None
    stream: Annotated[StrictBool, Field(description="send server-sent events: canvas, text, answer or error")] = False

    def options(self) -> dict[str, Any]:
        """Options that were given."""
        given = self.model_dump(exclude={"question", "stream"}, exclude_none=True)
        return dict(given)


def router(services: Services) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["questions"])

    @routes.post("/v1/qa", summary="Ask a question", responses=sse.DESCRIBED)
    async def qa(body: Question, request: Request) -> Response:
        """The answer, its citations, statistics and usage; with `stream` as server-sent events.

        `canvas` events tell of each denoising step: answer positions, the pieces of text that were put there and how
        sure the model was. `text` events hold text that is final; `answer` holds the whole result and ends the stream.
        """
        services.check_question(body.question)
        services.check_limit("k", body.k, services.settings.max_k)
        services.check_limit("max_new_tokens", body.max_new_tokens, services.settings.max_answer_tokens)
        if not body.stream:
            return JSONResponse(_result(await services.answer(request, body.question, **body.options()), services))
        events = services.ask(request, body.question, **body.options())
        first = await anext(events)  # so that what fails before it has its own status
        return sse.stream(_messages(services, first, events))

    return routes


def _result(answer: Answer, services: Services) -> dict[str, Any]:
    return {**as_json(answer, services), "usage": usage(answer.stats)}


async def _messages(
    services: Services, first: StreamEvent, events: AsyncGenerator[StreamEvent, None]
) -> AsyncIterator[bytes]:
    try:
        yield _message(services, first)
        async for event in events:
            yield _message(services, event)
    except ApiError as error:
        yield sse.message(error.body(), "error")
    except ClientDisconnect:
        return
    finally:
        await events.aclose()


def _message(services: Services, event: StreamEvent) -> bytes:
    if isinstance(event, TextDelta):
        return sse.message({"text": event.text}, "text")
    if isinstance(event, Final):
        return sse.message(_result(event.answer, services), "answer")
    assert isinstance(event, CanvasUpdate)
    model, step = services.engine.model, event.step
    tokens = [None if token in model.spec.eos_ids else model.tokenizer.decode([token]) for token in step.tokens]
    canvas = {"nfe": step.nfe, "block_len": model.spec.family.block_len}
    return sse.message({**canvas, "rows": step.rows, "pieces": tokens, "confidence": step.confidence}, "canvas")
