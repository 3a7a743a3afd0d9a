"""Our Split-S kernel and what it is compared with: each attends to the same context rows and gives the same result.

- what a library wants its arguments to look like (heads first, heads packed into rows, padded heads) is made outside
  the timer; the layout of the keys, [T, G, D], is the same for all;
- a contender that cannot run says why when it is made or first called; it is reported, never dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdllm_rag.attention import ChunkTable
from pdllm_rag.attention.split_choice import Tiles
from pdllm_rag.attention.triton import SplitAttention
from pdllm_rag.bench.workload import Workload, packed, padded, unpacked, unpadded

OURS = "ours"
FAMILIES = ("sdpa", "flex", "varlen", "flashinfer")
LARGEST_SPLITS = 64

Make = Callable[[], "Contender"]


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to compute the attention of a workload's sets.

    Attributes:
        family: "ours", or one of `FAMILIES`.
        table: what the result is checked against.
        call: the attention of a set, by its number, in a layout of its own.
        unpack: that as [L, H, D].
        around: entered once around all calls of a run.
        notes: what else is to be known, for the report.
    """

    family: str
    table: ChunkTable
    call: Callable[[int], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    notes: Mapping[str, Any] = field(default_factory=dict)


class Unavailable(ValueError):
    """A contender cannot run here; the message says why."""


def cannot_run() -> tuple[type[Exception], ...]:
    """What libraries raise for shapes, devices and builds that they do not support."""
    found = (RuntimeError, ValueError, TypeError, ImportError, AssertionError)
    try:
        errors = import_module("triton.errors")
    except ImportError:
        return found
    return (*found, errors.TritonError)


def contenders(workload: Workload, families: tuple[str, ...] = FAMILIES) -> dict[str, Make]:
    """Makers of our kernel's variants and of the baselines, by name."""
    lens = workload.shape.chunk_lens
    makers: dict[str, Make] = {"ours, in order": partial(ours, workload, workload.in_order())}
    for chunk_len in lens:
        makers[f"ours, scattered {chunk_len}"] = partial(ours, workload, workload.scattered(chunk_len))
        makers[f"ours, placed {chunk_len}"] = partial(ours, workload, workload.placed(chunk_len))
    makers |= {name: make for name, make in baselines(workload).items() if name.split(",")[0] in families}
    return makers


def baselines(workload: Workload) -> dict[str, Make]:
    """Makers of the baselines; a name begins with its family."""
    lens, ratio = workload.shape.chunk_lens, workload.shape.ratio
    makers: dict[str, Make] = {
        "sdpa, packed rows": partial(_sdpa_packed, workload, SDPBackend.FLASH_ATTENTION),
        "sdpa, enable_gqa": partial(_sdpa_gqa, workload, SDPBackend.FLASH_ATTENTION),
        "sdpa, cudnn, packed rows": partial(_sdpa_packed, workload, SDPBackend.CUDNN_ATTENTION),
    }
    flex = _Flex(workload, ratio)
    makers["flex, in order"] = flex.in_order
    for chunk_len in lens:
        makers[f"flex, gathers {chunk_len}"] = partial(flex.gathering, chunk_len)
    wider = 1 << (ratio - 1).bit_length()
    if wider != ratio:  # its decoding kernel wants a power of two
        shape = f"{workload.shape.n_kv_heads * wider}/{workload.shape.n_kv_heads}"
        wide = _Flex(workload, wider)
        makers[f"flex, padded to {shape}"] = wide.in_order
        for chunk_len in lens:
            makers[f"flex, padded to {shape}, gathers {chunk_len}"] = partial(wide.gathering, chunk_len)
    for splits in (None, _splits(workload)):
        extra = "" if splits is None else f", {splits} splits"
        makers[f"varlen, packed rows{extra}"] = partial(_varlen, workload, None, splits, packs=True)
        for chunk_len in lens:
            makers[f"varlen, pages of {chunk_len}{extra}"] = partial(_varlen, workload, chunk_len, splits, packs=True)
    makers["varlen, enable_gqa"] = partial(_varlen, workload, None, None, packs=False)
    makers["flashinfer, in order"] = partial(_flashinfer, workload)
    return makers


def ours(
    workload: Workload, table: ChunkTable, *, tiles: Tiles | None = None, n_splits: int | None = None
) -> Contender:
    """Our kernel over a table, with its own choice of tiles and splits or a given one."""
    shape = workload.shape
    attention = SplitAttention(
        [table],
        [shape.n_rows],
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=workload.device,
        rope=workload.rope,
        n_splits=n_splits,
        tiles=tiles,
    )
    return Contender(
        OURS,
        table,
        lambda index: attention(workload.q[index], workload.k[index], workload.v[index]).out,
        notes={"tiles": attention.tiles._asdict(), "n_splits": attention.n_splits},
    )


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """A view [1, H, L, D] of [L, H, D]."""
    return tensor.transpose(0, 1)[None]


def _rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """A view [L, H, D] of [1, H, L, D]."""
    return tensor[0].transpose(0, 1)


def _only(backend: SDPBackend) -> AbstractContextManager[object]:
    manager: AbstractContextManager[object] = sdpa_kernel(backend)
    return manager


def _sdpa_packed(workload: Workload, backend: SDPBackend) -> Contender:
    shape = workload.shape
    queries = [_heads_first(packed(q, shape.n_kv_heads)).contiguous() for q in workload.q]
    keys, values = _in_order(workload)
    return Contender(
        "sdpa",
        workload.in_order(),
        lambda index: F.scaled_dot_product_attention(queries[index], keys[index], values[index]),
        unpack=lambda out: unpacked(_rows_first(out), shape.ratio),
        around=partial(_only, backend),
    )


def _sdpa_gqa(workload: Workload, backend: SDPBackend) -> Contender:
    queries = [_heads_first(q).contiguous() for q in workload.q]
    keys, values = _in_order(workload)
    return Contender(
        "sdpa",
        workload.in_order(),
        lambda index: F.scaled_dot_product_attention(queries[index], keys[index], values[index], enable_gqa=True),
        unpack=_rows_first,
        around=partial(_only, backend),
    )


class _Flex:
    """Compiled FlexAttention under an always-true block mask that was built beforehand, with or without a gather.

    Args:
        ratio: query heads of a key head; more than the workload's are zeros.
    """

    def __init__(self, workload: Workload, ratio: int, compiler: Callable[..., Any] | None = None) -> None:
        self._workload, self._ratio = workload, ratio
        self._compiler = compiler
        self._attention: Callable[..., torch.Tensor] | None = None
        self._kernel = ""

    def in_order(self) -> Contender:
        """Over keys that are in order already."""
        self._prepare()
        keys, values = _in_order(self._workload)
        return self._contender(self._workload.in_order(), lambda index: (keys[index], values[index]))

    def gathering(self, chunk_len: int) -> Contender:
        """Over keys that are copied into order first, whole chunks at a time, within the timed call."""
        self._prepare()
        workload = self._workload
        chosen = torch.tensor(workload.slots(chunk_len), device=workload.device)

        def gathered(pool: torch.Tensor) -> torch.Tensor:
            chunks = pool.view(-1, chunk_len * pool.shape[1] * pool.shape[2])
            return _heads_first(chunks.index_select(0, chosen).view(-1, *pool.shape[1:]))

        return self._contender(
            workload.scattered(chunk_len), lambda index: (gathered(workload.k[index]), gathered(workload.v[index]))
        )

    def _contender(
        self, table: ChunkTable, keys_and_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    ) -> Contender:
        shape, n_kv_heads = self._workload.shape, self._workload.shape.n_kv_heads
        assert self._attention is not None
        attention = self._attention

        def unpack(out: torch.Tensor) -> torch.Tensor:
            return unpadded(_rows_first(out), n_kv_heads, shape.ratio)

        def call(index: int) -> torch.Tensor:
            return attention(self._queries[index], *keys_and_values(index))

        return Contender("flex", table, call, unpack, notes={"kernel": self._kernel})

    def _prepare(self) -> None:
        """Build the mask, compile, and find out which kernel that came to; once for all contenders of one ratio."""
        if self._attention is not None:
            return
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        workload, shape = self._workload, self._workload.shape
        compiler = self._compiler or _compiler(workload.device)
        wide = [padded(q, shape.n_kv_heads, self._ratio) if self._ratio != shape.ratio else q for q in workload.q]
        self._queries = [_heads_first(q).contiguous() for q in wide]
        sizes = None, None, shape.n_rows, shape.context
        mask = create_block_mask(_always, *sizes, device=workload.device.type)
        compiled = compiler(flex_attention)
        attention = partial(compiled, block_mask=mask, enable_gqa=self._ratio > 1)
        keys, values = _in_order(workload)
        self._kernel = _flex_kernel(attention, self._queries[0], keys[0], values[0])
        self._attention = attention


def _always(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    del batch, head, row
    return column >= 0


def _compiler(device: torch.device) -> Callable[..., Any]:
    if device.type != "cuda":
        raise Unavailable(f"compiled FlexAttention is measured on a CUDA device; the device is {device.type}")
    return partial(torch.compile, dynamic=False)


def _flex_kernel(attention: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> str:
    """Compile by a first call; which kernel it came to, by the generated code: "decoding", "main" or "unknown"."""
    sources: list[str] = []
    try:
        graph = import_module("torch._inductor.graph").GraphLowering
        watch = mock.patch.object(graph, "save_output_code", sources.append)
    except (ImportError, AttributeError):  # private, and only for this remark
        attention(*tensors)
        return "unknown"
    with watch:
        attention(*tensors)
    if not sources:
        return "unknown"
    return "decoding" if any("SPLIT_KV" in source for source in sources) else "main"


def _splits(workload: Workload) -> int:
    """Parts that fill a GPU's multiprocessors with tiles of 64 rows, one tile each."""
    shape = workload.shape
    n_programs = shape.n_kv_heads * -(-shape.n_rows * shape.ratio // 64)
    count = 8
    if workload.device.type == "cuda":
        count = torch.cuda.get_device_properties(workload.device).multi_processor_count
    return max(2, min(LARGEST_SPLITS, count // n_programs))


def _varlen(workload: Workload, page_len: int | None, splits: int | None, *, packs: bool) -> Contender:
    """`varlen_attn` of torch: over keys in order, or over pages that lie scattered."""
    try:
        module = import_module("torch.nn.attention.varlen")
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.attention.varlen") from error
    shape, device = workload.shape, workload.device
    if device.type != "cuda":
        raise Unavailable(f"varlen_attn runs on a CUDA device; the device is {device.type}")
    known = inspect.signature(module.varlen_attn).parameters
    options: dict[str, Any] = {}
    if splits is not None:
        options["num_splits"] = splits
    if not packs:
        options["enable_gqa"] = True
    if page_len is not None:
        pages = torch.tensor([workload.slots(page_len)], dtype=torch.int32, device=device)
        options |= {"block_table": pages, "seqused_k": torch.tensor([shape.context], dtype=torch.int32, device=device)}
    absent = [name for name in options if name not in known]
    if absent:
        raise Unavailable(f"varlen_attn of torch {torch.__version__} has no {', '.join(absent)}")
    queries = [packed(q, shape.n_kv_heads) for q in workload.q] if packs else workload.q
    if page_len is None:
        keys, values = ([pool[: shape.context] for pool in pools] for pools in (workload.k, workload.v))
    else:
        sizes = -1, page_len, shape.n_kv_heads, shape.head_dim
        keys, values = ([pool.view(sizes) for pool in pools] for pools in (workload.k, workload.v))
    n_rows = len(queries[0])
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (n_rows, shape.context)]

    def call(index: int) -> torch.Tensor:
        out = module.varlen_attn(queries[index], keys[index], values[index], *ends, n_rows, shape.context, **options)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(
        "varlen",
        workload.in_order() if page_len is None else workload.scattered(page_len),
        call,
        unpack=(lambda out: unpacked(out, shape.ratio)) if packs else (lambda out: out),
    )


def _flashinfer(workload: Workload) -> Contender:
    try:
        module = import_module("flashinfer")
    except ImportError as error:
        raise Unavailable("the package flashinfer is not installed (pip install flashinfer-python)") from error
    context = workload.shape.context
    keys, values = ([pool[:context] for pool in pools] for pools in (workload.k, workload.v))

    def call(index: int) -> torch.Tensor:
        out = module.single_prefill_with_kv_cache(workload.q[index], keys[index], values[index], causal=False)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender("flashinfer", workload.in_order(), call, notes={"version": module.__version__})


def _in_order(workload: Workload) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of the context in order, views [1, G, T, D]."""
    context = workload.shape.context
    keys, values = ([_heads_first(pool[:context]) for pool in pools] for pools in (workload.k, workload.v))
    return keys, values
