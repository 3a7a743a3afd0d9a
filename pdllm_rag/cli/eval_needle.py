"""`pdllm eval needle`: needles at lengths and depths of haystacks."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_values import count, list_of
from pdllm_rag.cli.console import progress, report, table
from pdllm_rag.cli.eval_report import estimate, settings, where
from pdllm_rag.cli.opening import adapters, add_model
from pdllm_rag.cli.options import add_asking, add_counts, asking_options
from pdllm_rag.cli.values import positive_int, probability, seed

if TYPE_CHECKING:
    from rich.table import Table

# Spelled out, so that `--help` needs no model code; a test keeps them equal to the evaluation's.
TASKS = ("passkey", "number", "key_value", "multi")
MODES = ("chunked", "dense")
BOS = {"on": True, "off": False}
STAGES = ("first_stage", "scoring", "window", "refused", "reading")


def add_parser(measures: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the measure."""
    parser = measures.add_parser(
        "needle",
        help="find a number that is hidden in a long text",
        description="Hide a passkey, a number or a record at some depth of a haystack of some length, and ask for it: "
        "over chunks that are prefilled once (a needle changes one of them), or with everything in one dense prompt. "
        "A miss says whether the needle's chunk was not chosen or was not read right.",
    )
    add_model(parser)
    for name, kind, value, what in (
        ("lengths", count, "1k,2k,4k,8k", "tokens of the haystacks"),
        ("depths", probability, "0,0.25,0.5,0.75,1", "0 is the beginning of a haystack, 1 its end"),
        ("tasks", str, "passkey,number,key_value", f"of {', '.join(TASKS)}"),
        ("modes", str, "chunked", f"of {', '.join(MODES)}"),
        ("bos", str, "on", "on, off or both: whether each chunk begins with a BOS"),
    ):
        parser.add_argument(
            f"--{name}", type=list_of(kind), default=value, metavar="A,B,...", help=f"{what} (default: {value})"
        )
    parser.add_argument(
        "--chunk-len",
        type=list_of(positive_int),
        metavar="N,...",
        help="tokens of a chunk, BOS included; several are measured one after another (default: the model family's)",
    )
    add_counts(parser, ("trials", 5, "needles at each length and depth"))
    parser.add_argument(
        "--dense-max",
        type=count,
        metavar="N",
        help="longest haystack that is asked densely, which takes long (default: the model's window)",
    )
    parser.add_argument(
        "--dense-trials", type=positive_int, metavar="N", help="as --trials, for dense questions (default: as many)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of haystacks and needles (default: 0)")
    add_asking(parser)
    parser.add_argument("--details", metavar="FILE", help="write each trial there, one JSON object per line")
    parser.add_argument("--plot", metavar="FILE.png", help="draw heatmaps of lengths and depths (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask for every needle and report."""
    from pdllm_rag.bench.machine import describe
    from pdllm_rag.bench.plots import check_plot
    from pdllm_rag.evaluation.needle import NeedleGrid, run_trials, summary
    from pdllm_rag.evaluation.plots import plot_needles
    from pdllm_rag.models.loader import load_model, read_spec

    check_plot(args.plot)
    spec, _, _ = read_spec(args.model)
    grid = NeedleGrid(
        tasks=args.tasks,
        lengths=args.lengths,
        depths=args.depths,
        trials=args.trials,
        chunk_lens=args.chunk_len or [spec.family.chunk_len],
        bos=[_has_bos(word) for word in args.bos],
        modes=args.modes,
        dense_max=args.dense_max,
        dense_trials=args.dense_trials,
        seed=args.seed,
    )
    n_trials = grid.n_trials(spec.family.window)
    if not n_trials:
        raise ValueError(
            f"no haystack of {min(args.lengths)} tokens or more is asked densely; expected one of at most "
            f"{grid.dense_max or spec.family.window}. Take shorter ones, or raise --dense-max"
        )
    options = asking_options(args, abstain=False)
    model = load_model(args.model, device=args.device, **adapters(args))
    trials = []
    with ExitStack() as stack:
        details = stack.enter_context(open(args.details, "w", encoding="utf-8")) if args.details else None
        advance = stack.enter_context(progress(args, "Asking", n_trials))
        for trial in run_trials(model, grid, options):
            trials.append(trial)
            advance()
            if details is not None:
                print(json.dumps(trial.as_dict()), file=details, flush=True)
    figures: dict[str, Any] = {
        "grid": vars(grid),
        "window": spec.family.window,
        "series": summary(trials),
        "settings": settings(model, options),
        "machine": describe(model)._asdict(),
    }
    if args.plot:
        plot_needles(figures, args.plot)
    series = figures["series"]
    tables = [*map(_table, series), *([_comparison(series)] if len(series) > 1 else [])]
    return report(args, figures, tables, f"Misses: {', '.join(STAGES)} (what missed them). {where(figures)}")


def _has_bos(word: str) -> bool:
    if word not in BOS:
        raise ValueError(f"--bos has {word!r}; expected on, off or on,off")
    return BOS[word]


def _name(part: dict[str, Any]) -> str:
    name = "dense prompt" if part["mode"] == "dense" else f"chunks of {part['chunk_len']}"
    return name + ("" if part["bos"] else ", no BOS")


def _comparison(series: list[dict[str, Any]]) -> Table:
    """Shares found over all lengths that a way of asking was asked at."""
    tasks = [row["task"] for row in series[0]["tasks"]]
    filled = table("all lengths asked", *tasks, right=tuple(tasks))
    for part in series:
        shares = {row["task"]: f"{row['accuracy']['value']:.3f} of {row['n']}" for row in part["tasks"]}
        filled.add_row(_name(part), *(shares.get(task, "-") for task in tasks))
    return filled


def _table(part: dict[str, Any]) -> Table:
    headers = (_name(part), "tokens", "found", "share", "95 % interval", "worst depth", "chunk read", "missed by", "ms")
    filled = table(*headers, right=("tokens", "found", "share", "worst depth", "chunk read", "ms"))
    for row in part["lengths"]:
        cells = [c for c in part["cells"] if (c["task"], c["length"]) == (row["task"], row["length"])]
        worst = min(cells, key=lambda cell: cell["hits"] / cell["n"])
        filled.add_row(
            row["task"],
            str(row["length"]),
            f"{row['hits']}/{row['n']}",
            *estimate(row["accuracy"]),
            f"{worst['hits']}/{worst['n']} at {worst['depth']:g}",
            "-" if row["retrieved"] is None else f"{row['retrieved']}/{row['n']}",
            ", ".join(f"{stage} {n}" for stage, n in row["missed"].items()),
            f"{row['ms']:.0f}",
        )
    return filled
