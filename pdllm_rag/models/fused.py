"""The layer loop with fewer, larger steps: for a GPU, where what stands between the matrix products costs most.

- queries, keys and values are one product, gate and up another: their weights are laid side by side, and the library's
  modules become views of them, so that no weight is held twice;
- residual, norm, activation are one kernel each (`fused_kernels`);
- results equal `Backbone`'s but for rounding; shapes are fixed by the number of rows, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from threading import RLock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pdllm_rag.models.backbone import Attend, Backbone, on_device_of
from pdllm_rag.models.rope import Rope

_PROPOSE_BLOCK = 4096


class _Layer(NamedTuple):
    """Weights of one layer; biases and head norms are None where the family has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    middle_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def backbone_for(model: Any, rope: Rope, *, mask_id: int, forbidden_from: int) -> Backbone:
    """`FusedBackbone` on a GPU for the models that it takes, else `Backbone`."""
    device = model.model.embed_tokens.weight.device
    fused = device.type == "cuda" and why_not_fused(model) is None
    return (FusedBackbone if fused else Backbone)(model, rope, mask_id=mask_id, forbidden_from=forbidden_from)


@lru_cache(maxsize=8)
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch options of a small kernel, which may start while the one before it ends where the device can do that."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


def why_not_fused(model: Any) -> str | None:
    """Why `FusedBackbone` does not take this model, or None."""
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install 'pdllm-rag[gpu]')"
    if model.config.hidden_act != "silu":
        return f"its activation is {model.config.hidden_act!r}, not 'silu'"
    for layer in model.model.layers:
        if not all(hasattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            return "its feed-forward part is no gated pair of projections (a mixture of experts)"
        attention, mlp = layer.self_attn, layer.mlp
        plain = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for module in (*plain, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if type(module) is not torch.nn.Linear or not module.weight.is_floating_point():
                return f"its projections are {type(module).__name__} modules (quantised or adapted), not plain ones"
        if any(module.bias is not None for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            return "its feed-forward projections have biases"
        heads_normed = hasattr(attention, "q_norm")
        if heads_normed and attention.q_norm.weight.shape != (attention.head_dim,):
            return "its query norm is not one head wide"
        if heads_normed and attention.head_dim & (attention.head_dim - 1):
            return f"its normed heads have {attention.head_dim} elements, no power of two"
    return None


class FusedBackbone(Backbone):
    """`Backbone` for dense models of plain projections.

    The weights may not be moved or replaced afterwards: the joined tensors are what is computed with.

    Attributes:
        captures: what has been captured over these weights and waits to be used again, the one that was used last
            at the end (see `checked_out`).

    Raises:
        ValueError: the model is not of that kind (`why_not_fused`).
    """

    def __init__(self, model: Any, rope: Rope, *, mask_id: int, forbidden_from: int) -> None:
        super().__init__(model, rope, mask_id=mask_id, forbidden_from=forbidden_from)
        reason = why_not_fused(model)
        if reason is not None:
            raise ValueError(f"this model cannot run fused: {reason}; use Backbone")
        self._eps: float = model.config.rms_norm_eps
        self._overlap = overlap(self.device)
        self._layers = [_fuse(layer) for layer in model.model.layers]
        self.captures: list[Any] = []
        self.captures_lock = RLock()  # the collector may end a decode that was left halfway in a thread that holds it

    @torch.inference_mode()
    def hidden(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As `Backbone.hidden`."""
        with on_device_of(ids):
            x, delta = self._run(ids, attend)
            return self._add_norm(x, delta, self.model.model.norm.weight)[1]

    @torch.inference_mode()
    def encode(self, ids: torch.Tensor, attend: Attend) -> None:
        """As `Backbone.encode`."""
        with on_device_of(ids):
            self._run(ids, attend, for_output=False)

    @torch.inference_mode()
    def proposals(self, raw: torch.Tensor) -> torch.Tensor:
        """As `Backbone.proposals`, in one pass over the logits."""
        from triton import next_power_of_2

        from pdllm_rag.models import fused_kernels

        n_rows, width = raw.shape
        n_parts = -(-width // _PROPOSE_BLOCK)
        parts = torch.empty(n_rows, n_parts, 2, dtype=torch.float32, device=raw.device)
        best = torch.empty(n_rows, n_parts, dtype=torch.int32, device=raw.device)
        out = torch.empty(n_rows, 3, dtype=torch.int32, device=raw.device)
        with on_device_of(raw):
            fused_kernels.propose_kernel[(n_rows, n_parts)](
                raw,
                parts,
                best,
                raw.stride(0),
                min(self.forbidden_from, width),
                self.mask_id,
                N_PARTS=n_parts,
                BLOCK=_PROPOSE_BLOCK,
                num_warps=8,
            )
            fused_kernels.propose_merge_kernel[(n_rows,)](
                parts, best, out, N_PARTS=n_parts, PARTS=next_power_of_2(n_parts), num_warps=1
            )
        return out

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Backbone.add_norm`, of rows [N, hidden], in one launch."""
        return self._add_norm(x, delta, norm.weight)

    def feed_forward(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """As `Backbone.feed_forward`, in three launches."""
        layer = self._layers[index]
        return F.linear(self._gated(F.linear(normed, layer.gate_up)), layer.down)

    def _run(self, ids: torch.Tensor, attend: Attend, *, for_output: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream [N, hidden] and what is still to be added to it."""
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        delta: torch.Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            x, normed = self._add_norm(x, delta, layer.input_norm)
            context = attend(index, *self._heads(normed, layer))
            if index == last and not for_output:
                break
            delta = F.linear(context.reshape(len(x), -1), layer.o, layer.o_bias)
            x, normed = self._add_norm(x, delta, layer.middle_norm)
            delta = self.feed_forward(index, normed)
        assert delta is not None or not for_output
        return x, x if delta is None else delta

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from triton import next_power_of_2

        from pdllm_rag.models import fused_kernels

        total = x if delta is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        n_rows, width = x.shape
        fused_kernels.add_norm_kernel[(n_rows,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            normed,
            self._eps,
            WIDTH=width,
            BLOCK=next_power_of_2(width),
            ADDS=delta is not None,
            **self._overlap,
            num_warps=8,
        )
        return total, normed

    def _heads(self, normed: torch.Tensor, layer: _Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from triton import next_power_of_2

        from pdllm_rag.models import fused_kernels

        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(qkv), -1, self.head_dim)
        n_normed = self.n_heads + self.n_kv_heads
        if layer.q_norm is not None:
            fused_kernels.head_norm_kernel[(len(qkv),)](
                qkv,
                layer.q_norm,
                layer.k_norm,
                self._eps,
                qkv.stride(0),
                N_HEADS=self.n_heads,
                N_NORMED=n_normed,
                HEAD_DIM=self.head_dim,
                HEADS=next_power_of_2(n_normed),
                num_warps=8,
            )
        return heads[:, : self.n_heads], heads[:, self.n_heads : n_normed], heads[:, n_normed:]

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        from pdllm_rag.models import fused_kernels

        n_rows, width = len(gate_up), gate_up.shape[1] // 2
        n_parts = -(-width // 2048)
        out = torch.empty(n_rows, width, dtype=gate_up.dtype, device=gate_up.device)
        fused_kernels.gate_kernel[(n_rows, n_parts)](
            gate_up,
            out,
            WIDTH=width,
            BLOCK=2048,
            **self._overlap,
            num_warps=4,
        )
        return out


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = _side_by_side([module.weight for module in projections])
    biases = [module.bias for module in projections]
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=None if biases[0] is None else _side_by_side(biases),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "q_norm") else None,
        o=attention.o_proj.weight,
        o_bias=attention.o_proj.bias,
        middle_norm=layer.post_attention_layernorm.weight,
        gate_up=_side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


@torch.no_grad()
def _side_by_side(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """One tensor of all rows; the parameters become views of it."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined
