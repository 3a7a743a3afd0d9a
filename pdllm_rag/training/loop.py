"""The training loop: steps by number, a checkpoint to go on from, and a log of what was seen.

In the folder of a run: `log.jsonl` (a line for each report), `checkpoint-<step>.safetensors` and `state.json`, which
names it. A run that is started again goes on where the last checkpoint was; on a CPU its
weights are those of an unbroken run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdllm_rag.errors import TrainingError
from pdllm_rag.training.masters import Masters
from pdllm_rag.training.objectives import Found, Objective
from pdllm_rag.training.stream import Stream

logger = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """How long and how fast.

    Attributes:
        lr: after `warmup` steps; it falls to zero by a cosine at the last step.
        clip: largest norm of the gradient.
        seed: of batches and of dropout.
        report_every, validate_every, save_every: steps; the last one also validates and saves. 0 is never.
        validation_batches: of every validation, the same ones each time.
        workers: processes that make batches.
    """

    steps: int
    lr: float
    warmup: int = 150
    decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.96)
    clip: float = 1.0
    seed: int = 0
    report_every: int = 20
    validate_every: int = 500
    validation_batches: int = 8
    save_every: int = 1000
    workers: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with."""
        free = ("workers", "report_every", "validate_every", "save_every", "validation_batches")
        return {key: value for key, value in json.loads(json.dumps(asdict(self))).items() if key not in free}


class Loop:
    """One run.

    Args:
        about: what was trained on what, for `state.json`; a folder that was made for something else is refused.
    """

    def __init__(
        self,
        objective: Objective,
        masters: Masters,
        training: Stream,
        validation: Stream | None,
        plan: Plan,
        folder: Path,
        device: torch.device,
        about: dict[str, Any],
    ) -> None:
        self._objective, self._masters, self._plan, self._device = objective, masters, plan, device
        self._training, self._validation, self._folder = training, validation, folder
        self._identity = {"plan": plan.identity, "about": json.loads(json.dumps(about))}

    def run(self, report: Report) -> int:
        """Train to the last step and return the step that was begun from.

        Raises:
            TrainingError: the loss is not finite, or the folder holds another run.
        """
        plan = self._plan
        self._folder.mkdir(parents=True, exist_ok=True)
        begun = self._resume()
        self._cut_log(begun)
        since, positions, clock = begun, 0, time.perf_counter()
        batches: Iterator[Any] = self._training.batches(begun, plan.steps, workers=plan.workers)
        for step, batch in enumerate(batches, start=begun):
            torch.manual_seed(hash_of(plan.seed, step))  # of dropout
            found = self._objective(batch.to(self._device))
            found.loss.backward()  # type: ignore[no-untyped-call]
            norm = self._masters.step(plan.rate(step), clip=plan.clip)
            positions += batch.ids.numel()
            done = step + 1
            reports, saves = (_due(done, every, plan.steps) for every in (plan.report_every, plan.save_every))
            line = {"step": done, "loss": float(found.loss.detach()), "norm": float(norm)} if reports or saves else {}
            if not all(map(math.isfinite, line.values())):
                raise TrainingError(
                    f"step {done}: the loss is {line['loss']} and the gradient's norm {line['norm']}; expected finite "
                    "numbers. Begin again in another folder, with a lower --lr or another --seed"
                )
            if reports:
                seconds = time.perf_counter() - clock
                line |= {"accuracy": float(found.accuracy), "lr": plan.rate(step)}
                line |= {"steps_per_s": (done - since) / seconds, "positions_per_s": positions / seconds}
                self._tell(line, report)
                since, positions, clock = done, 0, time.perf_counter()
            if _due(done, plan.validate_every, plan.steps) and self._validation is not None:
                self._tell({"step": done, **self.validate()}, report)
                clock = time.perf_counter()
            if saves:
                self._save(done)
                clock = time.perf_counter()
        return begun

    def validate(self) -> dict[str, float]:
        """Mean loss and accuracy over the validation batches.

        Gradients are left on: without them a GPU's passes would be compiled once more.
        """
        assert self._validation is not None
        n = self._plan.validation_batches
        workers = min(n, self._plan.workers)
        batches = self._validation.batches(0, n, workers=workers)
        found = [Found(*(one.detach() for one in self._objective(batch.to(self._device)))) for batch in batches]
        return {
            "validation_loss": float(torch.stack([one.loss for one in found]).mean()),
            "validation_accuracy": float(torch.stack([one.accuracy for one in found]).mean()),
        }

    def _resume(self) -> int:
        path = self._folder / "state.json"
        if not path.is_file():
            return 0
        state = json.loads(path.read_text())
        if state["identity"] != self._identity:
            changed = sorted(
                f"{part}.{key}"
                for part in ("plan", "about")
                for key in {**state["identity"][part], **self._identity[part]}
                if state["identity"][part].get(key) != self._identity[part].get(key)
            )
            raise TrainingError(
                f"{self._folder} holds another run: {', '.join(changed)} differ; go on with the same settings, or name "
                "another folder"
            )
        self._masters.load(load_file(self._folder / state["file"]))
        logger.info("going on from step %d", state["step"])
        return int(state["step"])

    def _save(self, step: int) -> None:
        """A new file, then the state that names it; then the old file goes, so that one whole pair is always there."""
        path = self._folder / "state.json"
        name = f"checkpoint-{step}.safetensors"
        save_file(self._masters.state(), self._folder / name)
        new = self._folder / "state.json.new"
        new.write_text(json.dumps({"step": step, "file": name, "identity": self._identity}))
        os.replace(new, path)
        for old in self._folder.glob("checkpoint-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _tell(self, line: dict[str, Any], report: Report) -> None:
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        report(line)

    def _cut_log(self, begun: int) -> None:
        """Lines beyond the checkpoint are of steps that are now taken again."""
        path = self._folder / "log.jsonl"
        if path.is_file():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= begun]
            path.write_text("".join(line + "\n" for line in lines))


def hash_of(seed: int, step: int) -> int:
    """A seed for torch from a run's seed and a step."""
    return (seed * 1_000_003 + step) % (1 << 31)


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)
