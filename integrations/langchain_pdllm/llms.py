"""The completion model: a prompt in, an answer from the store's chunks out, as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict

from langchain_pdllm._answering import AnsweringModel
from langchain_pdllm.messages import generation_info
from pdllm_rag.components.answering import Request

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer
    from pdllm_rag.events import StreamEvent


class PDLLM(AnsweringModel, LLM):
    """Answers a prompt from a chunk-KV store.

    It reads what `ChatPDLLM` would read for the prompt as one human message, and takes the same options. `generate` and
    streamed chunks carry citations, usage and the rest of `ChatPDLLM`'s metadata as `generation_info`.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's base would ignore a mistyped option

    def batch(self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any) -> list[Any]:
        """As of any runnable: prompts are answered one by one, so that one that fails leaves the others."""
        return Runnable.batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """As `batch`."""
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> str:
        request = self._request(prompt, stop, kwargs)
        return request.engine.answer(request.turns, **request.arguments).text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            request = self._request(prompt, stop, kwargs)
            generations.append([_generation(request.engine.answer(request.turns, **request.arguments), request)])
        return LLMResult(generations=generations)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            request = await asyncio.to_thread(self._request, prompt, stop, kwargs)
            answer = await request.engine.aanswer(request.turns, **request.arguments)
            generations.append([_generation(answer, request)])
        return LLMResult(generations=generations)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        return self._chunks(prompt, stop, kwargs, run_manager)

    def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        return self._achunks(prompt, stop, kwargs, run_manager)

    def _request(self, prompt: str, stop: list[str] | None, given: dict[str, Any]) -> Request:
        return self.request([{"role": "user", "content": prompt}], None, {"stop": stop, **given})

    def _chunk(self, event: StreamEvent, request: Request) -> GenerationChunk | None:
        from pdllm_rag.events import Final, TextDelta

        if isinstance(event, TextDelta):
            return GenerationChunk(text=event.text)
        if isinstance(event, Final):
            return GenerationChunk(text="", generation_info=generation_info(event.answer, request))
        return None


def _generation(answer: Answer, request: Request) -> Generation:
    return Generation(text=answer.text, generation_info=generation_info(answer, request))
