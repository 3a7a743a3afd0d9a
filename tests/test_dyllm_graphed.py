"""DyLLM's passes of fixed shapes are the plain ones; without a GPU their kernels run in Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import KERNEL_DEVICE, MARKS_OF_KERNELS
from test_fused import fused, request_for, told
from tiny import save_tiny_model

from pdllm_rag import LoadedModel, load_model
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.attention.triton import SplitAttention
from pdllm_rag.decoding import CommitRule, graphed
from pdllm_rag.decoding.dyllm import DyLLMDecoder, DyLLMOptions
from pdllm_rag.errors import NumericsError

BLOCK = 2
RULE = CommitRule(threshold=1.0)
pytestmark = MARKS_OF_KERNELS


def plain_model(folder: Path, model_type: str, block_len: int) -> LoadedModel:
    """On the CPU: "llama" with logit shift, "qwen3" without and with normed heads."""
    save_tiny_model(folder, model_type=model_type, num_hidden_layers=2, logit_shift=model_type == "llama")
    plain = load_model(str(folder), device="cpu", dtype=torch.float32)
    return replace(plain, spec=replace(plain.spec, family=replace(plain.spec.family, block_len=block_len)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return plain_model(tmp_path_factory.mktemp("m"), "llama", BLOCK)


@pytest.fixture(autouse=True)
def _small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "ROWS_APART", 4)
    monkeypatch.setattr(graphed, "CONTEXT_APART", 32)


@pytest.mark.parametrize(
    ("model_type", "block_len", "steps", "options"),
    [
        ("llama", BLOCK, None, DyLLMOptions(tau=0.99, full_steps=1, whole_every=3, capacity=0.4)),
        ("qwen3", 3, 2, DyLLMOptions(0.9, similarity="refresh", union_committed=False, full_steps=1, capacity=0.1)),
    ],
    ids=["shifted, previous", "unshifted, refresh, more commits than room"],
)
def test_passes_of_fixed_shapes_compute_what_the_plain_ones_do(
    tmp_path: Path, model_type: str, block_len: int, steps: int | None, options: DyLLMOptions
) -> None:
    """Ragged questions and contexts; one opens a second block while the other goes on in its first, and ends."""
    plain = plain_model(tmp_path, model_type, block_len)
    requests = [request_for(plain, (30, 9), 3, 2 * block_len), request_for(plain, (), 2, block_len, seed=1)]
    rule = CommitRule(threshold=1.0, steps=steps)
    ours = DyLLMDecoder(fused(plain), rule, options, backend="triton")
    theirs = DyLLMDecoder(plain, rule, options)
    assert ours.is_graphed
    assert not theirs.is_graphed
    got, expected = list(ours.steps(requests)), list(theirs.steps(requests))
    assert told(iter(got)) == told(iter(expected))
    for a, b in zip(got, expected, strict=True):
        assert a.confidence == pytest.approx(b.confidence, abs=1e-5)
    assert ours.passes == theirs.passes
    assert any(0 < one.recomputed < one.rows for one in ours.passes)


def test_the_next_question_finds_nothing_of_the_last_and_the_model_is_gone_at_once(plain: LoadedModel) -> None:
    quick, options = fused(plain), DyLLMOptions(full_steps=1, capacity=0.4)
    for seed in (0, 1):
        request = request_for(plain, (30,), 3, BLOCK, seed=seed)
        ours = told(DyLLMDecoder(quick, RULE, options, backend="triton").steps([request]))
        assert ours == told(DyLLMDecoder(plain, RULE, options).steps([request]))
    assert len(quick.backbone.captures) == 1  # type: ignore[attr-defined]
    backbone = weakref.ref(quick.backbone)
    gc.disable()
    try:
        del quick
        assert backbone() is None
    finally:
        gc.enable()


def test_logits_that_are_not_finite_raise(plain: LoadedModel) -> None:
    broken = fused(plain)
    broken.backbone.model.model.norm.weight.data[0] = torch.nan
    decoder = DyLLMDecoder(broken, RULE, DyLLMOptions(capacity=0.4), backend="triton")
    with pytest.raises(NumericsError, match="finite"):
        list(decoder.steps([request_for(plain, (9,), 3, BLOCK)]))


@pytest.mark.parametrize("n_splits", [1, 3])
def test_a_softmax_denominator_alone_is_that_of_the_whole_attention(n_splits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, heads, 16, generator=generator).to(KERNEL_DEVICE) for n, heads in ((5, 4), (70, 2)))
    tables = [ChunkTable.of([(0, 40, 0), (45, 20, 0)])]
    attention = SplitAttention(
        tables, [5], n_heads=4, n_kv_heads=2, head_dim=16, dtype=q.dtype, device=q.device, n_splits=n_splits
    )
    expected = attention(q, k, torch.ones_like(k)).lse
    torch.testing.assert_close(attention.lse(q, k), expected, rtol=0, atol=1e-6)
