"""What one denoising step is measured by: static chunk KV, a whole context encoded anew, or kept in a prefix cache.

- a static-KV step is the decoder's own, by its public generator: from one forward's last event to the next one's, so
  that what the host does between two steps is in it. Steps are forced: one token, or an even share, is committed at a
  time, and no token ends the answer;
- a vanilla step encodes context and canvas and predicts the masked rows, all on the device: what a host would add is
  left out of it, and logits are made for the answer rows only;
- a prefix-cached step (as Fast-dLLM has it) is the static one over the KV of the whole context as a single chunk.

KV is random: its content does not change the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import DenseAttend
from pdllm_rag.attention import causal_block
from pdllm_rag.bench.ceilings import Ceilings
from pdllm_rag.bench.device_clock import once_ms
from pdllm_rag.bench.machine import take_turns
from pdllm_rag.bench.shapes import layer_parameters, weight_bytes
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import plan_offsets

NO_TOKEN = -1  # an end-of-answer id that no model produces
LONG_S = 3.0  # a step that takes longer is warm after one call, which counts


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a question.

    Attributes:
        question_rows: canvas rows before the answer.
        chunk_len: tokens of a chunk, BOS included.
        selected: chunks that a question reads.
        candidates: most chunks that are scored.
        few_steps: most steps of an answer whose steps commit several tokens; otherwise it takes one a token. The answer
            is one block of the family's.
        repeat: rounds of what is measured by steps, and questions.
    """

    question_rows: int = 64
    chunk_len: int = 1024
    selected: int = 4
    candidates: int = 32
    few_steps: int = 12
    repeat: int = 3

    def __post_init__(self) -> None:
        counts = (self.question_rows, self.selected, self.candidates, self.few_steps, self.repeat)
        if min(counts) < 1 or self.chunk_len < 2:
            raise ValueError(f"{self}; expected chunk_len of 2 or more and the others of 1 or more")

    @property
    def context_rows(self) -> int:
        """Rows of the chunks that a question reads."""
        return self.selected * self.chunk_len


def check_family(model: LoadedModel) -> None:
    """Refuse models whose answer is no single block of masks that see each other.

    Raises:
        ValueError: a block-causal family.
    """
    family = model.spec.family
    if causal_block(family) is not None:
        raise ValueError(
            f"family {family.name} has the mask {family.prefill_mask!r}; `bench decode` compares bidirectional models, "
            "such as the shapes dream-7b and llada-8b"
        )


def endless(model: LoadedModel) -> LoadedModel:
    """The same model without a token that ends an answer."""
    return replace(model, spec=replace(model.spec, eos_ids=(NO_TOKEN,)))


def random_kv(model: LoadedModel, n_rows: int, *, seed: int = 0) -> ChunkKV:
    """KV of `n_rows` rows [Y, n_rows, G, D], on the model's device in its dtype."""
    backbone = model.backbone
    shape = (backbone.n_layers, n_rows, backbone.n_kv_heads, backbone.head_dim)
    generator = torch.Generator(backbone.device).manual_seed(seed)
    tensors = (torch.empty(shape, dtype=backbone.dtype, device=backbone.device) for _ in range(2))
    return ChunkKV(*(tensor.normal_(generator=generator) for tensor in tensors))


def random_ids(model: LoadedModel, count: int, *, seed: int = 0) -> list[int]:
    """Token ids; special ones may be among them, which changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.spec.n_tokens, (count,), generator=generator).tolist()


def request_over(model: LoadedModel, kvs: Sequence[ChunkKV], sizes: DecodeSizes, *, seed: int = 0) -> DecodeRequest:
    """A question of the sizes' rows over chunks, one after another, and an answer of one block."""
    lens = [kv.k.shape[1] for kv in kvs]
    placement = plan_offsets(lens, "sequential", chunk_len=sizes.chunk_len)
    ids = random_ids(model, sizes.question_rows, seed=seed)
    return DecodeRequest(ids, placement, model.spec.family.block_len, chunk_kv=kvs)


class StaticSteps:
    """Steps of the static-KV decoder over some questions at once.

    Args:
        requests: decoded together.
        steps: so many forwards in all, by an even share of tokens each; None for one token at a time.

    Attributes:
        decoder: whose steps they are.
    """

    def __init__(self, model: LoadedModel, requests: Sequence[DecodeRequest], *, steps: int | None = None) -> None:
        self.decoder = StaticKVDecoder(endless(model), CommitRule(threshold=1.0, steps=steps))
        self._requests = requests

    def gaps_ms(self, n_forwards: int) -> list[float]:
        """Milliseconds of `n_forwards` - 1 steps: the first one, which gathers the context, is not among them."""
        events = self.decoder.steps(self._requests)
        ends: list[float] = []
        for _ in range(n_forwards):
            if sum(1 for _ in islice(events, len(self._requests))) < len(self._requests):
                raise RuntimeError(f"the decoder ended after {len(ends)} forwards; expected {n_forwards}")
            ends.append(time.perf_counter())
        return [(b - a) * 1000 for a, b in pairwise(ends)]

    def whole(self) -> int:
        """Run to the end; returns the number of forwards."""
        return max(step.nfe for step in self.decoder.steps(self._requests))

    def whole_ms(self, device: torch.device, repeat: int) -> list[float]:
        """Milliseconds of `repeat` whole runs, gathering the context included; one more goes ahead."""
        return take_turns({"whole": self.whole}, repeat, device=device)["whole"]


class VanillaStep:
    """One step over a context that is encoded anew with the canvas; tokens and confidences stay on the device.

    Args:
        context: tokens before the canvas.
    """

    @torch.inference_mode()
    def __init__(self, model: LoadedModel, context: int, sizes: DecodeSizes) -> None:
        backbone, family = model.backbone, model.spec.family
        self._backbone = backbone
        prompt = random_ids(model, context + sizes.question_rows)
        ids = [*prompt, *[model.spec.mask_id] * family.block_len]
        self.n_rows = len(ids)
        self._ids = torch.tensor(ids, device=backbone.device)
        answer = torch.arange(self.n_rows - family.block_len, self.n_rows, device=backbone.device)
        self._predicting = answer - int(model.spec.logit_shift)
        self._positions = torch.arange(self.n_rows, device=backbone.device)

    @torch.inference_mode()
    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of every answer row, and its probability."""
        attend = DenseAttend(self._backbone.rope, [self.n_rows], self._positions)
        hidden = self._backbone.hidden(self._ids, attend)
        return likeliest(self._backbone, hidden[self._predicting])


def likeliest(backbone: Backbone, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 tokens [M] and their probabilities of hidden rows [M, hidden], on the device."""
    found = backbone.proposals(backbone.raw_logits(hidden))
    return found[:, 0].long(), found[:, 1].contiguous().view(torch.float32)


def step_rounds(step: Callable[[], object], device: torch.device, repeat: int) -> tuple[int, list[float]]:
    """How many more rounds of a step are to be measured, and what was measured already.

    A short step was only warmed up; a long one's first call counts, and one more follows.
    """
    first_ms = once_ms(step, device)
    return (1, [first_ms]) if first_ms > LONG_S * 1000 else (repeat, [])


@dataclass(frozen=True)
class StepCost:
    """Bytes and operations that steps of a model take at the least.

    Attributes:
        weight_bytes: of all weights but the embedding.
        kv_row_bytes: of one row of keys and values, all layers.
    """

    weight_bytes: int
    kv_row_bytes: int
    row_flops: int  # of the layers, for one canvas row
    head_flops: int  # of the head, for one predicted row
    pair_flops: int  # of attention, for one canvas row and one key, all layers

    @classmethod
    def of(cls, model: LoadedModel) -> StepCost:
        """Of a dense model."""
        backbone = model.backbone
        head = backbone.model.lm_head.weight
        return cls(
            weight_bytes(model),
            2 * backbone.n_layers * backbone.n_kv_heads * backbone.head_dim * backbone.dtype.itemsize,
            2 * layer_parameters(model),
            2 * head.numel(),
            4 * backbone.n_layers * backbone.n_heads * backbone.head_dim,
        )

    def floor(
        self, ceilings: Ceilings, *, n_sequences: int, context_rows: int, canvas_rows: int, answer_rows: int
    ) -> dict[str, Any]:
        """The least milliseconds of one step: weights once and every sequence's KV, or all operations."""
        n_bytes = self.weight_bytes + n_sequences * context_rows * self.kv_row_bytes
        n_rows = n_sequences * canvas_rows
        flops = n_rows * (self.row_flops + self.pair_flops * (context_rows + canvas_rows))
        flops += n_sequences * answer_rows * self.head_flops
        return {
            "ms": ceilings.floor_s(n_bytes, flops) * 1000,
            "bound": ceilings.bound(n_bytes, flops),
            "bytes": n_bytes,
            "flops": flops,
        }
