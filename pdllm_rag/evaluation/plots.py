"""Pictures of evaluations: PNG files by matplotlib, which only this needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pdllm_rag.bench.plots import FONT_SIZE, blank, tokens

COLOUR_MAP = "RdYlBu"  # told apart by the colour-blind too
DARK = (0.18, 0.82)  # shares of hits beyond which a cell's number is white
NOT_ASKED = "#dddddd"
TASK_TITLES = {
    "passkey": "passkey",
    "number": "number",
    "key_value": "key-value",
    "multi": "one needle of several",
}
REFUSAL_STYLES = {"unrelated": ("unrelated", "#0b6e4f", "o"), "near_miss": ("near miss", "#c0392b", "s")}
NAMED_SUPPORTS = (0.1, 0.5, 0.9, 0.99)
ANCHOR_STYLES = {
    "each": ("a BOS in each chunk", "#0b6e4f", "o"),
    "none": ("no BOS", "#c0392b", "s"),
    "first": ("one dense text, one BOS", "#1f5fa8", "^"),
}


def plot_needles(figures: Mapping[str, Any], path: str | Path) -> None:
    """Hits by length and depth: a row of heatmaps for each task, a column for each way of asking."""
    series = figures["series"]
    tasks = list(dict.fromkeys(cell["task"] for one in series for cell in one["cells"]))
    lengths = sorted({cell["length"] for one in series for cell in one["cells"]})
    depths = sorted({cell["depth"] for one in series for cell in one["cells"]})
    size = (1.6 + len(series) * (0.5 + 0.95 * len(lengths)) + 1.2, 1.5 + len(tasks) * (0.4 + 0.5 * len(depths)))
    figure, axes = _canvas(len(tasks), len(series), size, figures)
    image = None
    for task, row in zip(tasks, axes, strict=True):
        for one, axis in zip(series, row, strict=True):
            cells = {(c["length"], c["depth"]): c for c in one["cells"] if c["task"] == task}
            image = _heatmap(axis, [[cells.get((length, depth)) for length in lengths] for depth in depths])
            n_trained = sum(length <= figures["window"] for length in lengths)
            if one["mode"] == "dense" and 0 < n_trained < len(lengths):
                axis.axvline(n_trained - 0.5, color="black", linewidth=2, linestyle=(0, (3, 2)))
            axis.set_xticks(range(len(lengths)), [tokens(length) for length in lengths])
            axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths] if one is series[0] else [])
            if task == tasks[0]:
                axis.set_title(_name(one, figures["window"]), fontsize=FONT_SIZE)
            if task == tasks[-1]:
                axis.set_xlabel("haystack (tokens)", fontsize=FONT_SIZE - 1)
        row[0].set_ylabel(f"{TASK_TITLES[task]}\ndepth of the needle", fontsize=FONT_SIZE - 1)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.set_label("share of needles found", fontsize=FONT_SIZE - 1)
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=130)


def _heatmap(axis: Any, cells: Sequence[Sequence[Mapping[str, Any] | None]]) -> Any:
    """Cells [depths][lengths], with their counts written on them; None was not asked."""
    shares = [[float("nan") if cell is None else cell["hits"] / cell["n"] for cell in row] for row in cells]
    axis.set_facecolor(NOT_ASKED)
    image = axis.imshow(shares, cmap=COLOUR_MAP, vmin=0, vmax=1, aspect="auto")
    for y, x in product(range(len(cells)), range(len(cells[0]))):
        cell = cells[y][x]
        is_dark = cell is not None and not DARK[0] <= shares[y][x] <= DARK[1]
        text, smaller = ("not asked", 3) if cell is None else (f"{cell['hits']}/{cell['n']}", 1)
        colour = "white" if is_dark else "black"
        axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=FONT_SIZE - smaller)
    axis.set_xticks([x + 0.5 for x in range(len(cells[0]) - 1)], minor=True)
    axis.set_yticks([y + 0.5 for y in range(len(cells) - 1)], minor=True)
    axis.grid(which="minor", color="white", linewidth=2)
    axis.tick_params(which="both", length=0, labelsize=FONT_SIZE - 1)
    axis.spines[:].set_visible(False)
    return image


def plot_anchors(figures: Mapping[str, Any], path: str | Path) -> None:
    """Mass on the first row and on the other rows of each chunk over the context, a row of panels for each length."""
    lengths = list(dict.fromkeys(one["length"] for one in figures["masses"]))
    figure, axes = _canvas(len(lengths), 3, (17.0, 0.8 + 4.4 * len(lengths)), figures)
    for row, length in zip(axes, lengths, strict=True):
        for one in figures["masses"]:
            if one["length"] != length:
                continue
            label, colour, marker = ANCHOR_STYLES[one["anchors"]]
            numbers = range(1, one["n_chunks"] + 1)
            style = {"label": label, "color": colour, "marker": marker}
            row[0].plot(numbers, one["head"], **style)
            row[1].plot(numbers, one["rest"], **style)
            row[2].plot(range(len(one["layers"]["heads"])), one["layers"]["heads"], **style)
        titles = "first row of each chunk", "other rows of each chunk", "first rows of all chunks together"
        below = "chunk, in the order of the text", "chunk, in the order of the text", "layer"
        for axis, title, label in zip(row, titles, below, strict=True):
            axis.set_title(f"{title}, {tokens(length)} tokens", fontsize=FONT_SIZE)
            axis.set_xlabel(label, fontsize=FONT_SIZE)
            axis.set_ylabel("attention mass of the answer's rows", fontsize=FONT_SIZE - 1)
            axis.set_ylim(bottom=0)
            axis.tick_params(labelsize=FONT_SIZE - 1)
            axis.grid(alpha=0.3)
            axis.xaxis.get_major_locator().set_params(integer=True)
        row[0].legend(fontsize=FONT_SIZE - 2)
    figure.savefig(path, dpi=130)


def plot_reuse(figures: Mapping[str, Any], path: str | Path) -> None:
    """Differences in F1 from the base with their intervals, a panel for each set of questions."""
    sets = figures["sets"]
    n_others = max(len(part["ways"]) for part in sets.values()) - 1
    figure, axes = _canvas(1, len(sets), (2.5 + 5.0 * len(sets), 1.8 + 0.45 * n_others), figures)
    for axis, (name, part) in zip(axes[0], sets.items(), strict=True):
        base, *others = part["ways"]
        for row, way in enumerate(others):
            value, low, high = (100 * way["difference"]["f1"][key] for key in ("value", "low", "high"))
            axis.plot([low, high], [row, row], color="#1f5fa8", linewidth=3)
            axis.plot(value, row, "o", color="#0b6e4f")
        axis.axvline(0, color="#555555", linestyle="--")
        axis.set_yticks(range(len(others)), [way["name"] for way in others], fontsize=FONT_SIZE - 1)
        axis.set_ylim(n_others - 0.5, -0.5)
        axis.set_xlabel("F1 against the base, points (95 % interval)", fontsize=FONT_SIZE - 1)
        title = f"{Path(name).name}, n = {part['n']}\n{base['name']}: F1 {100 * base['f1']['value']:.1f}"
        axis.set_title(title, fontsize=FONT_SIZE)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)


def plot_refusals(figures: Mapping[str, Any], path: str | Path) -> None:
    """Unanswerable questions refused against answerable ones refused, along `min_support`, with 95 % intervals."""
    figure, axes = _canvas(1, 1, (7.5, 6.0), figures)
    axis = axes[0][0]
    rows = figures["by_min_support"]
    falsely = [row["answerable"]["value"] for row in rows]
    kinds = [kind for kind in REFUSAL_STYLES if figures[kind]["n"]]
    for kind in kinds:
        label, colour, marker = REFUSAL_STYLES[kind]
        values, lows, highs = ([row[kind][key] for row in rows] for key in ("value", "low", "high"))
        axis.fill_between(falsely, lows, highs, color=colour, alpha=0.15)
        axis.plot(falsely, values, color=colour, marker=marker, label=f"{label} (n = {figures[kind]['n']})")
        for row, *place in zip(rows, falsely, values, strict=True):
            if row["min_support"] in NAMED_SUPPORTS and kind == kinds[-1]:
                axis.annotate(f"{row['min_support']:g}", place, (4, -14), textcoords="offset points", color=colour)
    axis.plot((0, 1), (0, 1), color="#999999", linestyle=":", label="chance")
    axis.set_xlabel(f"answerable questions refused (n = {figures['answerable']['n']})", fontsize=FONT_SIZE)
    axis.set_ylabel("unanswerable questions refused", fontsize=FONT_SIZE)
    axis.set_xlim(-0.02, 1)
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=FONT_SIZE - 1)
    axis.set_title(f"{Path(figures['data']).name}, by min_support (numbers at the points)", fontsize=FONT_SIZE)
    figure.savefig(path, dpi=130)


def plot_curves(log: Path, path: str | Path) -> None:
    """Loss and accuracy over steps of a training run's log: of training (a running mean) and of held-out texts."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seen = [line for line in lines if "loss" in line]
    held = [line for line in lines if "validation_loss" in line]
    figure = blank((11, 4))
    for axis, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
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


def _canvas(n_rows: int, n_columns: int, size: tuple[float, float], figures: Mapping[str, Any]) -> tuple[Any, Any]:
    """A figure and its axes, [n_rows][n_columns]."""
    figure = blank(size)
    machine = figures["machine"]
    title = f"{figures['settings']['model']}, {machine['dtype']} on {machine['device']}, torch {machine['torch']}"
    figure.suptitle(title, fontsize=FONT_SIZE + 1)
    return figure, figure.subplots(n_rows, n_columns, squeeze=False)


def _name(series: Mapping[str, Any], window: int) -> str:
    if series["mode"] == "dense":
        return f"dense prompt (trained on positions up to {tokens(window)})"
    return f"chunks of {series['chunk_len']}" + ("" if series["bos"] else ", no BOS")
