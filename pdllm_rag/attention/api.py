"""One entry to every Split-S backend. A backend that is asked for by name never falls back to another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdllm_rag.attention.flash import DTYPES, flash
from pdllm_rag.attention.merge import AttentionState
from pdllm_rag.attention.reference import reference
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.rope import Rope

Backend = Callable[..., AttentionState]
BACKENDS: dict[str, Backend] = {"reference": reference, "flash": flash}


def split_s_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: ChunkTable,
    *,
    rope: Rope | None = None,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> AttentionState:
    """Attention of every query row over the rows that `table` names, as one softmax.

    Args:
        q: [L, H, D], rotated at absolute positions.
        k, v: [S, G, D], H a multiple of G; rows outside the table are never read.
        table: the splits; an offset o means that the keys stand o positions further on than they were rotated for.
        rope: needed when an offset is not 0.
        mask: bool [L, rows of the last split], True where a query row sees a key of it, at least once in each row;
            None: everywhere. The other splits are seen by every row.
        backend: "auto" (flash where it runs, else reference), "reference" or "flash".

    Returns:
        out [L, H, D] in q's dtype and lse [L, H]; an empty table gives zeros and -inf.

    Raises:
        ValueError: shapes do not fit, the table reaches beyond the buffer, or the backend cannot run here.
    """
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"split_s_attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "expected [L, H, D], [S, G, D], [S, G, D] with H a multiple of G"
        )
    if any(start + length > k.shape[0] for start, length, _ in table.runs()):
        raise ValueError(f"chunk table reaches beyond the buffer: runs {list(table.runs())}, buffer rows {k.shape[0]}")
    if any(table.offsets) and rope is None:
        raise ValueError("chunk table has offsets but no rope was given; pass the model's rope")
    if mask is not None and mask.shape != (q.shape[0], table.lens[-1] if table.lens else 0):
        raise ValueError(f"mask is {tuple(mask.shape)}; expected {q.shape[0]} query rows by the last of {table.lens}")
    can_flash = q.dtype in DTYPES.get(q.device.type, ())
    if backend == "auto":
        backend = "flash" if can_flash else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is unknown; expected auto, {', '.join(BACKENDS)}")
    if backend == "flash" and not can_flash:
        raise ValueError(f"backend 'flash' runs {DTYPES}, got {q.dtype} on {q.device.type}; ask for 'reference'")
    return BACKENDS[backend](q, k, v, table, rope=rope, mask=mask)
