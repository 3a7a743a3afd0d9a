"""`pdllm prefill`: documents into a store."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)
from rich.text import Text

from pdllm_rag.cli import prefill_ray
from pdllm_rag.cli.console import (
    COMPUTED_AGAIN,
    FETCHED_AGAIN,
    byte_size,
    counted,
    kib,
    notes,
    on_terminal,
    print_indented,
    results,
    say,
    visible,
    write_json,
)
from pdllm_rag.cli.opening import add_model, add_store, open_engine
from pdllm_rag.cli.values import positive_int, size

if TYPE_CHECKING:
    from pdllm_store import KVDtype, ModelFingerprint

    from pdllm_rag.prefill import PrefillReport
    from pdllm_rag.prefill import Progress as Step

SOME_FAILED = 3  # exit status
KV_DTYPES = ("bfloat16", "int8", "float32")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "prefill",
        help="read documents into a store",
        description="Read files, folders and patterns (txt, md, html, pdf) into a store. What is there "
        "already costs nothing, and a run that was interrupted goes on where it stopped.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="file, folder or pattern ('docs/**/*.md')")
    add_store(parser, help="folder or URL of the store, made if need be")
    add_model(parser)
    parser.add_argument(
        "--chunk-len", type=positive_int, metavar="N", help="tokens of a chunk (default: the model family's)"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="dtype of a new store (default: bfloat16)")
    parser.add_argument(
        "--max-bytes",
        type=size,
        metavar="SIZE",
        help="cap of the store's file from now on, such as 500MB or 2GiB; at the cap, the KV that was not used for the "
        "longest time is dropped (default: the store's, none for a new one)",
    )
    parser.add_argument("--id-prefix", default="", metavar="P", help="put in front of every document id")
    parser.add_argument("--prune", action="store_true", help="delete documents whose file is gone")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="take only part I of N of the documents"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    prefill_ray.add_options(parser)
    parser.set_defaults(
        run=run, usage_error=parser.error, after_interrupt="run the same command again and it goes on where it stopped"
    )


def run(args: argparse.Namespace) -> int:
    """Prefill; 1 if every document failed, `SOME_FAILED` if some did, and the others went in."""
    if wrong := prefill_ray.complaint(args):
        args.usage_error(wrong)
    if (nothing := _nothing_to_read(args)) is not None:
        return _tell(nothing, args)
    live = on_terminal(sys.stderr) and not args.json
    console = notes()
    with ExitStack() as stack:
        with console.status("Starting Ray" if args.ray else f"Loading {args.model}") if live else nullcontext():
            if args.ray:
                store, fingerprint, prefill = stack.enter_context(prefill_ray.on_cluster(args))
            else:
                options = {"kv_dtype": args.kv_dtype, "chunk_len": args.chunk_len, "max_bytes": args.max_bytes}
                engine = stack.enter_context(open_engine(args, create=True, **options))
                store, fingerprint, prefill = engine.store, engine.fingerprint, engine.prefill
        evictions = store.stats().evictions
        if not args.json:
            per_token, dtype = fingerprint.bytes_per_token, fingerprint.kv_dtype
            each = f"{kib(per_token)} a token in {dtype}, {byte_size(1000 * per_token)} per 1,000 tokens"
            console.print(Text(f"{visible(args.store)}: {each}"))
        with _Meter(console, live=live) as meter:
            report = prefill(
                args.paths,
                on_start=meter.begin,
                on_progress=meter.advance,
                id_prefix=args.id_prefix,
                prune=args.prune,
                shard=args.shard,
            )
        n_evicted = store.stats().evictions - evictions
    costs = [_disk(report, fingerprint)] if report.bytes_written else []
    if n_evicted > 0:
        again = FETCHED_AGAIN if args.cache else COMPUTED_AGAIN
        costs.append(f"{counted(n_evicted, 'chunk')} evicted to stay below the cap; {again}")
    costs += prefill_ray.workers_told(report)
    return _tell(report, args, costs)


def _nothing_to_read(args: argparse.Namespace) -> PrefillReport | None:
    """The report if there are neither files nor a store: then no store is made, and no model is loaded."""
    from pdllm_store import is_url

    from pdllm_rag.prefill import Failure, PrefillReport
    from pdllm_rag.sources import find

    if is_url(args.store) or os.path.exists(os.path.join(args.store, "data.mdb")):
        return None
    found = find(args.paths, id_prefix=args.id_prefix)
    failed, skipped = ([Failure(*problem) for problem in some] for some in (found.problems, found.skipped))
    return None if found.files else PrefillReport(failed=failed, skipped=skipped)


def _tell(report: PrefillReport, args: argparse.Namespace, costs: Sequence[str] = ()) -> int:
    """Print the report; the exit status that it means."""
    n_good = report.added + report.updated + report.unchanged
    if not (n_good or report.failed or report.missing or report.pruned or args.shard[1] > 1):
        from pdllm_rag.readers import MEDIA_TYPES

        where = ", ".join(map(visible, args.paths))
        say("warning", f"{where}: no file to read; read are {' '.join(MEDIA_TYPES)} and text without an ending")
    if args.json or not on_terminal(sys.stderr):
        say("done", f"{_documents(report)}; {_speed(report)}")
    if args.json:
        write_json(report.as_dict())
    else:
        _show(report, costs, results())
    for failure in report.failed:
        say("failed", failure.reason if failure.path in failure.reason else f"{failure.path}: {failure.reason}")
    if not report.failed:
        return 0
    return SOME_FAILED if n_good or args.shard[1] > 1 else 1  # other shards have the rest


def _show(report: PrefillReport, costs: Sequence[str], console: Console) -> None:
    console.print(_documents(report))
    chunks = f"{counted(report.chunks_computed, 'chunk')} computed, {report.chunks_reused:,} reused"
    console.print(f"{chunks}; {_speed(report)}")
    for line in costs:
        console.print(line)
    for title, entries in (
        ("Skipped, files of kinds that are not read", [f"{file.path}: {file.reason}" for file in report.skipped]),
        ("Missing, their files are gone (--prune deletes them)", report.missing),
        ("Deleted, their files are gone or fall to another shard", report.pruned),
    ):
        if entries:
            console.print(Text(f"{title}:", style="bold"))
        for entry in entries:
            print_indented(console, entry, indent=2)


def _documents(report: PrefillReport) -> str:
    """How many documents went which way."""
    n_all = report.added + report.updated + report.unchanged + len(report.failed)
    parts = [f"{report.added:,} added", f"{report.updated:,} updated", f"{report.unchanged:,} unchanged"]
    parts += [f"{len(report.failed):,} failed", f"{len(report.missing):,} missing"]
    parts += [f"{len(report.pruned):,} pruned"] if report.pruned else []
    parts += [f"{counted(len(report.skipped), 'file')} skipped"] if report.skipped else []
    return f"{counted(n_all, 'document')}: {', '.join(parts)}"


def _speed(report: PrefillReport) -> str:
    rate = f" ({report.tokens / report.seconds:,.0f} tokens/s)" if report.tokens else ""
    return f"{counted(report.tokens, 'token')} in {report.seconds:.1f} s{rate}"


def _disk(report: PrefillReport, fingerprint: ModelFingerprint) -> str:
    """What was written, for how much text if all of that was new, and what a smaller dtype would take."""
    everything_new = not report.unchanged and not report.chunks_reused
    text = f" for {byte_size(report.text_bytes)} of text" if everything_new else ""
    now = fingerprint.bytes_per_token
    smaller: KVDtype = "bfloat16" if fingerprint.kv_dtype == "float32" else "int8"
    then = replace(fingerprint, kv_dtype=smaller).bytes_per_token
    hint = f" ({smaller}: {kib(then)})" if then < now else ""
    written = f"{byte_size(report.bytes_written)} of KV{text}"
    return f"{written}, {kib(now)} a token in {fingerprint.kv_dtype}{hint}"


class _Meter:
    """The progress line of one prefill.

    The time left goes by the documents that have cost something so far; those at the start that did not, as
    they were there already, are left out.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._bar = Progress(
            TextColumn("Reading"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("documents, {task.fields[n_tokens]:,} tokens, {task.fields[rate]:,.0f}/s,"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
            transient=True,
            disable=not live,
        )
        self._task = self._bar.add_task("", total=None, n_tokens=0, rate=0.0, left="-:--:--")
        self._n_files = self._n_free = self._n_done = 0
        self._started = self._last_done = time.perf_counter()

    def __enter__(self) -> _Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, n_files: int) -> None:
        """The number of files is known."""
        self._n_files = n_files
        self._bar.update(self._task, total=n_files)

    def advance(self, step: Step) -> None:
        """The engine has reported."""
        now = time.perf_counter()
        if not step.tokens:
            self._started, self._n_free = now, step.documents
        if step.documents > self._n_done:
            self._last_done, self._n_done = now, step.documents
        self._bar.update(self._task, completed=step.documents, n_tokens=step.tokens)
        if step.tokens:
            self._bar.update(self._task, rate=step.tokens / (now - self._started))
        if self._n_done > self._n_free:
            each = (self._last_done - self._started) / (self._n_done - self._n_free)
            seconds = each * (self._n_files - self._n_done) - (now - self._last_done)
            self._bar.update(self._task, left=str(timedelta(seconds=max(0, round(seconds)))))


def _shard(text: str) -> tuple[int, int]:
    try:
        part, n_parts = (int(number) for number in text.split("/"))
    except ValueError:
        part, n_parts = 0, 0
    if not 1 <= part <= n_parts:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with 1 <= I <= N, such as 1/4")
    return part, n_parts
