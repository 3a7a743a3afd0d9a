"""`pdllm bench`: how fast it is on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli import bench_attention, bench_decode, bench_decoders, bench_prefill, bench_train
from pdllm_rag.cli.bench_report import model_subject, quartiles, report, waiting
from pdllm_rag.cli.bench_values import list_of
from pdllm_rag.cli.console import byte_size, table
from pdllm_rag.cli.opening import adapters, add_model, add_store, open_engine
from pdllm_rag.cli.options import add_counts
from pdllm_rag.cli.prefill import KV_DTYPES
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from rich.table import Table

N_QUESTIONS = 20
QUERY_SECTIONS = ("decode", "long_context", "question", "scoring")
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
    add_store(query, help="folder or URL of the store that is asked", may_read_only=True)
    add_model(query)
    query.add_argument(
        "--questions",
        metavar="FILE",
        help=f"as for `pdllm eval qa`; its first {N_QUESTIONS} answerable ones are asked (default: none)",
    )
    add_counts(
        query,
        ("repeat", 5, "repetitions"),
        ("candidates", 8, "chunks scored"),
        ("steps", 6, "denoising steps of a decode"),
    )
    query.add_argument(
        "--sections",
        type=list_of(_section),
        default=QUERY_SECTIONS,
        metavar="A,B",
        help=f"what is compared, of {', '.join(QUERY_SECTIONS)} (default: all)",
    )
    query.add_argument("--json", action="store_true", help="print one JSON object")
    query.set_defaults(run=run_query)
    bench_prefill.add_parser(benches)
    bench_attention.add_parser(benches)
    bench_decode.add_parser(benches)
    bench_decoders.add_parser(benches)
    bench_train.add_parser(benches)
    _add_store_bench(benches)
    _add_corpus_bench(benches)


def _section(text: str) -> str:
    if text not in QUERY_SECTIONS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {', '.join(QUERY_SECTIONS)}")
    return text


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
    add_counts(
        parser,
        ("chunks", 8, "chunks written and loaded at once"),
        ("chunk-len", 256, "tokens of a chunk"),
        ("metas", 100_000, "chunks of the large store, at least 10"),
        ("repeat", 10, "repetitions"),
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="stored dtype (default: bfloat16)")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="threads of a load (default: the store's own)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_store)


def _add_corpus_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "corpus",
        help="questions as the store grows",
        description="What opening, the first search and an answer take in stores of several sizes. Chunks have made-up "
        "texts and no KV but that of the candidates; everything that is written is removed again.",
    )
    add_model(parser)
    parser.add_argument("--dir", metavar="DIR", help="where the store is made (default: the system's temporary files)")
    sizes = "1000,10000,100000"
    parser.add_argument(
        "--sizes", type=list_of(positive_int), default=sizes, metavar="N,N", help=f"chunks (default: {sizes})"
    )
    add_counts(parser, ("questions", 10, "questions asked"), ("repeat", 3, "times that each is asked"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_corpus)


def run_query(args: argparse.Namespace) -> int:
    """Measure the query side and report."""
    from pdllm_rag.bench.query import QueryShapes, bench_query
    from pdllm_rag.evaluation import read_questions

    rows = read_questions(args.questions) if args.questions else []
    questions = [row.text for row in rows if row.kind == "answerable" and row.context is None][:N_QUESTIONS]
    if rows and not questions:
        raise ValueError(f"{args.questions} holds no answerable question that is asked over a store")
    shapes = QueryShapes(candidates=args.candidates, steps=args.steps)
    with open_engine(args) as engine, waiting(args):
        figures = bench_query(engine, questions, repeat=args.repeat, shapes=shapes, sections=args.sections)
    tables = [_query_table(figures)]
    if figures["asks"]:
        tables.append(_asks_table(figures["asks"]))
    return report(args, figures, tables, model_subject(figures))


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
    with waiting(args):
        figures = bench_store(shapes, folder=args.dir, repeat=args.repeat)
    sections = [figures["write"], figures["warm"], figures["cold"], *figures["codec"].values()]
    return report(args, figures, [*map(_section_table, sections), _growth_table(figures["tables"])], _subject(figures))


def run_corpus(args: argparse.Namespace) -> int:
    """Measure growing stores and report."""
    from pdllm_rag.bench.corpus import bench_corpus
    from pdllm_rag.models import load_model

    model = load_model(args.model, device=args.device, **adapters(args))
    with waiting(args):
        figures = bench_corpus(model, args.sizes, questions=args.questions, repeat=args.repeat, folder=args.dir)
    return report(args, figures, [_corpus_table(figures)], model_subject(figures))


def _subject(figures: dict[str, Any]) -> str:
    shapes = figures["shapes"]
    sizes = f"{shapes['n_layers']} layers of {shapes['n_kv_heads']} x {shapes['head_dim']}"
    return f"{shapes['n_chunks']} chunks of {shapes['chunk_len']} tokens, {sizes}, in {shapes['kv_dtype']}"


def _section_table(section: dict[str, Any]) -> Table:
    target = f", target {section['target']} for the first" if "target" in section else ""
    headers = (f"{section['measures']}{target}", "ms", "quartiles", "GB/s", "of the limit", "quartiles")
    rows = table(*headers, right=headers[1:])
    for name, side in section["sides"].items():
        share = side["of_limit"]
        of_limit = ("the limit", "") if name == section["limit"] else (f"{share['median']:.2f}", quartiles(share, 2))
        speed = f"{side['gb_per_s']['median']:.2f}"
        rows.add_row(side["what"], f"{side['ms']['median']:.1f}", quartiles(side["ms"], 1), speed, *of_limit)
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
        rows.add_row(side["what"], f"{side['ms']['median']:.1f}", quartiles(side["ms"], 1), *memory)
    return rows


def _corpus_table(figures: dict[str, Any]) -> Table:
    phases = [*figures["sizes"][0]["ms"]]
    headers = ("ms in a store of", "making the index", "opening, first search", *(p.replace("_", " ") for p in phases))
    rows = table(*headers, right=headers[1:])
    for size in figures["sizes"]:
        cells = [size["build_ms"], size["open_ms"]["median"], *(size["ms"][phase]["median"] for phase in phases)]
        rows.add_row(f"{size['chunks']:,} chunks", *(f"{cell:,.0f}" for cell in cells))
    return rows


def _query_table(figures: dict[str, Any]) -> Table:
    shapes = figures["shapes"]
    headers = ("comparison", "ms", "quartiles", "ratio", "quartiles")
    rows = table(*headers, right=headers[1:])
    selecting = f"selecting among {shapes['candidates']} chunks, {shapes['steps']} steps"
    for part, label, unit in (
        (figures.get("decode"), "the same chunks", " per step"),
        (figures.get("long_context"), "few chunks, long context", " per step"),
        (figures.get("question"), "whole question", ""),
        (figures.get("scoring"), selecting, ""),
        (figures.get("scoring", {}).get("s_i"), selecting, ""),
    ):
        if part is None:
            continue
        for place in ("dividend", "divisor"):
            side = part[place]
            size = f" over {side['context_tokens']} tokens" if "context_tokens" in side else ""
            ratio = ("", "")
            if place == "divisor":
                ratio = (f"{part['ratio']['median']:.2f}", quartiles(part["ratio"], 2))
            name = f"{label}: {side['name']}{size}{unit}"
            rows.add_row(name, f"{side['ms']['median']:.1f}", quartiles(side["ms"], 1), *ratio)
    return rows


def _asks_table(asks: dict[str, Any]) -> Table:
    title = f"{asks['n_questions']} questions, KV in memory"
    rows = table(title, "median", "quartiles", right=("median", "quartiles"))
    for phase, spread in asks["ms"].items():
        rows.add_row(f"{phase.replace('_', ' ')} ms", f"{spread['median']:.1f}", quartiles(spread, 1))
    rows.add_row("forward passes", f"{asks['nfe']['median']:.0f}", quartiles(asks["nfe"], 0))
    return rows
