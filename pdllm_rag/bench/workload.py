"""What an attention call is measured on: queries, and keys that lie in order or scattered, with the true result.

Every set stands for one layer: queries [L, H, D] and a pool of 2 T rows [2T, G, D] for keys and for values. The first T
rows are the context in order. The scattered context has its chunks in every other slot of the pool, in random order,
so that no two of them are neighbours. Both are T rows, and either reads as many bytes.

Axes: L query rows, H query heads, G key/value heads, D head dim, T context rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdllm_rag.attention import ChunkTable, split_s_attention
from pdllm_rag.models.rope import Rope

N_LAYERS = 28  # sets, at least: Dream-7B's layers
LEAST_BYTES = 200_000_000  # of the keys and values of all sets, so that a cache of 50 MB has long lost the first
THETA = 1e6
ERROR_LIMITS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of |out - true| / |true|


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call.

    Attributes:
        n_rows: query rows.
        context: rows of keys and values.
        chunk_lens: sizes of the chunks that a scattered context is in; each divides `context`.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rows: int
    context: int
    chunk_lens: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        sizes = (self.n_heads, self.n_kv_heads, self.head_dim, self.n_rows, self.context, *self.chunk_lens)
        if min(sizes) < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self}; expected sizes of 1 or more, and n_heads a multiple of n_kv_heads")
        wrong = [length for length in self.chunk_lens if self.context % length]
        if wrong:
            raise ValueError(
                f"a context of {self.context} rows in chunks of {wrong[0]}; expected a whole number of them"
            )
        if self.dtype not in ERROR_LIMITS:
            raise ValueError(f"dtype is {self.dtype}; expected one of {', '.join(map(str, ERROR_LIMITS))}")

    @property
    def ratio(self) -> int:
        """Query heads of one key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one call."""
        return 2 * self.context * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both products of one call."""
        return 4 * self.n_rows * self.n_heads * self.head_dim * self.context

    @property
    def n_sets(self) -> int:
        """Layers, or more where their keys and values would come to too few bytes."""
        return max(N_LAYERS, -(-LEAST_BYTES // self.kv_bytes))


class Workload:
    """Sets of random queries and pools, and where chunks lie in a pool.

    Args:
        n_sets: None for the shape's own number.

    Attributes:
        q: per set [L, H, D].
        k, v: per set the pool [2T, G, D].
    """

    def __init__(
        self, shape: AttentionShape, device: torch.device, *, n_sets: int | None = None, seed: int = 0
    ) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(seed)

        def random(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=shape.dtype, device=device).normal_(generator=generator)

        pool = 2 * shape.context, shape.n_kv_heads, shape.head_dim
        count = range(n_sets or shape.n_sets)
        self.q = [random(shape.n_rows, shape.n_heads, shape.head_dim) for _ in count]
        self.k = [random(*pool) for _ in count]
        self.v = [random(*pool) for _ in count]
        self.rope = Rope(_frequencies(shape.head_dim, device), 1.0, "bench")
        self._seed = seed

    def in_order(self) -> ChunkTable:
        """The first T rows as one run."""
        return ChunkTable.of([(0, self.shape.context, 0)])

    def slots(self, chunk_len: int) -> list[int]:
        """Slots of `chunk_len` rows that the chunks lie in: every other one, in random order."""
        n_chunks = self.shape.context // chunk_len
        order = torch.randperm(n_chunks, generator=torch.Generator().manual_seed(self._seed))
        return [2 * number for number in order.tolist()]

    def scattered(self, chunk_len: int) -> ChunkTable:
        """The chunks where they lie, their keys rotated for where they stand."""
        return ChunkTable.of((slot * chunk_len, chunk_len, 0) for slot in self.slots(chunk_len))

    def placed(self, chunk_len: int) -> ChunkTable:
        """The same with keys rotated at chunk-local positions: chunk n stands n chunks further on."""
        runs = enumerate(self.slots(chunk_len))
        return ChunkTable.of((slot * chunk_len, chunk_len, number * chunk_len) for number, slot in runs)

    def truth(self, table: ChunkTable) -> torch.Tensor:
        """float64 [L, H, D]: attention of the first set over a table."""
        q, k, v = (tensor.double() for tensor in (self.q[0], self.k[0], self.v[0]))
        return split_s_attention(q, k, v, table, rope=self.rope, backend="reference").out


def packed(q: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """[L r, G, D] of queries [L, G r, D]: a row for each of the r heads that share a key head."""
    n_rows, n_heads, head_dim = q.shape
    ratio = n_heads // n_kv_heads
    return q.view(n_rows, n_kv_heads, ratio, head_dim).transpose(1, 2).reshape(n_rows * ratio, n_kv_heads, head_dim)


def unpacked(out: torch.Tensor, ratio: int) -> torch.Tensor:
    """[L, G r, D] of packed rows [L r, G, D]."""
    n_packed, n_kv_heads, head_dim = out.shape
    out = out.reshape(n_packed // ratio, ratio, n_kv_heads, head_dim).transpose(1, 2)
    return out.reshape(n_packed // ratio, n_kv_heads * ratio, head_dim)


def padded(q: torch.Tensor, n_kv_heads: int, ratio: int) -> torch.Tensor:
    """[L, G ratio, D] of queries [L, G r, D]: each group of r heads is filled up to `ratio` with zeros."""
    n_rows, n_heads, head_dim = q.shape
    out = q.new_zeros(n_rows, n_kv_heads, ratio, head_dim)
    out[:, :, : n_heads // n_kv_heads] = q.view(n_rows, n_kv_heads, -1, head_dim)
    return out.view(n_rows, n_kv_heads * ratio, head_dim)


def unpadded(out: torch.Tensor, n_kv_heads: int, ratio: int) -> torch.Tensor:
    """[L, G r, D] of [L, G padded, D]: the first `ratio` = r heads of each group."""
    n_rows, _, head_dim = out.shape
    return out.reshape(n_rows, n_kv_heads, -1, head_dim)[:, :, :ratio].reshape(n_rows, n_kv_heads * ratio, head_dim)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """|out - truth| / |truth| in float64; inf for anything that is not a finite number."""
    error = float((out.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def _frequencies(head_dim: int, device: torch.device) -> torch.Tensor:
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / THETA**steps
