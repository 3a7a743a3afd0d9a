"""Checkpoints put together and rounded to 4 bits by what they are multiplied with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_model

from pdllm_rag.models import load_model, packed
from pdllm_rag.training.attends import RowsAttend
from pdllm_rag.training.calibrated import CUTS, DAMPING, Moments, average, calibrated_q4, round_layers
from pdllm_rag.training.items import Shape
from pdllm_rag.training.noise import DiffusionNoise
from pdllm_rag.training.rows import Batch
from pdllm_rag.training.runs import Subject, round_mean
from pdllm_rag.training.stream import Stream
from pdllm_rag.training.texts import Exchange, Sample
from pdllm_rag.training.visibility import dense_mask

SHAPE = Shape(context_len=64, canvas_len=96, sample_len=64, chunk_lens=(32,), answer_lens=(8,), views=(1, 0, 0))


class Codes:
    """A code a passage."""

    def sample(self, rng: random.Random) -> Sample:
        code = "".join(rng.sample("ABCDEFGH", 3))
        return Sample((f"the code is {code}.",), (Exchange("fact", "code?", code, 0),))


def some_inputs(seed: int, n_columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, inputs whose columns go together, and their second moments."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, n_columns, generator=generator)
    mixing = torch.randn(n_columns // 4, n_columns, generator=generator)
    inputs = torch.randn(400, n_columns // 4, generator=generator) @ mixing
    inputs += 0.3 * torch.randn(400, n_columns, generator=generator)
    return weight, inputs, (inputs.T @ inputs).double()


def error_of(weight: torch.Tensor, q4: packed.Q4, inputs: torch.Tensor) -> float:
    return float((inputs @ (weight - q4.values()).T).square().mean())


@pytest.mark.parametrize("seed", range(3))
def test_what_a_matrix_computes_changes_less_than_by_the_nearest_levels(seed: int) -> None:
    weight, inputs, moments = some_inputs(seed, 128)
    assert error_of(weight, calibrated_q4(weight, moments), inputs) < 0.6 * error_of(
        weight, packed.quantised(weight), inputs
    )


def test_columns_are_rounded_as_by_the_update_that_solves_for_the_rest() -> None:
    """Optimal brain surgeon, column by column, with a new inverse for what is left each time."""
    weight, _, moments = some_inputs(5, 96)
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    scale = packed.scales(weight, CUTS, importance=damped.diagonal().float())
    steps = scale.double().repeat_interleave(32, dim=1)
    rest, levels = weight.double().clone(), torch.zeros(24, 96, dtype=torch.float64)
    left = damped.diagonal().argsort(descending=True).tolist()
    while left:
        column, inverse = left[0], torch.linalg.inv(damped[left][:, left])
        levels[:, column] = (rest[:, column] / steps[:, column]).round().clamp(-8, 7)
        error = (rest[:, column] - levels[:, column] * steps[:, column]) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    found = calibrated_q4(weight, moments)
    assert torch.equal(found.scale, scale)
    assert (found.levels == levels).float().mean() > 0.995  # float32 against float64, at the edge between two levels


def test_inputs_that_do_not_go_together_leave_the_nearest_level() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = calibrated_q4(weight, torch.eye(64, dtype=torch.float64))
    steps = found.scale.float().repeat_interleave(32, dim=1)
    assert torch.equal(found.levels, (weight / steps).round().clamp(-8, 7))


def test_packing_keeps_levels_that_are_not_the_nearest() -> None:
    weight, _, moments = some_inputs(1, 64)
    found = calibrated_q4(weight, moments)
    pairs, scale = found.packed()
    read = packed.unpack({"w_q4": pairs, "w_q4_scale": scale}, torch.float32)["w"]
    assert torch.equal(read, found.values())
    assert not torch.equal(read, packed.rounded_q4(weight))


def batches_of(subject: Subject) -> list[Batch]:
    stream = Stream(Codes(), subject.spec, subject.tokenizer, DiffusionNoise(), SHAPE, n_rows=1, seed="x")
    return [stream[number] for number in range(4)]


def test_a_layer_is_calibrated_by_rows_that_are_used(tmp_path: Path) -> None:
    subject = Subject.open(str(save_tiny_model(tmp_path)), "cpu")
    batches = batches_of(subject)
    unused = [batch.marks.sample[0] == 0 for batch in batches]
    assert any(rows.any() for rows in unused)
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    first = round_layers(subject.backbone, batches, lambda _: None)
    for name, parameter in subject.model.named_parameters():
        parameter.data.copy_(before[name])
    for batch, rows in zip(batches, unused, strict=True):
        batch.ids[0][rows] = 9  # what stands where nothing is
    second = round_layers(subject.backbone, batches, lambda _: None)
    assert first.keys() == second.keys() == {name for name, p in before.items() if p.dim() == 2}
    assert all(torch.equal(first[name].levels, second[name].levels) for name in first)


def test_what_is_stored_is_the_mean_rounded_as_calibrated(tmp_path: Path) -> None:
    folders = [str(save_tiny_model(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    done: list[int] = []
    result = round_mean(folders, Codes(), tmp_path / "out", done.append, shape=SHAPE, n_batches=4)
    assert done == [0, 1, 2]
    subject = Subject.open(folders[0], "cpu")
    average(subject.model, (Subject.open(one, "cpu").model for one in folders[1:]))
    name = "model.layers.2.mlp.down_proj.weight"
    mean = torch.stack([load_file(Path(one) / "model.safetensors")[name] for one in folders]).mean(dim=0)
    torch.testing.assert_close(dict(subject.model.named_parameters())[name].detach(), mean)
    stream = Stream(Codes(), subject.spec, subject.tokenizer, DiffusionNoise(), SHAPE, n_rows=1, seed="0/round")
    expected = round_layers(subject.backbone, [stream[number] for number in range(4)], lambda _: None)
    read = dict(load_model(str(result), dtype=torch.float32).backbone.model.named_parameters())
    for name, q4 in expected.items():
        assert torch.equal(read[name], q4.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(read[name], packed.rounded_q4(torch.stack([
        load_file(Path(one) / "model.safetensors")[name] for one in folders]).mean(dim=0)))  # fmt: skip


def test_rounding_a_layer_by_its_inputs_changes_less_than_the_nearest_levels(tmp_path: Path) -> None:
    subject = Subject.open(str(save_tiny_model(tmp_path)), "cpu")
    batches = batches_of(subject)
    layer = subject.model.model.layers[0]
    moments = Moments(layer)
    with moments, torch.no_grad():
        for batch in batches:
            moments.rows = batch.marks.sample.flatten() > 0
            tables = subject.backbone.rope.tables(batch.positions.flatten())
            x = subject.backbone.embed(batch.ids.flatten())
            subject.backbone.block(layer, x, RowsAttend(tables, dense_mask(batch.marks), 1))
    inputs = {id(module): of_inputs for module, of_inputs in moments.found}
    before = layer.mlp.gate_proj.weight.detach().clone()
    rounded = round_layers(subject.backbone, batches, lambda _: None)["model.layers.0.mlp.gate_proj.weight"]

    def error(read: torch.Tensor) -> float:
        off = (read - before).double()
        return float((off @ inputs[id(layer.mlp.gate_proj)] * off).sum())

    assert 0 < error(rounded.values()) < 0.8 * error(packed.rounded_q4(before))


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"logit_shift": False}]
)
def test_checkpoints_that_are_read_in_other_ways_have_no_mean(tmp_path: Path, changes: dict[str, Any]) -> None:
    folders = [str(save_tiny_model(tmp_path / "a")), str(save_tiny_model(tmp_path / "b", **changes))]
    with pytest.raises(ValueError, match="are read in other ways"):
        round_mean(folders, Codes(), tmp_path / "out", lambda _: None, shape=SHAPE, n_batches=1)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_not_rounded_over_itself(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "a")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match="another folder"):
        round_mean([str(folder)], Codes(), folder / ".." / "a", lambda _: None, shape=SHAPE, n_batches=1)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_checkpoints_of_other_shapes_have_no_mean(tmp_path: Path) -> None:
    one = Subject.open(str(save_tiny_model(tmp_path / "a")), "cpu").model
    other = Subject.open(str(save_tiny_model(tmp_path / "b", intermediate_size=96)), "cpu").model
    with pytest.raises(ValueError, match="other names or shapes"):
        average(one, [other])
