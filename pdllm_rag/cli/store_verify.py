"""`pdllm store verify`: whether what a store holds is sound, and is what its model computes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import (
    COMPUTED_AGAIN,
    counted,
    notes,
    on_terminal,
    progress_bar,
    results,
    visible,
    write_json,
)
from pdllm_rag.cli.store_action import add_action
from pdllm_rag.cli.values import seed, share

if TYPE_CHECKING:
    from pdllm_store import VerifyReport
    from pdllm_store.table_store import TableStore
    from pdllm_store.verification import Progress

    from pdllm_rag.cli.store_action import Actions
    from pdllm_rag.engine import RagEngine

MODEL, SEED = "demo", 0  # of --recompute


def add_actions(actions: Actions) -> None:
    """Add `verify`."""
    parser = add_action(
        actions,
        "verify",
        _verify,
        help="check every record, row and reference; exit status 1 if anything is wrong",
        about="Evicted chunks are not wrong. Checksums do not tell whether the KV is what the model computes: "
        "--recompute does, for a sample",
        keys="ok; chunks and documents, as checked; damaged, missing and differing, lists of chunk ids; problems, a "
        "list of sentences; evicted and compared, in chunks; repaired, the number of chunks that --repair dropped",
        check=_complaint,
        may_read_only=True,
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop chunks that are damaged or differ; the next question or prefill that needs them computes them again",
    )
    parser.add_argument(
        "--recompute",
        type=share,
        metavar="SHARE",
        help="load a model, compute this share of its sound chunks again (above 0, up to 1) and compare",
    )
    parser.add_argument("--model", help=f"of --recompute: bundled model or checkpoint folder (default: {MODEL})")
    parser.add_argument("--seed", type=seed, metavar="N", help=f"of --recompute's sample (default: {SEED})")


def _complaint(args: argparse.Namespace) -> str:
    typed = [n for n in ("model", "seed") if getattr(args, n) is not None and n not in args.configured]
    if args.recompute is None and typed:
        return "--model and --seed say what --recompute computes again, and --recompute is missing"
    if args.repair and args.read_only:
        return "--repair changes the store, and --read-only refuses that; expected one of them"
    return ""


def _verify(store: TableStore, args: argparse.Namespace) -> int:
    live = on_terminal(sys.stderr) and not args.json
    with ExitStack() as stack:
        if args.recompute is not None:
            stack.enter_context(_engine(store, args.model or MODEL, live=live))
        report = store.verify(
            stack.enter_context(_progress(args, live=live)),
            recompute_share=args.recompute or 0.0,
            seed=SEED if args.seed is None else args.seed,
        )
    n_repaired = 0
    if args.repair:
        store.discard([*report.damaged, *report.differing])
        n_repaired = len(report.damaged) + len(report.differing)
    if args.json:
        write_json(_as_dict(report, n_repaired))
    else:
        _show(report, args)
    return 0 if report.ok else 1


@contextmanager
def _progress(args: argparse.Namespace, *, live: bool) -> Iterator[Progress]:
    """Shows the chunks checked so far, and what follows when all are."""
    then = "Checking documents" if args.recompute is None else "Computing a sample again"
    with progress_bar(live=live) as bar:
        task = bar.add_task("Checking chunks", total=None)

        def tell(n_done: int, n_chunks: int) -> None:
            description = "Checking chunks" if n_done < n_chunks else then
            bar.update(task, completed=n_done, total=n_chunks, description=description)

        yield tell


def _engine(store: TableStore, model: str, *, live: bool) -> RagEngine:
    """The model that is to compute chunks again, once its engine is there.

    Raises:
        ModelError; StoreMismatchError: the store holds other models' chunks only.
    """
    from pdllm_store import StoreMismatchError

    from pdllm_rag.engine import RagEngine

    with ExitStack() as stack:
        if live:
            stack.enter_context(notes().status(f"Loading {model}"))
        engine = RagEngine.open(store, model)
    held = store.fingerprints()
    if held and engine.fingerprint not in held:
        engine.close()
        raise StoreMismatchError(
            f"{store.path} holds nothing of the model {model}, so nothing of it can be computed again; "
            "give --model the one that it was prefilled with"
        )
    return engine


def _as_dict(report: VerifyReport, n_repaired: int) -> dict[str, Any]:
    """The stable JSON form, as `pdllm store verify --help` has it."""
    return {
        "ok": report.ok,
        "chunks": report.checked_chunks,
        "documents": report.checked_documents,
        "damaged": [chunk_id.hex() for chunk_id in report.damaged],
        "missing": [chunk_id.hex() for chunk_id in report.missing],
        "problems": report.problems,
        "evicted": report.n_evicted,
        "compared": report.n_compared,
        "differing": [chunk_id.hex() for chunk_id in report.differing],
        "repaired": n_repaired,
    }


def _show(report: VerifyReport, args: argparse.Namespace) -> None:
    console = results()
    found = [
        f"{counted(len(things), noun)} {what}"
        for things, noun, what in (
            (report.damaged, "chunk", "damaged"),
            (report.missing, "chunk", "without KV"),
            (report.differing, "chunk", "not what the model computes"),
            (report.problems, "thing", "wrong besides"),
        )
        if things
    ]
    checked = f"{counted(report.checked_chunks, 'chunk')} and {counted(report.checked_documents, 'document')} checked"
    console.print(f"{checked}: {', '.join(found) or 'all sound'}")
    if report.n_evicted:
        console.print(f"{counted(report.n_evicted, 'chunk')} evicted, {COMPUTED_AGAIN}")
    if args.recompute is not None:
        same = f", {report.n_compared - len(report.differing):,} of them as stored" if report.n_compared else ""
        console.print(f"{counted(report.n_compared, 'chunk')} computed again with {visible(args.model or MODEL)}{same}")
    for problem in report.problems:
        console.print(visible(problem))
    if report.damaged or report.differing:
        which = " and ".join(["damaged"] * bool(report.damaged) + ["differing"] * bool(report.differing))
        then = f"were dropped, and are {COMPUTED_AGAIN}" if args.repair else "stay; --repair drops them"
        console.print(f"The {which} chunks {then}.")
