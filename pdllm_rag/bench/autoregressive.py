"""An autoregressive model of the same shape and weights: prompt once, then a token a step over its KV cache.

It runs on the same layer loop and kernels as the diffusion decoders, so that only the way of decoding differs. Every
step is a CUDA graph of its own, captured for its exact length, and its token goes to the next step on the device; the
host waits once, at the end. On the CPU the steps are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdllm_rag.attends import PackedSplitSAttend
from pdllm_rag.attention import ChunkTable
from pdllm_rag.attention.triton import why_not
from pdllm_rag.attention.turn import Turn
from pdllm_rag.bench.decode_sides import likeliest, random_ids
from pdllm_rag.bench.device_clock import graphed
from pdllm_rag.context import Context, SequenceLayout
from pdllm_rag.models.backbone import Attend
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.rope import rotate

KINDS = ("sdpa", "split_s")  # of a step's attention
# cuDNN's is left out: it builds a plan for each length, and every step has a length of its own.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalAttend:
    """Rows at the end of a cache see it up to themselves; their keys and values are written to it.

    Args:
        keys, values: the cache, [Y, rows, G, D].
        first: row of the cache, and position, of the first of `n_rows` rows.
    """

    def __init__(self, model: LoadedModel, keys: torch.Tensor, values: torch.Tensor, first: int, n_rows: int) -> None:
        backbone = model.backbone
        self._keys, self._values = keys, values
        self._rows = slice(first, first + n_rows)
        self._is_causal = n_rows > 1
        if self._is_causal and first:
            raise ValueError(f"{n_rows} rows behind {first} of a cache; expected one row, or an empty cache")
        self._cos, self._sin = backbone.rope.tables(torch.arange(first, first + n_rows, device=backbone.device))
        has_kernels = why_not(backbone.device, backbone.dtype, backbone.head_dim) is None
        slots = torch.arange(first, first + n_rows, dtype=torch.int32, device=backbone.device)
        self._turn = Turn(self._cos, self._sin, slots) if has_kernels else None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if self._turn is not None:
            q, _ = self._turn(q, k, v, keys=keys, values=values)
        else:
            keys[self._rows] = rotate(k, self._cos, self._sin).to(k.dtype)
            values[self._rows] = v
            q = rotate(q, self._cos, self._sin).to(q.dtype)
        seen_k, seen_v = (one[: self._rows.stop].transpose(0, 1)[None] for one in (keys, values))
        if self._is_causal:
            queries = q.transpose(0, 1)[None]
            with sdpa_kernel(BACKENDS):
                out = F.scaled_dot_product_attention(queries, seen_k, seen_v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)
        _, n_heads, head_dim = q.shape  # of one row: the heads of a group become rows
        packed = q.view(1, keys.shape[1], -1, head_dim)
        with sdpa_kernel(BACKENDS):
            return F.scaled_dot_product_attention(packed, seen_k, seen_v).reshape(1, n_heads, head_dim)


class Autoregressive:
    """Greedy decoding of a random prompt.

    Args:
        kind: of `KINDS`: torch's attention for a step, or our kernel.

    Attributes:
        tokens: int64 [n_steps + 1], the prompt's continuation.

    Raises:
        ValueError: our kernel was asked for and cannot run.
    """

    @torch.inference_mode()
    def __init__(self, model: LoadedModel, *, prompt_len: int, n_steps: int, kind: str = "sdpa") -> None:
        backbone = model.backbone
        self._model, self._prompt_len = model, prompt_len
        shape = (backbone.n_layers, prompt_len + n_steps, backbone.n_kv_heads, backbone.head_dim)
        self._keys = torch.zeros(shape, dtype=backbone.dtype, device=backbone.device)
        self._values = torch.zeros_like(self._keys)
        self.prompt = torch.tensor(random_ids(model, prompt_len), device=backbone.device)
        self.tokens = torch.zeros(n_steps + 1, dtype=torch.int64, device=backbone.device)
        self._whole = CausalAttend(model, self._keys, self._values, 0, prompt_len)
        self._steps = [self._step(number, kind) for number in range(n_steps)]

    @torch.inference_mode()
    def prefill(self) -> None:
        """Encode the prompt and predict the first token."""
        hidden = self._model.backbone.hidden(self.prompt, self._whole)
        self.tokens[:1] = likeliest(self._model.backbone, hidden[-1:])[0]

    @torch.inference_mode()
    def decode(self) -> None:
        """All steps."""
        for step in self._steps:
            step()

    def _step(self, number: int, kind: str) -> Callable[[], object]:
        backbone, length = self._model.backbone, self._prompt_len + number
        attend: Attend
        if kind == "split_s":
            table = ChunkTable.of([(0, length, 0), (length, 1, 0)])
            layout = SequenceLayout(table, canvas_row=length, n_rows=1, canvas_start=length)
            attend = PackedSplitSAttend(backbone, Context(self._keys, self._values, (layout,)))
        elif kind == "sdpa":
            attend = CausalAttend(self._model, self._keys, self._values, length, 1)
        else:
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")

        def run() -> None:
            hidden = backbone.hidden(self.tokens[number : number + 1], attend)
            self.tokens[number + 1 : number + 2] = likeliest(backbone, hidden)[0]

        return graphed(run, backbone.device)
