"""Split-S by torch's FlexAttention: the runs' keys are copied side by side, then it is one softmax over all of them.

Keys of a run with an offset are rotated while they are copied; the mask becomes a score of minus infinity. On CUDA the
kernel is compiled, on a CPU FlexAttention runs as plain tensor operations, which is for comparing only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from pdllm_rag.attention.merge import AttentionState
from pdllm_rag.attention.reference import read_run, reference
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.rope import Rope

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRAPHS = 512  # one for each dtype, number of heads, head dim, one, few or many rows and with or without a mask


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlexAttention cannot run here, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}; expected cpu or cuda"
    if dtype not in DTYPES:
        return f"the dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}"
    if device.type == "cuda" and not 16 <= head_dim <= 256:
        return f"heads have {head_dim} elements; on cuda expected 16 to 256"
    return None


def flex(
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
    table = table.coalesced()
    keys = torch.cat([_placed(read_run(k, table, index), offset, rope) for index, offset in enumerate(table.offsets)])
    values = torch.cat([read_run(v, table, index) for index in range(len(table.starts))])
    seen = None if mask is None else F.pad(mask, (len(keys) - mask.shape[1], 0), value=True)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))  # heads first
    attend = _compiled() if q.device.type == "cuda" else _attend
    limits = torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS)
    with warnings.catch_warnings(), limits:
        # torch advises to compile on a CPU too and to cut float32 short, and its compiler uses what it deprecates
        warnings.filterwarnings("ignore", module=r"torch\.")
        out, lse = attend(queries, keys, values, seen)
    return AttentionState(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _placed(keys: torch.Tensor, offset: int, rope: Rope | None) -> torch.Tensor:
    """Keys [T, G, D] moved by `offset` positions, in float32 and rounded once."""
    if not offset:
        return keys
    assert rope is not None
    return rope.shift(keys, offset).to(keys.dtype)


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`_attend` as one compiled graph for any numbers of rows and keys; where that fails, it raises."""
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [1, H, L, D] and lse float32 [1, H, L] of q [1, H, L, D], k, v [1, G, T, D] and seen bool [L, T].

    A block mask skips blocks that nobody sees; there are none, since only the canvas' own keys are masked. (The
    compiler of torch 2.11 also finds no kernel for a block mask whose lengths may vary.)
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        del batch, head
        assert seen is not None
        return torch.where(seen[row, key], score, -float("inf"))

    masked = None if seen is None else score_mod
    out, aux = flex_attention(q, k, v, score_mod=masked, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out, aux.lse
