"""Pictures of benchmark figures: PNG files by matplotlib, which only this needs.

Both axes are logarithmic and carry units; the title says what hardware and which versions were measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FONT_SIZE = 12
COLOURS = {"ours": "#0b6e4f", "sdpa": "#1f5fa8", "flex": "#c0392b", "varlen": "#8e5ea2", "flashinfer": "#b9770e"}
FLOOR = "#555555"
MARKERS = "osD^vPX*"


FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str | None) -> None:
    """Refuse a plot before anything is measured; None is no plot.

    Raises:
        ValueError: matplotlib is not installed, or cannot write this file.
    """
    if path is None:
        return
    file = Path(path)
    if file.suffix not in FORMATS or not os.access(file.parent, os.W_OK):
        raise ValueError(f"{path!r} cannot be drawn; expected a name with {', '.join(FORMATS)} in a writable folder")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib, which is not installed; run pip install matplotlib")


def blank(size: tuple[float, float]) -> Any:
    """An empty figure of so many inches, which needs no screen and leaves matplotlib's settings alone.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_attention(figures: Mapping[str, Any], path: str | Path) -> None:
    """A layer's time over context length against the floor, a panel for each kind of heads and number of query rows."""
    panels: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in figures["rows"]:
        panels.setdefault((row["heads"], row["n_rows"]), []).append(row)
    n_columns = len({n_rows for _, n_rows in panels})
    figure, axes = _canvas(-(-len(panels) // n_columns), n_columns, figures["machine"])
    for axis, ((heads, n_rows), rows) in zip(axes, panels.items(), strict=False):
        contexts = [row["context"] for row in rows]
        floor = [row["floor"]["us"] for row in rows]
        axis.plot(contexts, floor, color=FLOOR, linestyle="--", label="floor (measured copy and matmul rates)")
        for number, (family, (name, points)) in enumerate(_lines(rows).items()):
            label = f"{name}, fastest of its kind" if family in COLOURS and family != "ours" else name
            colour = COLOURS.get(family.split(":")[0])
            style = ":" if family.endswith(":placed") else "-"
            axis.plot(
                *zip(*points, strict=True), marker=MARKERS[number % 8], color=colour, linestyle=style, label=label
            )
        axis.set_title(f"{heads} heads, {n_rows} query rows, {figures['dtype']}", fontsize=FONT_SIZE)
        _log_axes(axis, contexts, "context (tokens)", "one layer (µs)")
        axis.legend(fontsize=FONT_SIZE - 4)
    _save(figure, path)


def plot_speed_up(figures: Mapping[str, Any], path: str | Path) -> None:
    """How many times faster than vanilla a step and a whole question are, over context length."""
    rows = figures["contexts"]
    figure, axes = _canvas(1, 1, figures["machine"])
    contexts = [row["context"] for row in rows]
    for number, (key, label) in enumerate((("step", "one denoising step"), ("question", "a whole question"))):
        points = [(row["context"], row[key]["speed_up"]) for row in rows if row.get(key)]
        if points:
            axes[0].plot(*zip(*points, strict=True), marker=MARKERS[number], label=label)
    axes[0].axhline(1.0, color=FLOOR, linestyle="--", linewidth=1)
    _log_axes(axes[0], contexts, "context (tokens)", "times faster than vanilla decoding")
    sizes = figures["sizes"]
    title = f"{figures['model']}, {figures['machine']['dtype']}, {sizes['selected']} selected chunks of "
    title += f"{sizes['chunk_len']} tokens, answer of {sizes['answer_rows']}"
    axes[0].set_title(title, fontsize=FONT_SIZE)
    axes[0].legend(fontsize=FONT_SIZE - 2)
    _save(figure, path)


def plot_decoders(figures: Mapping[str, Any], path: str | Path) -> None:
    """F1 over speed for every setting, or a panel for each case of tokens a second over tokens a step."""
    if "quality" in figures:
        figure, (axis,) = _canvas(1, 1, figures["machine"])
        for number, one in enumerate(figures["quality"]):
            f1 = one["f1"]
            reach = [[f1["value"] - f1["low"]], [f1["high"] - f1["value"]]]
            axis.errorbar(
                one["speed_up"], f1["value"], yerr=reach, marker=MARKERS[number % 8], capsize=3, label=one["setting"]
            )
        axis.set_title(f"{figures['model']}, {figures['n']} questions", fontsize=FONT_SIZE)
        axis.set_xlabel(f"times faster than {figures['baseline']} (decoding)", fontsize=FONT_SIZE)
        axis.set_ylabel("token F1 (95 % interval)", fontsize=FONT_SIZE)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=FONT_SIZE - 4)
        _save(figure, path)
        return
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in figures["speed"]:
        panels.setdefault((row["prompt"], row["sequences"]), []).append(row)
    figure, axes = _canvas(1, len(panels), figures["machine"])
    for axis, ((prompt, sequences), rows) in zip(axes, panels.items(), strict=True):
        counts = [row["tokens_per_step"] for row in rows]
        for number, name in enumerate(rows[0]["contenders"]):
            speeds = [row["contenders"][name]["tokens_per_s"]["median"] for row in rows]
            axis.plot(counts, speeds, marker=MARKERS[number % 8], label=name)
        title = f"{figures['model']}, {figures['machine']['dtype']}, prompt {tokens(prompt)}, {sequences} at once"
        axis.set_title(title, fontsize=FONT_SIZE)
        _log_axes(axis, counts, "tokens of a sequence committed a step (forced)", "tokens a second")
        axis.legend(fontsize=FONT_SIZE - 4)
    _save(figure, path)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, list[tuple[int, float]]]]:
    """(context, µs) points by line: each variant of ours, and the fastest of every other family."""
    lines: dict[str, tuple[str, list[tuple[int, float]]]] = {}
    for row in rows:
        for name, side in row["sides"].items():
            kind = side["family"]
            if kind == "ours":
                key = f"ours:{name}:placed" if "placed" in name else f"ours:{name}"
            elif row["fastest"][kind] == name:
                key, name = kind, kind
            else:
                continue
            lines.setdefault(key, (name, []))[1].append((row["context"], side["us"]["median"]))
    return lines


def _canvas(n_rows: int, n_columns: int, machine: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    figure = blank((7.5 * n_columns, 5.0 * n_rows + 0.6))
    versions = f"torch {machine['torch']}" + (f", triton {machine['triton']}" if machine.get("triton") else "")
    figure.suptitle(f"{machine['device']}, {versions}", fontsize=FONT_SIZE + 1)
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    return figure, list(axes.flat)


def _log_axes(axis: Any, contexts: Sequence[int], below: str, beside: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(set(contexts)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    axis.tick_params(labelsize=FONT_SIZE - 1)
    axis.set_xlabel(below, fontsize=FONT_SIZE)
    axis.set_ylabel(beside, fontsize=FONT_SIZE)
    axis.grid(which="both", alpha=0.3)


def tokens(value: float) -> str:
    """A number of tokens, thousands of 1,024 as 8k."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _save(figure: Any, path: str | Path) -> None:
    figure.savefig(path, dpi=130)
