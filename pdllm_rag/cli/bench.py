"""`pdllm bench`: how fast it is on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import byte_size, notes, on_terminal, print_table, results, table, write_json
from pdllm_rag.cli.opening import add_store, open_engine
from pdllm_rag.cli.prefill import KV_DTYPES
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.table import Table

N_QUESTIONS = 20
SHAPES = {  # layers, key/value heads, head dim
    "demo": (24, 3, 64),
    "fast-dllm-v2-1.5b": (28, 2, 128),
    "dream-7b": (28, 4, 128),
    "sdar-4b": (36, 8, 128),
    "llada-8b": (32, 32, 128),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure speed",
        description="Measure speed on this machine. Two things are compared in turns within one run; figures "
        "are medians and quartiles.",
    )
    benches = parser.add_subparsers(metavar="BENCH", dest="bench", required=True)
    query = benches.add_parser(
        "query",
        help="questions: by phase, and static_kv against vanilla",
        description="Where a question's time goes, and what static chunk KV saves against encoding the "
        "context anew at each denoising step.",
    )
    add_store(query, help="folder of the store that is asked", may_read_only=True)
    query.add_argument("--model", default="demo", help="bundled model or checkpoint folder (default: demo)")
    query.add_argument(
        "--questions",
        metavar="FILE",
        help=f"as for `pdllm eval qa`; its first {N_QUESTIONS} answerable ones are asked (default: none)",
    )
    query.add_argument("--repeat", type=positive_int, default=5, metavar="N", help="repetitions (default: 5)")
    query.add_argument("--json", action="store_true", help="print one JSON object")
    query.set_defaults(run=run_query)
    prefill = benches.add_parser(
        "prefill",
        help="encoding chunks, against transformers' forward",
        description="Tokens per second of encoding chunks, against transformers' own forward of the same "
        "weights and batch, and of encoding and writing them to a store.",
    )
    prefill.add_argument("--model", default="demo", help="bundled model or checkpoint folder (default: demo)")
    prefill.add_argument("--batch", type=positive_int, default=4, metavar="N", help="chunks a batch (default: 4)")
    prefill.add_argument(
        "--chunk-len", type=positive_int, default=256, metavar="N", help="tokens of a chunk (default: 256)"
    )
    prefill.add_argument("--repeat", type=positive_int, default=10, metavar="N", help="repetitions (default: 10)")
    prefill.add_argument("--json", action="store_true", help="print one JSON object")
    prefill.set_defaults(run=run_prefill)
    _add_store_bench(benches)


def _add_store_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "store",
        help="KV to disk and back, against plain files and a copy in memory",
        description="How fast KV of a model's shape goes to disk and comes back, against torch.save, safetensors, a "
        "plain file and a copy in memory; what opening and listing a large store take; the stored dtypes. No model is "
        "loaded, and everything that is written is removed again.",
    )
    parser.add_argument("--dir", default=".", metavar="DIR", help="measure the disk under this folder (default: .)")
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="KV of this model (default: demo)")
    for name, what in (("layers", "layers"), ("kv-heads", "key/value heads"), ("head-dim", "elements of a head")):
        parser.add_argument(f"--{name}", type=positive_int, metavar="N", help=f"{what} (default: the shape's)")
    for name, value, what in (
        ("chunks", 8, "chunks written and loaded at once"),
        ("chunk-len", 256, "tokens of a chunk"),
        ("metas", 100_000, "chunks of the large store, at least 10"),
        ("repeat", 10, "repetitions"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=value, metavar="N", help=f"{what} (default: {value})"
        )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="stored dtype (default: bfloat16)")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="threads of a load (default: the store's own)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_store)


def run_query(args: argparse.Namespace) -> int:
    """Measure the query side and report."""
    from pdllm_rag.bench.query import bench_query
    from pdllm_rag.evaluation import read_questions

    rows = read_questions(args.questions) if args.questions else []
    questions = [row.text for row in rows if row.kind == "answerable" and row.context is None][:N_QUESTIONS]
    if rows and not questions:
        raise ValueError(f"{args.questions} holds no answerable question that is asked over a store")
    with open_engine(args) as engine, _waiting(args):
        figures = bench_query(engine, questions, repeat=args.repeat)
    tables = [_query_table(figures)]
    if figures["asks"]:
        tables.append(_asks_table(figures["asks"]))
    _report(args, figures, tables)
    return 0


def run_prefill(args: argparse.Namespace) -> int:
    """Measure the encoding of chunks and report."""
    from pdllm_rag.bench.prefill import bench_prefill
    from pdllm_rag.models import load_model

    with _waiting(args):
        figures = bench_prefill(load_model(args.model), batch=args.batch, chunk_len=args.chunk_len, repeat=args.repeat)
    _report(args, figures, [_prefill_table(figures)])
    return 0


def run_store(args: argparse.Namespace) -> int:
    """Measure the store and report."""
    from pdllm_rag.bench.store import StoreShapes, bench_store

    n_layers, n_kv_heads, head_dim = SHAPES[args.shape]
    shapes = StoreShapes(
        n_layers=args.layers or n_layers,
        n_kv_heads=args.kv_heads or n_kv_heads,
        head_dim=args.head_dim or head_dim,
        chunk_len=args.chunk_len,
        n_chunks=args.chunks,
        kv_dtype=args.kv_dtype,
        threads=args.threads,
        n_metas=args.metas,
    )
    with _waiting(args):
        figures = bench_store(shapes, folder=args.dir, repeat=args.repeat)
    sections = [figures["write"], figures["warm"], figures["cold"], *figures["codec"].values()]
    _report(args, figures, [*map(_section_table, sections), _growth_table(figures["tables"])])
    return 0


def _waiting(args: argparse.Namespace) -> AbstractContextManager[object]:
    console = notes()
    return console.status("Measuring") if on_terminal(sys.stderr) and not args.json else console


def _report(args: argparse.Namespace, figures: dict[str, Any], tables: list[Table]) -> None:
    if args.json:
        write_json(figures)
        return
    console = results()
    for part in tables:
        print_table(console, part)
        console.print()
    machine = figures["machine"]
    units = ", AVX512-BF16" * machine["avx512_bf16"] + ", AMX" * machine["amx"]
    console.print(
        f"{_subject(figures)}; {machine['cpu']}, {machine['cores']} cores{units}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}; "
        f"{figures['repeat']} repetitions in turns"
    )


def _subject(figures: dict[str, Any]) -> str:
    machine, shapes = figures["machine"], figures["shapes"]
    if "model" in figures:
        return f"{figures['model']} in {machine['dtype']} on {machine['device']}, {machine['threads']} threads"
    sizes = f"{shapes['n_layers']} layers of {shapes['n_kv_heads']} x {shapes['head_dim']}"
    return f"{shapes['n_chunks']} chunks of {shapes['chunk_len']} tokens, {sizes}, in {shapes['kv_dtype']}"


def _section_table(section: dict[str, Any]) -> Table:
    target = f", target {section['target']} for the first" if "target" in section else ""
    headers = (f"{section['measures']}{target}", "ms", "quartiles", "GB/s", "of the limit", "quartiles")
    rows = table(*headers, right=headers[1:])
    for name, side in section["sides"].items():
        share = side["of_limit"]
        of_limit = ("the limit", "") if name == section["limit"] else (f"{share['median']:.2f}", _quartiles(share, 2))
        speed = f"{side['gb_per_s']['median']:.2f}"
        rows.add_row(side["what"], f"{side['ms']['median']:.1f}", _quartiles(side["ms"], 1), speed, *of_limit)
    if "bytes_per_1k_tokens" in section:
        rows.add_row(f"{byte_size(section['bytes_per_1k_tokens'])} per 1,000 tokens", "", "", "", "", "")
    if known := [side["resident"]["median"] for side in section["sides"].values() if side["resident"]]:
        rows.add_row(f"in the page cache before: {', '.join(f'{share:.1%}' for share in known)}", "", "", "", "", "")
    return rows


def _growth_table(growth: dict[str, Any]) -> Table:
    headers = (growth["measures"], "ms", "quartiles", "peak", "own memory")
    rows = table(*headers, right=headers[1:])
    for side in growth["sides"].values():
        memory = [f"{side[f'{kind}_bytes_per_chunk']:.0f} bytes" for kind in ("peak", "own")]
        rows.add_row(side["what"], f"{side['ms']['median']:.1f}", _quartiles(side["ms"], 1), *memory)
    return rows


def _query_table(figures: dict[str, Any]) -> Table:
    shapes = figures["shapes"]
    headers = ("comparison", "ms", "quartiles", "ratio", "quartiles")
    rows = table(*headers, right=headers[1:])
    for key, label, unit in (
        ("decode", "the same chunks", " per step"),
        ("long_context", "few chunks, long context", " per step"),
        ("question", "whole question", ""),
        ("scoring", f"scoring {shapes['candidates']} chunks, {shapes['steps']} steps", ""),
    ):
        part = figures[key]
        for place in ("dividend", "divisor"):
            side = part[place]
            size = f" over {side['context_tokens']} tokens" if "context_tokens" in side else ""
            ratio = ("", "")
            if place == "divisor":
                ratio = (f"{part['ratio']['median']:.2f}", _quartiles(part["ratio"], 2))
            name = f"{label}: {side['name']}{size}{unit}"
            rows.add_row(name, f"{side['ms']['median']:.1f}", _quartiles(side["ms"], 1), *ratio)
    return rows


def _asks_table(asks: dict[str, Any]) -> Table:
    title = f"{asks['n_questions']} questions, KV in memory"
    rows = table(title, "median", "quartiles", right=("median", "quartiles"))
    for phase, spread in asks["ms"].items():
        rows.add_row(f"{phase.replace('_', ' ')} ms", f"{spread['median']:.1f}", _quartiles(spread, 1))
    rows.add_row("forward passes", f"{asks['nfe']['median']:.0f}", _quartiles(asks["nfe"], 0))
    return rows


def _prefill_table(figures: dict[str, Any]) -> Table:
    shapes, encode, write = figures["shapes"], figures["encode"], figures["write"]
    size = f"{shapes['batch']} chunks of {shapes['chunk_len']} tokens"
    headers = (size, "tokens/s", "quartiles", "ratio", "quartiles")
    rows = table(*headers, right=headers[1:])
    theirs, ours = encode["dividend"]["tokens_per_s"], encode["divisor"]["tokens_per_s"]
    rows.add_row("transformers' forward", f"{theirs['median']:.0f}", _quartiles(theirs, 0), "", "")
    ratio = f"{encode['ratio']['median']:.2f}", _quartiles(encode["ratio"], 2)
    rows.add_row("ours, KV captured", f"{ours['median']:.0f}", _quartiles(ours, 0), *ratio)
    speed = write["tokens_per_s"]
    label = f"ours, written to disk ({write['mib_per_s']['median']:.1f} MiB/s)"
    rows.add_row(label, f"{speed['median']:.0f}", _quartiles(speed, 0), "", "")
    return rows


def _quartiles(spread: dict[str, float], digits: int) -> str:
    return f"{spread['q1']:.{digits}f} to {spread['q3']:.{digits}f}"
