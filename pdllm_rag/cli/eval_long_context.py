"""`pdllm eval longbench` and `pdllm eval infinitebench`: benchmarks of long contexts from local files."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_values import list_of
from pdllm_rag.cli.console import progress, report, table
from pdllm_rag.cli.eval_report import estimate, settings, where
from pdllm_rag.cli.opening import add_model, add_store, is_store_given, open_engine
from pdllm_rag.cli.options import add_asking, asking_options
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.config import AskOptions
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation.long_context import Benchmark, Sample

BENCHMARKS = {"longbench": "LongBench", "infinitebench": "InfiniteBench"}


def add_parser(measures: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both measures."""
    for command, name in BENCHMARKS.items():
        parser = measures.add_parser(
            command,
            help=f"score {name}'s tasks from a local copy of its data",
            description=f"Ask every sample of {name} over its own context: it is prefilled in chunks, the chunks are "
            "chosen by the sample's question, and the answer is scored by the task's own metric.",
        )
        parser.add_argument("--data", required=True, metavar="DIR", help="folder with a file TASK.jsonl for each task")
        parser.add_argument(
            "--tasks", type=list_of(str), metavar="A,B,...", help="(default: those that the folder has a file of)"
        )
        parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N samples of each task")
        parser.add_argument(
            "--max-new-tokens", type=positive_int, metavar="N", help="most answer tokens (default: each task's own)"
        )
        add_model(parser)
        add_store(parser, help="keep the contexts' KV there (default: none is kept)", required=False, shared=False)
        parser.add_argument(
            "--chunk-len", type=positive_int, metavar="N", help="tokens of a chunk with its BOS (default: the family's)"
        )
        add_asking(parser)
        parser.add_argument(
            "--out", metavar="FILE", help="write each result there, a JSON object a line; results in it are kept"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask and report."""
    from pdllm_rag.bench.machine import describe
    from pdllm_rag.evaluation.kept import KeptRows
    from pdllm_rag.evaluation.long_context import count_samples, read_samples, task_files
    from pdllm_rag.evaluation.long_context_asking import Result, ask_samples, summary

    benchmark = _benchmark(args.measure)
    files = task_files(benchmark, args.data, args.tasks)
    options = asking_options(args, abstain=False)
    n_samples = count_samples(files, limit=args.limit)
    keep = is_store_given(args)
    with ExitStack() as stack:
        if not keep:
            args.store = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdllm-benchmark-"))
        engine = stack.enter_context(open_engine(args, create=True, chunk_len=args.chunk_len))
        asked = {"benchmark": benchmark.name, **_settings(engine, options, args)}
        kept = KeptRows(args.out, asked, names=("task", "id"))
        found = []
        advance = stack.enter_context(progress(args, "Asking", n_samples))

        def left() -> Iterator[Sample]:
            for sample in read_samples(benchmark, files, limit=args.limit):
                if (sample.task, sample.id) in kept:
                    found.append(Result(**kept[sample.task, sample.id]))
                    advance()
                else:
                    yield sample

        most = args.max_new_tokens
        for result in ask_samples(engine, benchmark, left(), options, max_new_tokens=most, keep=keep):
            found.append(result)
            advance()
            kept.add(result._asdict())
        figures = {
            **summary(found),
            "left_out": [name for name in benchmark.tasks if name not in files],
            "limit": args.limit,
            "settings": asked,
            "machine": describe(engine.model)._asdict(),
        }
    return report(args, figures, [_table(figures, benchmark)], f"Scores are 0 to 100. {where(figures)}")


def _benchmark(command: str) -> Benchmark:
    if command == "longbench":
        from pdllm_rag.evaluation.longbench import LONGBENCH

        return LONGBENCH
    from pdllm_rag.evaluation.infinitebench import INFINITEBENCH

    return INFINITEBENCH


def _settings(engine: RagEngine, options: AskOptions, args: argparse.Namespace) -> dict[str, Any]:
    return {
        **settings(engine.model, options),
        "max_new_tokens": args.max_new_tokens,
        "chunk_len": args.chunk_len or engine.model.spec.family.chunk_len,
        "kv_dtype": engine.fingerprint.kv_dtype,
        "first_stage": options.first_stage,
        "chunk_rows": options.chunk_rows,
        "steps": options.steps,
    }


def _table(figures: dict[str, Any], benchmark: Benchmark) -> Table:
    headers = ("task", "n", "score", "95 % interval", "empty", "tokens", "read", "prefill ms", "ms")
    filled = table(*headers, right=tuple(header for header in headers if header not in ("task", "95 % interval")))
    for name, row in figures["tasks"].items():
        numbers = (row["empty"], *(round(row[k]) for k in ("document_tokens", "context_tokens", "prefill_ms", "ms")))
        filled.add_row(name, str(row["n"]), *estimate(row["score"]), *map(str, numbers))
    filled.add_row(f"average of {len(figures['tasks'])} of {len(benchmark.tasks)}", "", f"{figures['average']:.2f}")
    return filled
