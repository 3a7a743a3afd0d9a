"""The curves of a run: its log as a picture."""

from __future__ import annotations

import json
from pathlib import Path


def plot_curves(log: Path, path: str | Path) -> None:
    """Loss and accuracy over steps, of training (a running mean) and of validation."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seen = [line for line in lines if "loss" in line]
    held = [line for line in lines if "validation_loss" in line]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        width = max(1, len(seen) // 50)
        values = [line[name] for line in seen]
        smooth = [
            sum(values[max(0, n - width) : n + 1]) / len(values[max(0, n - width) : n + 1]) for n in range(len(seen))
        ]
        axis.plot([line["step"] for line in seen], smooth, color="#0b6e4f", label="training, running mean")
        axis.plot(
            [line["step"] for line in held],
            [line[f"validation_{name}"] for line in held],
            "o-", color="#c0392b", label="held-out texts",
        )  # fmt: skip
        axis.set_xlabel("step")
        axis.set_ylabel(name if name == "loss" else "share of masked tokens that are named right")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
