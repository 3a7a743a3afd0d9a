"""The three things that are trained, from a checkpoint's name to the files of the result.

- `adapt`: all weights, so that a checkpoint answers by masked diffusion from chunks that see only themselves;
- `train_chunk_lora`: the same by an adapter on every row, for checkpoints too large to train whole;
- `train_d2f`: an adapter on canvas rows, by which blocks do without the rows behind them.

And what comes afterwards: `round_mean`, the mean of checkpoints in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.hub import locate
from pdllm_rag.models.layout import Layout
from pdllm_rag.models.loader import check_seen, load_modules, one_device, read_spec
from pdllm_rag.models.rope import Rope
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.models.tokenizer import Tokenizer
from pdllm_rag.training import calibrated
from pdllm_rag.training.adapters import LoraShape, adapted, save_adapter, trained
from pdllm_rag.training.export import save_model
from pdllm_rag.training.items import Shape
from pdllm_rag.training.loop import Loop, Plan, Report
from pdllm_rag.training.masters import ROUNDINGS, Masters
from pdllm_rag.training.noise import DiffusionNoise, MonotoneNoise, Noise
from pdllm_rag.training.objectives import Forcing, Objective, Reading
from pdllm_rag.training.stream import Stream
from pdllm_rag.training.texts import Mixture


@dataclass(frozen=True)
class Run:
    """What every kind of training is told.

    Attributes:
        model: as `load_model` takes it.
        training, validation: where samples come from; without validation none is done.
        folder: of the run: checkpoints, log and, in `result`, what was trained.
        n_rows: rows of a batch.
        rounding: of `masters.ROUNDINGS`; the result is stored so.
        device: as `load_model` takes it. A GPU computes in bfloat16, a CPU in float32; masters are float32.
    """

    model: str
    training: Mixture
    validation: Mixture | None
    folder: Path
    plan: Plan
    shape: Shape
    n_rows: int
    rounding: str = "none"
    device: str = "auto"

    @property
    def result(self) -> Path:
        """Folder of the trained checkpoint or adapter."""
        return self.folder / "result"


class Subject(NamedTuple):
    """A checkpoint opened for training."""

    spec: ModelSpec
    tokenizer: Tokenizer
    folder: Path
    model: Any
    layout: Layout
    backbone: Backbone

    @classmethod
    def open(cls, name: str, device: str) -> Subject:
        """Load it. Raises as `load_model`."""
        target = check_seen(one_device(device, None))
        spec, tokenizer, _ = read_spec(name)
        folder = locate(name)
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
        model, layout = load_modules(spec, folder, target, dtype)
        rope = Rope.from_config(model.config, target)
        backbone = Backbone(model, rope, mask_id=spec.mask_id, forbidden_from=spec.n_tokens)
        return cls(spec, tokenizer, folder, model, layout, backbone)

    def alike(self, name: str) -> Any:
        """The modules of another checkpoint, which must be read as this one is.

        Raises:
            ValueError: its special tokens, logit shift or rotary tables are others.
        """
        other = Subject.open(name, "cpu")
        ours, theirs = (
            (one.spec.bos_id, one.spec.eos_ids, one.spec.mask_id, one.spec.logit_shift, one.spec.n_tokens)
            for one in (self, other)
        )
        if ours != theirs or not torch.equal(self.backbone.rope.inv_freq, other.backbone.rope.inv_freq):
            raise ValueError(
                f"{name} and {self.folder} are read in other ways (BOS, EOS, mask, logit shift, tokens: {theirs} and "
                f"{ours}, or the rotary tables); only checkpoints of one kind have a mean"
            )
        return other.model


def adapt(run: Run, report: Report, noise: DiffusionNoise | None = None) -> Path:
    """Train all weights; returns the folder of the checkpoint.

    Raises:
        TrainingError, ModelError, ValueError.
    """
    subject = Subject.open(run.model, run.device)
    subject.model.train().requires_grad_(True)
    noise = noise or DiffusionNoise()
    masters = _train(run, subject, Reading(subject.backbone), subject.model.named_parameters(), noise, {}, report)
    save_model(run.result, subject.folder, masters.weights, subject.layout, in_4_bits=run.rounding == "4bit")
    return run.result


def train_chunk_lora(run: Run, lora: LoraShape, report: Report, noise: DiffusionNoise | None = None) -> Path:
    """Train an adapter that acts on every row; returns its folder, which `load_model(adapter=...)` takes.

    Raises: as `adapt`.
    """
    subject = Subject.open(run.model, run.device)
    model = adapted(subject.model, lora).train()
    objective = Reading(subject.backbone.over(model))
    masters = _train(run, subject, objective, trained(model), noise or DiffusionNoise(), asdict(lora), report)
    return _save(run, subject, masters, lora)


def train_d2f(
    run: Run,
    lora: LoraShape,
    report: Report,
    noise: MonotoneNoise | None = None,
    *,
    hard_labels: float = 0.0,
    stored_alpha: int | None = None,
) -> Path:
    """Train an adapter that acts on canvas rows; returns its folder, which `load_model(canvas_adapter=...)` takes.

    Args:
        hard_labels: see `Forcing`.
        stored_alpha: scale of the result, where it is to act less than it was trained to; no part of the training, so a
            run that is done can be given another one.

    Raises: as `adapt`.
    """
    subject = Subject.open(run.model, run.device)
    student = adapted(subject.model, lora).train()
    student_backbone = subject.backbone.over(student)
    objective = Forcing(subject.backbone, student_backbone, run.shape.context_len, hard_labels=hard_labels)
    more = {**asdict(lora), "hard_labels": hard_labels}
    masters = _train(run, subject, objective, trained(student), noise or MonotoneNoise(), more, report)
    return _save(run, subject, masters, lora, stored_alpha)


def round_mean(
    names: Sequence[str],
    mixture: Mixture,
    folder: Path,
    report: Callable[[int], None],
    *,
    shape: Shape,
    n_batches: int,
    seed: int = 0,
) -> Path:
    """Round the mean of checkpoints to 4 bits, calibrated by rows of a mixture, on the CPU; returns the folder.

    Args:
        names: checkpoints of one shape, as `load_model` takes them.
        report: is told each layer that is done.

    Raises:
        ModelError, ValueError.
    """
    if folder.resolve() in [locate(name).resolve() for name in names]:
        raise ValueError(f"{folder} is one of the checkpoints; name another folder for what is rounded")
    subject = Subject.open(names[0], "cpu")
    calibrated.average(subject.model, (subject.alike(name) for name in names[1:]))
    noise = DiffusionNoise()
    stream = Stream(mixture, subject.spec, subject.tokenizer, noise, shape, n_rows=1, seed=f"{seed}/round")
    batches = [stream[number] for number in range(n_batches)]
    rounded = calibrated.round_layers(subject.backbone, batches, report)
    weights = dict(subject.model.named_parameters())
    save_model(folder, subject.folder, weights, subject.layout, in_4_bits=True, rounded=rounded)
    return folder


def _train(
    run: Run,
    subject: Subject,
    objective: Objective,
    parameters: Any,
    noise: Noise,
    more: dict[str, Any],
    report: Report,
) -> Masters:
    plan = run.plan
    masters = Masters(parameters, ROUNDINGS[run.rounding], decay=plan.decay, betas=plan.betas)

    def stream(mixture: Mixture, seed: str) -> Stream:
        spec, tokenizer = subject.spec, subject.tokenizer
        return Stream(mixture, spec, tokenizer, noise, run.shape, n_rows=run.n_rows, seed=seed)

    about = {"model": run.model, "rows": run.n_rows, "shape": asdict(run.shape), "rounding": run.rounding}
    about |= {"noise": asdict(noise), **more}  # type: ignore[call-overload]
    training = stream(run.training, str(plan.seed))
    validation = None if run.validation is None else stream(run.validation, f"{plan.seed}/validation")
    Loop(objective, masters, training, validation, plan, run.folder, subject.backbone.device, about).run(report)
    return masters


def _save(run: Run, subject: Subject, masters: Masters, lora: LoraShape, alpha: int | None = None) -> Path:
    in_8_bits = run.rounding == "8bit"
    save_adapter(run.result, masters.weights, lora, subject.layout, base=run.model, in_8_bits=in_8_bits, alpha=alpha)
    return run.result
