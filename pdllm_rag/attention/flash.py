"""Split-S by torch's own flash kernels: one call per run of rows, heads of one group packed into its rows.

Neighbouring runs with one offset are one softmax already, so they are joined first; a context that was gathered in
order is then a single kernel call; a run with a mask stays by itself, so the mask is no larger than the canvas.
(Measured on two CPU cores, 60 rows over 1,024: one call 0.44 ms, five splits and a merge 0.85 ms, batched matrix
products 2.0 ms in bfloat16; 1.1 / 1.5 / 1.2 ms in float32.)
"""

from __future__ import annotations

import torch

from pdllm_rag.attention.merge import AttentionState, merge
from pdllm_rag.attention.reference import read_run, reference
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.rope import Rope

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's flash kernels cannot run here, or None."""
    dtypes = DTYPES.get(device.type, ())
    if not dtypes:
        return f"the device is {device.type}; expected one of {', '.join(DTYPES)}"
    if dtype not in dtypes:
        return f"the dtype is {dtype}; on {device.type} expected one of {', '.join(map(str, dtypes))}"
    if device.type == "cuda" and (head_dim % 8 or head_dim > 256):
        return f"heads have {head_dim} elements; on cuda expected a multiple of 8, 256 at most"
    return None


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: ChunkTable,
    *,
    rope: Rope | None,
    mask: torch.Tensor | None,
) -> AttentionState:
    """As `split_s_attention`, for the devices, dtypes and head dims that `why_not` allows."""
    if not table.starts:
        return reference(q, k, v, table, rope=rope, mask=mask)
    table = table.coalesced(apart=0 if mask is None else 1)
    last = len(table.starts) - 1
    states = []
    for index, offset in enumerate(table.offsets):
        queries = q
        if offset:
            assert rope is not None
            queries = rope.shift(q, -offset).to(q.dtype)
        run_mask = mask if index == last else None
        states.append(_one_run(queries, read_run(k, table, index), read_run(v, table, index), run_mask))
    return merge(states)


def _one_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> AttentionState:
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    ratio = n_heads // n_kv_heads
    packed = q.view(n_rows, n_kv_heads, ratio, head_dim).permute(1, 2, 0, 3)
    packed = packed.reshape(1, n_kv_heads, -1, head_dim)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    aten = torch.ops.aten
    if q.device.type == "cpu":
        bias = None if mask is None else _bias(mask.repeat(ratio, 1), q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(packed, keys, values, attn_mask=bias)
    elif mask is None:
        out, lse = aten._scaled_dot_product_flash_attention(packed, keys, values)[:2]
    else:  # CUDA's flash kernel takes no mask, its memory-efficient one does
        bias = _bias(mask.repeat(ratio, 1), q.dtype).expand(1, n_kv_heads, -1, -1)
        out, lse = aten._scaled_dot_product_efficient_attention(packed, keys, values, bias, True)[:2]
        lse = lse[..., : packed.shape[2]]  # it comes padded
    out = out.reshape(n_heads, n_rows, head_dim).transpose(0, 1)
    lse = lse.reshape(n_heads, n_rows).transpose(0, 1)
    if mask is not None:  # of a row that sees no key the kernels return what they like (the CPU's: an lse of 0)
        blind = ~mask.any(dim=1)[:, None]
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    return AttentionState(out, lse)


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[L, T] to add to scores: 0 where a row sees a key, else -inf. CUDA wants rows that start 16 elements apart."""
    n_rows, n_keys = mask.shape
    room = torch.zeros(n_rows, -(-n_keys // 16) * 16, dtype=dtype, device=mask.device)
    return room[:, :n_keys].masked_fill_(~mask, -torch.inf)
