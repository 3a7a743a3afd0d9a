"""Queries and keys turned to their positions in one launch; keys and values put where they belong on the way."""

from __future__ import annotations

import torch

from pdllm_rag.models.fused import overlap


class Turn:
    """Of packed rows with one cos and sin each.

    Args:
        cos, sin: float32 [N, 1, D], see `Rope.tables`.
        slots: int32 [N], the row of `keys` and `values` that each row is written to; -1 for none; None for its own.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor | None = None) -> None:
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.slots = torch.arange(len(cos), dtype=torch.int32, device=cos.device) if slots is None else slots

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        keys: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [N, H, D] and keys, turned in float32 and rounded once to the dtype of q.

        Args:
            q, k, v: [N, H, D], [N, G, D], [N, G, D], heads next to each other.
            keys, values: [S, G, D], contiguous, to write into; without `keys` new ones [N, G, D] are made, without
                `values` v is left alone.
        """
        from triton import next_power_of_2

        from pdllm_rag.attention import turn_kernel

        n_rows, n_heads, head_dim = q.shape
        n_kv_heads = k.shape[1]
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys = torch.empty(k.shape, dtype=k.dtype, device=k.device) if keys is None else keys
        turn_kernel.turn_kernel[(n_rows,)](
            q,
            k,
            k if v is None else v,
            turned,
            keys,
            keys if values is None else values,
            self.cos,
            self.sin,
            self.slots,
            q.stride(0),
            k.stride(0),
            k.stride(0) if v is None else v.stride(0),
            keys.stride(0),
            N_HEADS=n_heads,
            N_KV_HEADS=n_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=next_power_of_2(n_heads),
            KV_HEADS=next_power_of_2(n_kv_heads),
            COPIES_V=values is not None,
            **overlap(q.device),
            num_warps=4,
        )
        return turned, keys
