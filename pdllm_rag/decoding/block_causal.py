"""The own decoding of block-causal families (SDAR, Fast-dLLM v2): block after block, finished ones kept exactly.

The same answers as static-KV decoding, step for step, at one block's rows a step; the question's whole blocks run once.
A finished block runs once more with its final tokens: without logit shift (SDAR) in the first step of the next block;
with it (Fast-dLLM v2) by itself, and its last row gives the next block's first token, with which that block begins.

Source: Fast-dLLM v2 (arXiv 2509.26328), block decoding, sub-blocks; SDAR (arXiv 2510.06303).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdllm_rag.attention import causal_block, resolve
from pdllm_rag.decoding.base import DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule
from pdllm_rag.decoding.pipeline import D2FOptions
from pdllm_rag.decoding.pipelined import pipelined
from pdllm_rag.models.loader import LoadedModel


@dataclass(frozen=True)
class BlockCausalOptions:
    """Order within a block.

    Attributes:
        sub_block: rows of a sub-block; the sub-blocks of a block are filled from left to right, each seeing the whole
            block. It divides the model's block; None fills the block as a whole. (Fast-dLLM v2: 8 of 32.)
        block_cache: when a sub-block's first token is final, its other steps run its rows only, over keys and values
            that the block's other rows had before. Fewer rows, and no longer exact.
    """

    sub_block: int | None = None
    block_cache: bool = False

    def __post_init__(self) -> None:
        if self.sub_block is not None and self.sub_block < 1:
            raise ValueError(f"sub_block is {self.sub_block}; expected 1 or more, or None")
        if self.block_cache and self.sub_block is None:
            raise ValueError("block_cache is True without sub_block; expected the rows of a sub-block, or False")


def why_not(model: LoadedModel) -> str | None:
    """Why this decoder cannot run on a model, or None."""
    if causal_block(model.spec.family) is not None:
        return None
    return (
        f"family {model.spec.family.name} is bidirectional, so keys and values of finished blocks change with every "
        "later token; take decoder 'static_kv'"
    )


class BlockCausalDecoder:
    """Decodes a block-causal model over stored chunk KV, or over the prompt alone when a request has no chunks.

    Raises:
        ValueError: a bidirectional model, sub-blocks that do not fit its blocks or go with a budget of steps, or a
            backend that cannot run.
    """

    name = "block_causal"
    needs_kv = True

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: BlockCausalOptions = BlockCausalOptions(),
        *,
        backend: str = "auto",
    ) -> None:
        if reason := why_not(model):
            raise ValueError(f"decoder 'block_causal' does not run on {model.spec.name}: {reason}")
        block = causal_block(model.spec.family)
        self._model, self._rule, self._options = model, rule or CommitRule(), options
        sub_block, steps = options.sub_block, self._rule.steps
        if sub_block is not None and (block or 0) % sub_block:
            raise ValueError(f"sub_block is {sub_block}; expected a divisor of {block}, the block of the model")
        if sub_block is not None and steps is not None:
            raise ValueError(f"sub_block is {sub_block} and steps is {steps} per block; expected one of them")
        self._one_by_one = D2FOptions(block_len=block, window=1)
        backbone = model.backbone
        self._backend = resolve(backend, backbone.device, backbone.dtype, backbone.head_dim)

    @property
    def backend(self) -> str:
        """The Split-S backend in use."""
        return self._backend

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        return pipelined(
            self._model.backbone,
            self._model.spec,
            requests,
            self._rule,
            self._one_by_one,
            backend=self._backend,
            sub_block=self._options.sub_block,
            block_cache=self._options.block_cache,
        )
