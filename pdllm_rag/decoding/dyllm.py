"""DyLLM decoding: between two steps most rows' attention hardly turns, so only those whose context did are computed.

- over stored chunk KV, which never changes: the prompt is then the question; or over a dense prompt without chunks;
- first passes are full (`DyLLMOptions.full_steps`), later ones sparse; most of them leave the question's rows out. The
  last row before the answer stays in where it predicts the first answer token (logit shift);
- answer blocks are opened one after another, as everywhere here, where the source has all masks from the start: a new
  block's rows have nothing kept, so the first pass after it is full for that sequence;
- it is an approximation: with `refresh_every=1` it is static-KV decoding, otherwise answers may differ.

Source: DyLLM (arXiv 2603.08026). docs/decoders.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdllm_rag.attention import causal_block, resolve
from pdllm_rag.context import Placed, gather, rows_needed
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule, denoise
from pdllm_rag.decoding.dyllm_graphed import DyLLMSteps
from pdllm_rag.decoding.dyllm_plan import DyLLMOptions, PassKind, PassRecord, Plan
from pdllm_rag.decoding.dyllm_rows import EagerState
from pdllm_rag.decoding.graphed import Shape, can_capture, checked_out
from pdllm_rag.decoding.predictions import DeviceRows, Predictions
from pdllm_rag.decoding.static_kv import answer_logits
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.models.loader import LoadedModel

__all__ = ["TAUS", "DyLLMDecoder", "DyLLMOptions", "PassKind", "PassRecord"]

TAUS = {"dream": 0.995}  # published; 0.99 is LLaDA's, and stands in for every other family
OTHER_TAU = 0.99


class DyLLMDecoder:
    """Decodes over stored chunk KV, or over the prompt alone when a request has no chunks.

    Attributes:
        tau: the threshold in force.
        passes: what each forward pass of the latest `steps` computed.
    """

    name = "dyllm"
    needs_kv = True

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: DyLLMOptions = DyLLMOptions(),  # noqa: B008
        *,
        backend: str = "auto",
    ) -> None:
        self._model = model
        self._rule = rule or CommitRule()
        self._options = options
        self.tau = TAUS.get(model.spec.family.name, OTHER_TAU) if options.tau is None else options.tau
        backbone = model.backbone
        self._backend = resolve(backend, backbone.device, backbone.dtype, backbone.head_dim)
        self._block = causal_block(model.spec.family)
        self.passes: list[PassRecord] = []

    @property
    def is_graphed(self) -> bool:
        """Whether a pass is replayed as a CUDA graph: as static-KV decoding, and only with a `capacity`.

        Without one a layer's salient rows are counted by the host, which has to wait for them.
        """
        return can_capture(self._model, self._backend) and self._options.capacity is not None

    @property
    def backend(self) -> str:
        """The Split-S backend in use."""
        return f"{self._backend}, graphed" if self.is_graphed else self._backend

    @property
    def share(self) -> float:
        """Rows computed anew in the latest `steps`, as a share of those that static-KV decoding computes."""
        return sum(one.recomputed for one in self.passes) / max(1, sum(one.canvas_rows for one in self.passes))

    @property
    def bytes_per_token(self) -> int:
        """Bytes kept per canvas row: keys, values, context and feed-forward output of every layer.

        A reference context more with similarity "refresh". A chunk's token has keys and values alone.
        """
        backbone = self._model.backbone
        n_contexts = 2 if self._options.similarity == "refresh" else 1
        heads = 2 * backbone.n_kv_heads + n_contexts * backbone.n_heads
        width: int = heads * backbone.head_dim + backbone.model.config.hidden_size
        return backbone.n_layers * width * backbone.dtype.itemsize

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        self.passes = []
        contexts = [request.placed() for request in requests]
        return (self._graphed if self.is_graphed and requests else self._eager)(requests, contexts, self.passes)

    def _rooms(self, requests: Sequence[DecodeRequest]) -> list[int]:
        return [Canvas.room(len(r.prompt_ids), r.max_new_tokens, self._model.spec.family) for r in requests]

    def _eager(
        self, requests: Sequence[DecodeRequest], contexts: Sequence[Placed], passes: list[PassRecord]
    ) -> Iterator[DecodeStep]:
        model = self._model
        plan = Plan(self._options, len(requests), int(model.spec.logit_shift))
        context = gather(contexts, self._rooms(requests), model.backbone)
        state = EagerState(model.backbone, context, plan, self.tau, block=self._block, backend=self._backend)

        def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[Predictions]:
            hidden, parts, record = state.run(active, canvases)
            passes.append(record)
            windows = [range(part.first, len(canvas.ids)) for part, canvas in zip(parts, canvases, strict=True)]
            return answer_logits(model, hidden, canvases, windows)

        return denoise(requests, forward, model.spec, self._rule)

    def _graphed(
        self, requests: Sequence[DecodeRequest], contexts: Sequence[Placed], passes: list[PassRecord]
    ) -> Iterator[DecodeStep]:
        backbone, spec, rooms = self._model.backbone, self._model.spec, self._rooms(requests)
        assert isinstance(backbone, FusedBackbone)
        plan = Plan(self._options, len(requests), int(spec.logit_shift))
        n_context = rows_needed(contexts, rooms) - sum(rooms)
        shape = Shape.fitting(len(requests), max(rooms), n_context, spec.family.block_len)
        response_rows = max(n - len(r.prompt_ids) for n, r in zip(rooms, requests, strict=True)) + plan.shift
        make = DyLLMSteps(self._options, self.tau, response_rows)
        with checked_out(backbone, spec.logit_shift, shape, make) as step:
            context = gather(contexts, rooms, backbone, into=step.buffers)

            def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[DeviceRows]:
                found, record = step.run(plan, context, active, canvases)
                passes.append(record)
                return found

            yield from denoise(requests, forward, spec, self._rule)
