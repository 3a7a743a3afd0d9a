"""`pdllm plan`: what a corpus would cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import byte_size, counted, fact_table, print_table, results, table, write_json
from pdllm_rag.cli.prefill import KV_DTYPES
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from pdllm_rag.planning import Plan

MODELS = ("demo", "dream", "llada")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="what a corpus would cost in bytes, hours and time per question",
        description="Bytes, hours of prefill and time per question of a corpus, from unit costs that were measured "
        "(docs/numbers) and formulas that are printed with them. No model is loaded.",
    )
    parser.add_argument("--documents", type=positive_int, required=True, metavar="N")
    parser.add_argument("--tokens-per-document", type=positive_int, required=True, metavar="T")
    parser.add_argument(
        "--model", choices=MODELS, required=True, help="the bundled model, or Dream-7B's or LLaDA-8B's shape"
    )
    parser.add_argument(
        "--gpus", type=positive_int, metavar="G", help="accelerators to prefill with (default: a table)"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--keep", type=positive_int, metavar="B", help="if only so many rows of a chunk were kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan."""
    from pdllm_rag.planning import make_plan

    plan = make_plan(
        args.documents,
        args.tokens_per_document,
        args.model,
        kv_dtype=args.kv_dtype,
        keep=args.keep,
        accelerators=args.gpus,
    )
    if args.json:
        write_json(plan.as_dict())
    else:
        _show(plan)
    return 0


def _show(plan: Plan) -> None:
    from pdllm_rag.planning import FORMULAS

    console = results()
    kept = "all rows" if plan.keep is None else f"at most {plan.keep:,} rows of a chunk"
    per_token, stores = f"{plan.bytes_per_token:,} bytes a token", counted(plan.stores, "store")
    seconds = f"{plan.accelerator_seconds_per_million_documents:,.0f} s of {plan.device}"
    facts = [
        ("corpus", f"{plan.documents:,} documents of {plan.tokens_per_document:,} tokens: {plan.chunks:,} chunks"),
        ("kept", f"{kept}, {plan.kv_dtype}, {per_token}: {byte_size(plan.bytes)} in {stores} of at most 1 TiB"),
        ("a million documents", f"{byte_size(plan.bytes_per_million_documents)}, {seconds}"),
    ]
    print_table(console, fact_table(facts))
    headers = ("prefill with", "hours of computing", "into one store", "a store each")
    prefill = table(*headers, right=headers)
    for row in plan.prefill:
        prefill.add_row(f"{row.accelerators:,}", *(f"{hours:,.2f}" for hours in row[1:]))
    tiers = table("store in", "hosts", "ms to load the candidates", "", right=("hosts", "ms to load the candidates"))
    for tier in plan.tiers:
        hosts = "-" if tier.hosts is None else f"{tier.hosts:,}"
        tiers.add_row(tier.name, hosts, f"{tier.load_ms:,.1f}", "" if tier.measured else "assumed, not measured")
    columns = ("chunks", "index shards", "first stage ms", "draft", "score", "load", "decode", "total")
    queries = table(*columns, right=columns)
    for query in plan.queries:
        queries.add_row(f"{query.chunks:,}", f"{query.shards:,}", *(f"{ms:,.1f}" for ms in query[2:]))
    for part in (prefill, tiers, queries):
        console.print()
        print_table(console, part)
    console.print()
    for line in (*FORMULAS, *(f"{name}: {source}" for name, source in plan.sources.items())):
        console.print(line)
