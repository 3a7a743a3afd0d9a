"""`pdllm eval anchors`: attention masses on the BOS of each chunk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Pdllm, one_line, one_object

from pdllm_rag.attends import SplitSAttend
from pdllm_rag.cli import eval_anchors as cli
from pdllm_rag.context import Context, Placed, gather
from pdllm_rag.evaluation.anchors import ANCHORS, RecordingAttend, encode, masses, measure_anchors
from pdllm_rag.models import LoadedModel
from pdllm_rag.models.rope import rotate

TEXTS = ["The Gannet buoy weighs 84 kilograms.", "Porto opens at nine.", "Leave is 28 days."]
QUESTION = "How heavy is the buoy?"


class DenseSoftmax(SplitSAttend):
    """Keeps the whole attention matrix of the last rows over all keys: float64 [rows, H, S] for each layer."""

    def __init__(self, model: LoadedModel, context: Context, n_rows: int, block: int | None) -> None:
        super().__init__(model.backbone.rope, context, block=block, backend="reference")
        self._sequence, self._keys, self._n = context.sequences[0], context.k, n_rows
        positions = self._sequence.positions()
        self._turn = model.backbone.rope.tables(positions)
        self.weights: list[torch.Tensor] = []
        self._seen = torch.ones(n_rows, self._sequence.canvas_row + self._sequence.n_rows, dtype=torch.bool)
        if block is not None:
            blocks = positions // block
            self._seen[:, self._sequence.canvas_row :] = blocks[-n_rows:, None] >= blocks

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().__call__(layer, q, k, v)
        rows = rotate(q, *self._turn)[-self._n :].double()
        keys = self._keys[layer].double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("lhd,shd->lhs", rows, keys) / math.sqrt(q.shape[2])
        self.weights.append(torch.softmax(scores.masked_fill(~self._seen[:, None], -torch.inf), dim=-1))
        return out


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("anchors", ANCHORS)
def test_masses_equal_those_of_a_dense_softmax(
    tiny_model: LoadedModel, anchors: str, backend: str, block: int | None
) -> None:
    encoded = encode(tiny_model, TEXTS, anchors, "sequential", 160)
    start = -(-encoded.placement.canvas_start // 4) * 4
    placed = Placed(tuple(encoded.chunks), encoded.placement._replace(canvas_start=start))
    n_canvas, n_rows = 24, 8
    context = gather([placed], [n_canvas], tiny_model.backbone)
    ids = torch.arange(10, 10 + n_canvas)
    ours = RecordingAttend(tiny_model.backbone, context, n_rows, block=block, backend=backend)
    hidden = tiny_model.backbone.hidden(ids, ours)
    dense = DenseSoftmax(tiny_model, context, n_rows, block)
    torch.testing.assert_close(tiny_model.backbone.hidden(ids, dense), hidden, atol=1e-4, rtol=1e-4)
    lens = [chunk.k.shape[1] for chunk in encoded.chunks]
    cuts = [length for n in lens for length in (1, n - 1)] + [n_canvas]
    assert len(ours.masses) == len(dense.weights) == tiny_model.backbone.n_layers
    for mass, weights in zip(ours.masses, dense.weights, strict=True):
        assert float(mass.sum()) == pytest.approx(1, abs=1e-5)
        expected = torch.stack([part.sum(dim=-1).mean() for part in torch.split(weights, cuts, dim=-1)])
        torch.testing.assert_close(mass.double(), expected, atol=1e-5, rtol=1e-4)


def test_one_dense_text_is_encoded_as_a_whole_and_chunks_are_not(tiny_model: LoadedModel) -> None:
    counts = {way: sum(chunk.k.shape[1] for chunk in encode(tiny_model, TEXTS, way, "gap", 160)[0]) for way in ANCHORS}
    n_tokens = sum(map(len, TEXTS))
    assert counts == {"each": n_tokens + 3, "none": n_tokens, "first": n_tokens + 1 + 2 * len("\n\n")}
    alone = encode(tiny_model, TEXTS[:1], "each", "gap", 160)[0][0]
    torch.testing.assert_close(encode(tiny_model, TEXTS, "each", "gap", 160)[0][0], alone)
    assert encode(tiny_model, TEXTS, "each", "gap", 160).placement == ((0, 160, 320), 480)
    with pytest.raises(ValueError, match="expected one of each, none, first"):
        encode(tiny_model, TEXTS, "all", "gap", 160)


def test_masses_are_of_every_layer_and_run(tiny_model: LoadedModel) -> None:
    found = masses(tiny_model, encode(tiny_model, TEXTS, "each", "reuse", 160), QUESTION)
    assert found.shape == (tiny_model.backbone.n_layers, 2 * len(TEXTS) + 1)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(found)))


def test_figures_are_of_each_length_and_way(tiny_model: LoadedModel) -> None:
    told: list[None] = []
    found = measure_anchors(
        tiny_model, lengths=[400, 600], chunk_len=200, questions=2, on_question=lambda: told.append(None)
    )
    assert [(one["length"], one["anchors"], one["n_chunks"]) for one in found] == [
        (length, way, length // 200) for length in (400, 600) for way in ANCHORS
    ]
    assert len(told) == 12
    for one in found:
        assert sum(one["head"]) + sum(one["rest"]) + one["canvas"] == pytest.approx(1, abs=1e-5)
        assert one["heads_in_all"] == pytest.approx(sum(one["head"]))
        assert 1 <= one["largest_head_by_mean"] <= one["n_chunks"]
        assert {len(values) for values in one["layers"].values()} == {tiny_model.backbone.n_layers}
    for length in (150, 4000):
        with pytest.raises(ValueError, match=r"at most the 2048 tokens of the model's window|expected one chunk"):
            measure_anchors(tiny_model, lengths=[length], chunk_len=200, questions=1)


def test_the_command_reports_and_draws(pdllm: Pdllm, tiny_model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small: tuple[Any, ...] = ("--model", tiny_model_path, "--lengths", "400", "--chunk-len", "200", "--questions", "1")
    picture = tmp_path / "anchors.png"
    figures = one_object(pdllm("eval", "anchors", *small, "--json", "--plot", picture))
    assert list(figures) == ["masses", "settings", "machine"]
    assert [one["anchors"] for one in figures["masses"]] == list(ANCHORS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    outcome = pdllm("eval", "anchors", *small)
    assert outcome.status == 0
    assert all(label in outcome.out for label in cli.LABELS.values())
    assert "expected two chunks" in one_line(pdllm("eval", "anchors", *small, "--lengths", "200"))


def test_names_on_the_command_line_are_the_evaluations() -> None:
    assert tuple(cli.LABELS) == ANCHORS
