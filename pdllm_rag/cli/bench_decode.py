"""`pdllm bench decode`: a denoising step and a whole question, against other ways to decode."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_prefill import add_model, chosen_model
from pdllm_rag.cli.bench_report import add_output, check_files, model_subject, quartiles, report, save, waiting
from pdllm_rag.cli.bench_values import count, list_of
from pdllm_rag.cli.console import table
from pdllm_rag.cli.options import add_counts
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from rich.table import Table

SECTIONS = ("step", "question", "autoregressive", "prefix", "batch")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "decode",
        help="a step and a question, against vanilla, autoregressive and prefix-cached decoding",
        description="A denoising step over a few selected chunks and a whole question (load, draft, score, decode), "
        "against encoding the whole context at every step; against an autoregressive model of the same shape; against "
        "a cache of the whole context; and several questions in one step, against the floor of that step.",
    )
    add_model(parser)
    parser.add_argument(
        "--context",
        type=list_of(count),
        default="8k,16k,32k",
        metavar="N,...",
        help="tokens of the whole context (default: 8k,16k,32k)",
    )
    parser.add_argument(
        "--batch",
        type=list_of(positive_int),
        default="1,2,4,8",
        metavar="N,...",
        help="questions in one step (default: 1,2,4,8)",
    )
    add_counts(
        parser,
        ("chunk-len", 1024, "tokens of a chunk"),
        ("selected", 4, "chunks that a question reads"),
        ("question-rows", 64, "tokens of a question"),
        ("few-steps", 12, "most steps of an answer that takes few"),
        ("repeat", 3, "repetitions"),
    )
    parser.add_argument(
        "--candidates",
        type=positive_int,
        metavar="N",
        help="most chunks that are scored (default: 32, or 16 where a token's KV is larger than 256 KiB)",
    )
    parser.add_argument(
        "--sections",
        type=list_of(str),
        default=",".join(SECTIONS),
        metavar="NAME,...",
        help=f"what is measured (default: {','.join(SECTIONS)})",
    )
    parser.add_argument("--dir", metavar="DIR", help="write under this folder (default: the system's temporary one)")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object to a file too, after every part")
    add_output(parser, plots="the speed-up of a step and of a question over context length")
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> int:
    """Measure decoding and report."""
    from pdllm_rag.bench.decode import bench_decode, default_candidates
    from pdllm_rag.bench.decode_sides import DecodeSizes
    from pdllm_rag.bench.plots import plot_speed_up

    check_files(args)
    with waiting(args):
        model = chosen_model(args)
        sizes = DecodeSizes(
            question_rows=args.question_rows,
            chunk_len=args.chunk_len,
            selected=args.selected,
            candidates=args.candidates or default_candidates(model),
            few_steps=args.few_steps,
            repeat=args.repeat,
        )
        figures = bench_decode(
            model,
            contexts=args.context,
            batches=args.batch,
            sizes=sizes,
            sections=args.sections,
            folder=args.dir,
            on_part=lambda so_far: save(args.out, so_far),
        )
    if args.plot:
        plot_speed_up(figures, args.plot)
    tables = [_step_table(figures)] if any("step" in row for row in figures["contexts"]) else []
    tables += [_question_table(row) for row in figures["contexts"] if "question" in row]
    if "autoregressive" in figures:
        tables.append(_autoregressive_table(figures["autoregressive"]))
    if "batch" in figures:
        tables.append(_batch_table(figures["batch"]))
    return report(args, figures, tables, model_subject(figures))


def _step_table(figures: dict[str, Any]) -> Table:
    headers = (f"one step ({figures['decoder']['backend']})", "ms", "quartiles", "floor ms", "times static_kv")
    rows = table(*headers, right=headers[1:])
    for row in figures["contexts"]:
        step, ours = row["step"], row["step"]["static_kv"]
        name = f"static_kv over {ours['context_rows']} selected rows"
        rows.add_row(name, _ms(ours["ms"]), quartiles(ours["ms"], 2), f"{ours['floor']['ms']:.2f}", "")
        theirs = step["vanilla"]
        name = f"vanilla over {row['context']}, {theirs['steps_timed']} steps timed"
        rows.add_row(name, _ms(theirs["ms"]), quartiles(theirs["ms"], 2), "", f"{step['speed_up']:.1f}")
        cached = row.get("prefix_cached")
        if cached and "skipped" in cached:
            rows.add_row(f"prefix cached over {row['context']}: {cached['skipped']}", "", "", "", "")
        elif cached:
            name, floor = f"prefix cached over {row['context']}", f"{cached['floor']['ms']:.2f}"
            rows.add_row(name, _ms(cached["ms"]), quartiles(cached["ms"], 2), floor, f"{cached['speed_up']:.2f}")
    return rows


def _question_table(row: dict[str, Any]) -> Table:
    found = row["question"]
    title = f"a question over {row['context']}, {found['candidates']} candidates"
    headers = (title, "ms", "quartiles", "load", "draft", "score", "decode", "vanilla ms", "faster")
    rows = table(*headers, right=headers[1:])
    for key in ("all_steps", "few_steps"):
        for name, where in (("warm", "KV on the device"), ("page_cache", "KV in the page cache")):
            side = found[key][name]
            parts = [f"{side['parts_ms'][part]['median']:.1f}" for part in ("load", "draft", "score", "decode")]
            label = f"{found[key]['nfe']} steps, {where}"
            spread = f"{side['ms']['median']:.1f}", quartiles(side["ms"], 1)
            rows.add_row(label, *spread, *parts, f"{found[key]['vanilla_ms']:.0f}", f"{side['speed_up']:.1f}")
    return rows


def _autoregressive_table(found: dict[str, Any]) -> Table:
    title = f"{found['tokens']} tokens after {found['prompt_rows']}, step floor {found['step_floor_ms']:.2f} ms"
    headers = (title, "prefill ms", "step ms", "all ms", "quartiles", "times ours")
    rows = table(*headers, right=headers[1:])
    for name, side in found["kinds"].items():
        total = side["total_ms"]
        parts = _ms(side["prefill_ms"]), _ms(side["step_ms"])
        rows.add_row(f"autoregressive, {name}", *parts, f"{total['median']:.1f}", quartiles(total, 1), "")
    for name, reason in found["skipped"].items():
        rows.add_row(f"autoregressive, {name}: {reason[:60]}", "", "", "", "", "")
    for key, label in (("static_kv", "static_kv"), ("static_kv_few_steps", "static_kv in few steps")):
        side = found[key]
        ratio = f"{side['speed_up']:.2f}" if "speed_up" in side else ""
        rows.add_row(label, "", "", f"{side['ms']['median']:.1f}", quartiles(side["ms"], 1), ratio)
    return rows


def _batch_table(batch: list[dict[str, Any]]) -> Table:
    headers = ("questions in one step", "step ms", "quartiles", "tokens/s", "floor ms", "x floor")
    rows = table(*headers, right=headers[1:])
    for one in batch:
        floor = f"{one['floor']['ms']:.2f} ({one['floor']['bound']})"
        spread = _ms(one["step_ms"]), quartiles(one["step_ms"], 2)
        rows.add_row(str(one["questions"]), *spread, f"{one['tokens_per_s']:.0f}", floor, f"{one['over_floor']:.2f}")
    return rows


def _ms(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f}"
