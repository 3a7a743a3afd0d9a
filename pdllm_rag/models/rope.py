"""Rotary position embedding in the half-rotation layout, and the rotation that moves a stored chunk.

Keys are stored rotated at chunk-local positions. R(a) R(b) = R(a + b), so a chunk is placed at offset o by one more
rotation, of its keys by o or of the query by -o. The rotation that places is not scaled: a scaling's attention factor
is already in the stored keys.
"""

from __future__ import annotations

from typing import Any

import torch


class Rope:
    """Rotary tables of one model.

    Args:
        inv_freq: float32 [D/2], radians per position.
        attention_factor: multiplies cos and sin (1 but for YaRN-like scalings).
        name: canonical text of theta and scaling, for fingerprints.
    """

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float, name: str) -> None:
        self.inv_freq = inv_freq
        self.attention_factor = attention_factor
        self.name = name

    @classmethod
    def from_config(cls, config: Any, device: torch.device) -> Rope:
        """Tables for a transformers config, as the library computes them.

        Scalings that change with the input's length ("dynamic", "longrope") are frozen at the length the model was
        trained on, since stored keys cannot follow the length of a later question: up to it they are the library's.
        A partial embedding gets frequency zero for the other dimensions (see `layout`).
        """
        parameters = dict(config.rope_parameters)
        kind = parameters.get("rope_type", "default")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        name = " ".join(f"{key}={parameters[key]!r}" for key in sorted(parameters))
        if kind == "default":
            steps = torch.arange(0, dims, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
            inv_freq, factor = 1.0 / (float(parameters["rope_theta"]) ** (steps / dims)), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frozen = {}
            if kind in ("dynamic", "longrope"):
                trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
                frozen = {"seq_len": int(trained)}
                name += f" frozen={trained}"
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, device, **frozen)
        inv_freq = torch.nn.functional.pad(inv_freq.float(), (0, (head_dim - dims) // 2))
        return cls(inv_freq, float(factor), name)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [N, 1, D], for positions int64 [N]."""
        angles = positions.to(torch.float32)[:, None, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def shift(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        """x [..., D] rotated by `offset` positions, computed and returned in float32 (float64 stays float64)."""
        angles = self.inv_freq.to(torch.promote_types(x.dtype, torch.float32)) * offset
        angles = torch.cat((angles, angles))
        return rotate(x, angles.cos(), angles.sin())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., D] turned by broadcastable cos and sin, in their dtype (float32: round once, afterwards)."""
    x = x.to(cos.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
