"""The layer loop equals the library's own forward, and rows know nothing of their neighbours in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_tiny_model

from pdllm_rag.attends import DenseAttend
from pdllm_rag.models import load_model


def full_mask(n: int) -> torch.Tensor:
    return torch.ones(1, 1, n, n, dtype=torch.bool)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_backbone_equals_transformers_forward_with_a_full_mask(tmp_path: Path, model_type: str) -> None:
    model = load_model(str(save_tiny_model(tmp_path, model_type=model_type)), dtype=torch.float32)
    ids = torch.randint(4, 250, (23,), generator=torch.Generator().manual_seed(0))
    attend = DenseAttend(model.backbone.rope, [23], torch.arange(23))
    ours = model.backbone.logits(model.backbone.hidden(ids, attend))
    with torch.inference_mode():
        theirs = model.backbone.model(ids[None], attention_mask=full_mask(23)).logits[0]
    allowed = torch.isfinite(ours)
    torch.testing.assert_close(ours[allowed], theirs[allowed], rtol=0, atol=1e-5)
    assert not allowed[:, model.spec.mask_id].any()
    assert not allowed[:, model.spec.n_tokens :].any()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_fixed_rope_scalings_equal_the_librarys(tmp_path: Path, scaling: dict[str, object]) -> None:
    model = load_model(str(save_tiny_model(tmp_path, rope_parameters=scaling)), dtype=torch.float32)
    ids = torch.randint(4, 250, (90,), generator=torch.Generator().manual_seed(0))
    ours = model.backbone.hidden(ids, DenseAttend(model.backbone.rope, [90], torch.arange(90)))
    with torch.inference_mode():
        theirs = model.backbone.model.model(ids[None], attention_mask=full_mask(90)).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_packed_sequence_equals_itself_alone(tiny_model) -> None:
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(4, 250, (n,), generator=generator) for n in (5, 17, 40, 1)]
    rope = tiny_model.backbone.rope

    def run(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        lens = [len(part) for part in parts]
        positions = torch.cat([torch.arange(n) for n in lens])
        hidden = tiny_model.backbone.hidden(torch.cat(parts), DenseAttend(rope, lens, positions))
        return list(hidden.split(lens))

    alone = [run([part])[0] for part in sequences]
    together = run(sequences)
    shuffled = run(sequences[::-1])[::-1]
    for one, packed, other in zip(alone, together, shuffled, strict=True):
        torch.testing.assert_close(packed, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_every_row_sees_every_row_of_its_sequence_and_none_of_another(tiny_model) -> None:
    """Changing the last token of one sequence changes its first row, and no row of its neighbour."""
    ids = torch.randint(4, 250, (20,), generator=torch.Generator().manual_seed(4))
    changed = ids.clone()
    changed[11] = 5
    positions = torch.cat([torch.arange(12), torch.arange(8)])

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return tiny_model.backbone.hidden(tokens, DenseAttend(tiny_model.backbone.rope, [12, 8], positions))

    before, after = run(ids), run(changed)
    assert not torch.allclose(before[0], after[0], atol=1e-4)
    assert torch.equal(before[12:], after[12:])


def test_a_mask_restricts_what_a_row_sees(tiny_model) -> None:
    ids = torch.randint(4, 250, (6,), generator=torch.Generator().manual_seed(5))
    changed = ids.clone()
    changed[5] = 9
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    attend = [DenseAttend(tiny_model.backbone.rope, [6], torch.arange(6), masks=[causal]) for _ in range(2)]
    before = tiny_model.backbone.hidden(ids, attend[0])
    after = tiny_model.backbone.hidden(changed, attend[1])
    torch.testing.assert_close(before[:5], after[:5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[5], after[5], atol=1e-4)


def test_16_bit_products_on_a_cpu_have_few_numbers_of_rows_and_the_same_rows(tiny_model_path: Path) -> None:
    backbone = load_model(str(tiny_model_path), dtype=torch.bfloat16).backbone
    seen: set[int] = set()
    for module in backbone.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: seen.add(given[0].shape[-2]))
    generator = torch.Generator().manual_seed(5)
    for n_rows in (1, 31, 32, 33, 70):
        ids = torch.randint(4, 250, (n_rows,), generator=generator)
        attend = DenseAttend(backbone.rope, [n_rows], torch.arange(n_rows))
        hidden = backbone.hidden(ids, attend)
        logits = backbone.raw_logits(hidden)
        given: list[int] = []

        def counting(
            layer: int, *qkv: torch.Tensor, attend: DenseAttend = attend, given: list[int] = given
        ) -> torch.Tensor:
            given.extend(map(len, qkv))
            return attend(layer, *qkv)

        backbone.encode(ids, counting)
        assert seen <= {32, 64, 96}
        seen.clear()
        with torch.inference_mode():
            plain = backbone.forward(ids, attend)
            torch.testing.assert_close(hidden, plain)
            torch.testing.assert_close(logits, backbone.model.lm_head(plain))
        assert hidden.shape[0] == logits.shape[0] == n_rows
        assert set(given) == {n_rows}
        seen.clear()
