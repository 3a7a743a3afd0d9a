"""D2F: later blocks are denoised while earlier ones still hold masks, and finished ones are kept exactly.

The canvas is block-causal: question rows see chunks and question, an answer row also the blocks up to its own. A block
is opened when some of the one before is final, and activated when most of it is (`pipeline`). Rows of the question and
of finished blocks run once; a step then costs the rows of the open blocks.

A bidirectional model was not trained to do without the rows behind a block, nor to build on blocks that hold masks. D2F
teaches it both, by an adapter for canvas rows (`load_model(..., canvas_adapter=)`; chunk KV is encoded without it).
Without one the decoder runs, and `caution` says what to expect.

Source: D2F (arXiv 2508.09192).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdllm_rag.attention import causal_block, resolve
from pdllm_rag.decoding.base import DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule
from pdllm_rag.decoding.pipeline import D2FOptions
from pdllm_rag.decoding.pipelined import pipelined
from pdllm_rag.models.loader import LoadedModel


def caution(model: LoadedModel, options: D2FOptions) -> str | None:
    """Why this model's answers will be worse than by its own way of decoding, or None."""
    if causal_block(model.spec.family) is not None:
        if options.window == 1:
            return None
        return "its blocks were trained to follow finished ones; set window to 1, or take decoder 'block_causal'"
    if model.canvas_backbone is not None:
        return None
    return (
        "it was trained with every row in sight and no D2F adapter is loaded, so its blocks lack the rows behind them "
        "and build on unfinished ones; load an adapter as canvas_adapter, or take decoder 'static_kv'"
    )


class D2FDecoder:
    """Decodes several blocks at once over stored chunk KV, or over the prompt alone when a request has no chunks.

    Raises:
        ValueError: blocks that do not fit the model's own, or a backend that cannot run.
    """

    name = "d2f"
    needs_kv = True

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: D2FOptions = D2FOptions(),  # noqa: B008
        *,
        backend: str = "auto",
    ) -> None:
        block = causal_block(model.spec.family)
        if block is not None and options.block_len is not None and options.block_len % block:
            raise ValueError(
                f"block_len is {options.block_len}; expected a multiple of {block}, the block of {model.spec.name}"
            )
        self._spec, self._rule, self._options = model.spec, rule or CommitRule(), options
        self._backbone = model.canvas_backbone or model.backbone
        self._backend = resolve(backend, self._backbone.device, self._backbone.dtype, self._backbone.head_dim)

    @property
    def backend(self) -> str:
        """The Split-S backend in use."""
        return self._backend

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        return pipelined(self._backbone, self._spec, requests, self._rule, self._options, backend=self._backend)
