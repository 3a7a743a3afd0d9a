"""What the routes of one server share, and how a question goes from a request to the worker and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from pdllm_rag.answer import Answer, AnswerStats
from pdllm_rag.engine import RagEngine
from pdllm_rag.events import Final, Messages, StreamEvent, TextDelta
from pdllm_rag.resolving import Resolved
from pdllm_rag.server.failures import ApiError, as_api_error
from pdllm_rag.server.ingest import Ingest
from pdllm_rag.server.metrics import Metrics
from pdllm_rag.server.parsing import FileReader
from pdllm_rag.server.settings import ServerSettings
from pdllm_rag.server.worker import Worker


@dataclass(frozen=True)
class Services:
    """The parts of one server."""

    engine: RagEngine
    settings: ServerSettings
    worker: Worker
    ingest: Ingest
    reader: FileReader
    metrics: Metrics

    @property
    def model_name(self) -> str:
        """The model's name; of a checkpoint its folder's, not where that is."""
        return PurePath(self.engine.model.spec.name).name

    def check_limit(self, name: str, value: int | None, limit: int) -> None:
        """Raises ApiError 422 if a number of a question is above its limit."""
        if value is not None and value > limit:
            raise ApiError(422, f"{name} is {value:,}, the limit is {limit:,}", "too_large", param=name)

    def check_question(self, text: str, n_more: int = 0) -> None:
        """Raises ApiError 422 if a question, with further characters to be encoded for it, is too long."""
        self.check_limit("the question's length", len(text) + n_more, self.settings.max_question_chars)

    async def resolve(self, messages: Messages) -> Resolved:
        """A conversation without the context that is pasted into it; raises ApiError."""
        try:
            return await asyncio.to_thread(self.engine.resolver.prompt, messages)
        except Exception as error:
            raise as_api_error(error) from error

    async def ask(
        self, request: Request, question: str | Messages, *, alone: bool = False, **options: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a question, put in line when the first is asked for.

        It is given up when the client goes away, when its time is over, or when this generator is closed.

        Raises:
            ApiError; ClientDisconnect.
        """
        started = time.perf_counter()
        try:
            asked = self.engine.asked(question, alone=alone, **options)
        except ValueError as error:
            raise ApiError(422, str(error), "bad_option") from error
        ticket = self.worker.submit(asked)
        seconds = self.settings.request_seconds
        late = ApiError(504, f"the answer took longer than {seconds:g} s", "timeout")
        timer = asyncio.get_running_loop().call_later(seconds, ticket.tell, late)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            ticket.give_up()
            ticket.tell(ClientDisconnect())

        watching = asyncio.create_task(watch())
        has_text = False
        try:
            while True:
                event = await ticket.next()
                if isinstance(event, TextDelta) and not has_text:
                    has_text = True
                    self.metrics.ttft.observe(time.perf_counter() - started)
                if isinstance(event, Final):
                    self.metrics.answered(event.answer.stats)
                    yield event
                    return
                yield event
        except ClientDisconnect:
            raise
        except Exception as error:
            raise as_api_error(error) from error
        finally:
            timer.cancel()
            watching.cancel()
            ticket.give_up()

    async def answer(self, request: Request, question: str | Messages, **options: Any) -> Answer:
        """A question's answer at once; raises as `ask`."""
        async with aclosing(self.ask(request, question, **options)) as events:
            async for event in events:
                if isinstance(event, Final):
                    return event.answer
        raise AssertionError("the events of a question end with the Final one")


def as_json(answer: Answer, services: Services) -> dict[str, Any]:
    """The object of `pdllm ask --json`, the model under the name that it is served by."""
    whole = answer.as_dict()
    whole["stats"]["model"] = services.model_name
    return whole


def usage(stats: AnswerStats) -> dict[str, Any]:
    """Tokens of an answer under OpenAI's names; the chunks read count as prompt, those from the store as cached."""
    n_prompt = stats.prompt_tokens + stats.context_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": stats.tokens,
        "total_tokens": n_prompt + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }
