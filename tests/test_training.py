"""Losses, rounding, the loop and what it leaves on disk."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_model

from pdllm_rag.attends import DenseAttend
from pdllm_rag.engine import RagEngine
from pdllm_rag.errors import TrainingError
from pdllm_rag.models import load_model, packed
from pdllm_rag.training.adapters import LoraShape
from pdllm_rag.training.items import Block, Item, Shape
from pdllm_rag.training.loop import Plan
from pdllm_rag.training.losses import hard_loss, soft_loss
from pdllm_rag.training.masters import ROUNDINGS, Masters
from pdllm_rag.training.noise import DiffusionNoise, MonotoneNoise
from pdllm_rag.training.objectives import Forcing, Reading
from pdllm_rag.training.rows import Batch, lay_out
from pdllm_rag.training.runs import Run, Subject, adapt, train_chunk_lora, train_d2f
from pdllm_rag.training.texts import Exchange, Sample

SHAPE = Shape(context_len=24, canvas_len=96, sample_len=24, chunk_lens=(32,), answer_lens=(4,), views=(1, 0, 0))


LETTERS = "ABCDEFGHIJKLMNOPQRST"


class Codes:
    """A fact a passage, in one of three wordings; every question is the same."""

    def sample(self, rng: random.Random) -> Sample:
        code = "".join(rng.sample(LETTERS, 2))
        passage = rng.choice(("code {}.", "{} is it", "the code: {}")).format(code)
        return Sample((passage,), tuple(Exchange("fact", "code?", code, 0) for _ in range(3)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def a_run(checkpoint: Path, folder: Path, steps: int, **changes: Any) -> Run:
    plan = {"lr": 1e-3, "warmup": 2, "report_every": 5, "save_every": 0, "validate_every": 0, "validation_batches": 1}
    plan |= {key: changes.pop(key) for key in list(changes) if key in Plan.__dataclass_fields__}
    settings: dict[str, Any] = {"n_rows": 2, "device": "cpu", **changes}
    return Run(str(checkpoint), Codes(), Codes(), folder, Plan(steps=steps, **plan), SHAPE, **settings)


def quiet(line: dict[str, Any]) -> None:
    del line


def test_hard_loss_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    found = hard_loss(logits, torch.tensor([0, 1, 0]), torch.tensor([2.0, 1.0, 0.0]))
    assert float(found) == pytest.approx((2 * math.log(2) - math.log(0.8)) / 3)
    assert float(hard_loss(logits, torch.tensor([0, 1, 0]), torch.zeros(3))) == 0


def test_soft_loss_by_hand_and_is_least_at_the_teacher() -> None:
    teacher = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    student = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    by_hand = [-(0.5 * math.log(0.25) + 0.5 * math.log(0.75)), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    weights = torch.tensor([4.0, 1.0])
    assert float(soft_loss(student, teacher, weights)) == pytest.approx((4 * by_hand[0] + by_hand[1]) / 5, rel=1e-5)
    assert soft_loss(teacher, teacher, weights) < soft_loss(student, teacher, weights)


def test_training_rows_compute_what_the_engine_computes(checkpoint: Path) -> None:
    model = load_model(str(checkpoint), dtype=torch.float32)
    chunks = ((0, 20, 21, 22), (0, 30, 31))
    block = Block((40, 41, 42, 50, 51, 2, 2), 3, 3, range(1, 2), None, "qa", 1.0)
    item = Item(chunks, (block, block), "chunks", "sequential", 32)
    row = lay_out([item], SHAPE, model.spec, DiffusionNoise(full=1.0), random.Random(0))
    batch = Batch.of([row])
    subject = Subject.open(str(checkpoint), "cpu")
    reading = Reading(subject.backbone)
    logits = reading.logits(batch)
    ids = torch.tensor([*chunks[0], *chunks[1], 40, 41, 42, *[model.spec.mask_id] * 4])
    sees = torch.ones(14, 14, dtype=torch.bool)
    sees[:4, 4:] = sees[4:7, :4] = sees[4:7, 7:] = False
    attend = DenseAttend(model.backbone.rope, [14], torch.arange(14), [sees])
    hidden = model.backbone.hidden(ids, attend)
    expected = model.backbone.raw_logits(hidden[9:13])  # each predicts the token behind it
    torch.testing.assert_close(logits[:4], expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[4:8], expected.float(), rtol=1e-4, atol=1e-4)


def test_a_broken_off_run_ends_with_the_weights_of_an_unbroken_one(checkpoint: Path, tmp_path: Path) -> None:
    whole = adapt(a_run(checkpoint, tmp_path / "whole", 8, rounding="4bit", save_every=4), quiet)
    broken = a_run(checkpoint, tmp_path / "broken", 8, rounding="4bit", save_every=4)

    class Stop(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise Stop

    with pytest.raises(Stop):
        adapt(broken, stop)
    assert json.loads((broken.folder / "state.json").read_text())["step"] == 4
    again = adapt(broken, quiet)
    one, other = (
        {k: v for f in sorted(p.glob("*.safetensors")) for k, v in load_file(f).items()} for p in (whole, again)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = [
        [
            json.loads(line)["loss"]
            for line in (run / "log.jsonl").read_text().splitlines()
            if "loss" in json.loads(line)
        ]
        for run in (tmp_path / "whole", broken.folder)
    ]
    assert logs[0] == logs[1]
    with pytest.raises(TrainingError, match=r"plan\.lr"):
        adapt(replace(broken, plan=replace(broken.plan, lr=1e-2)), quiet)


def test_a_run_that_diverges_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="finite"):
        adapt(a_run(checkpoint, tmp_path, 20, lr=1e25, warmup=1, clip=1e38, report_every=1), quiet)


@pytest.mark.parametrize("rounding", ["4bit", "8bit"])
def test_rounding_is_what_is_read_back(rounding: str) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 6)[:, None]
    weight[2, :32] = 0
    rounded, vector = ROUNDINGS[rounding]([weight, weight[3]])
    assert torch.equal(vector, weight[3].half().float())
    if rounding == "4bit":
        levels, scale = packed.quantised(weight).packed()
        back = packed.unpack({"w_q4": levels, "w_q4_scale": scale}, torch.float32)["w"]
    else:
        levels, scale = packed.pack_q8(weight)
        back = packed.unpack({"w": levels, "w_scale": scale}, torch.float32)["w"]
    assert torch.equal(back, rounded)
    assert torch.isfinite(rounded).all()
    worst = {"4bit": 0.6 / 8 * 1.6, "8bit": 0.5 / 127 * 1.01}[rounding]
    normal = weight[3:]
    within = (rounded[3:] - normal).abs() <= worst * normal.abs().amax(1, keepdim=True)
    assert within.all() if rounding == "8bit" else within.float().mean() > 0.98


def test_masters_move_though_the_rounding_hides_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 32))
    masters = Masters([("w", parameter)], ROUNDINGS["4bit"], decay=0.0, betas=(0.9, 0.96))
    parameter.grad = torch.ones_like(parameter)
    before = parameter.detach().clone()
    masters.step(1e-4, clip=10.0)
    assert not torch.equal(masters.weights["w"], torch.ones(2, 32))
    torch.testing.assert_close(parameter.detach(), before, atol=2e-3, rtol=0)
    assert parameter.grad is None


def test_a_tiny_model_learns_from_scratch_to_read_facts_from_stored_chunks(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    small = {name: weight * 0.25 if weight.dim() > 1 else weight for name, weight in load_file(file).items()}
    start = shutil.copytree(checkpoint, tmp_path / "start")
    save_file(small, start / "model.safetensors", metadata={"format": "pt"})
    result = adapt(a_run(start, tmp_path / "run", 450, lr=3e-3, warmup=20, n_rows=8, report_every=450), quiet)
    rng = random.Random("unseen")
    right = 0
    with RagEngine.open(tmp_path / "kb", model=str(result)) as engine:
        for _ in range(30):
            sample = Codes().sample(rng)
            answer = engine.answer("code?", context=list(sample.passages), max_new_tokens=4, abstain=False)
            right += answer.text == sample.exchanges[0].answer
    assert right >= 24  # of 380 pairs of letters a guess is one


def test_an_adapter_for_every_row_is_one_that_the_loader_merges(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = train_chunk_lora(a_run(checkpoint, tmp_path, 3, lr=1e-2), LoraShape(4, 4, 0.1), quiet)
    plain, adapted = load_model(str(checkpoint)), load_model(str(checkpoint), adapter=str(folder))
    assert adapted.adapter_digest
    assert not plain.adapter_digest
    q = [m.backbone.model.model.layers[0].self_attn.q_proj.weight for m in (plain, adapted)]
    assert not torch.equal(*q)


def test_hard_labels_are_a_share_of_the_distillation_loss(checkpoint: Path) -> None:
    subject = Subject.open(str(checkpoint), "cpu")
    block = Block((40, 41, 42, 50, 51, 2, 2), 3, 3, range(1, 2), None, "qa", 1.0)
    item = Item(((0, 20, 21, 22),), (block,), "chunks", "sequential", 32)
    batch = Batch.of([lay_out([item], SHAPE, subject.spec, MonotoneNoise(2), random.Random(0))])
    others = batch._replace(targets=(batch.targets + 1) % subject.spec.n_tokens)

    def loss(share: float, of: Batch = batch) -> float:
        objective = Forcing(subject.backbone, subject.backbone, SHAPE.context_len, hard_labels=share)
        return float(objective(of).loss.detach())

    soft, hard = loss(0.0), loss(1.0)
    assert loss(0.25) == pytest.approx(0.75 * soft + 0.25 * hard, rel=1e-5)
    assert loss(0.0, others) == soft  # the teacher alone is listened to
    assert abs(loss(1.0, others) - hard) > 1e-3


def test_a_d2f_adapter_leaves_the_model_and_its_chunks_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lines: list[dict[str, Any]] = []
    run = a_run(checkpoint, tmp_path, 40, lr=1e-2, rounding="8bit", n_rows=4, report_every=1)
    folder = train_d2f(run, LoraShape(8, 8, 0.0), lines.append)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int8, torch.float16}
    model = load_model(str(checkpoint), canvas_adapter=str(folder))
    assert model.canvas_backbone is not None
    assert not model.adapter_digest
    assert model.fingerprint("bfloat16") == load_model(str(checkpoint)).fingerprint("bfloat16")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-8:]) < sum(losses[:8])
    again = train_d2f(run, LoraShape(8, 8, 0.0), quiet, stored_alpha=4)  # of the run that is done
    same = load_file(again / "adapter_model.safetensors")
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())
    assert json.loads((again / "adapter_config.json").read_text())["lora_alpha"] == 4
