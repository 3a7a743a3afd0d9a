"""`pdllm ask`: one question, answered from a store, with its sources."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pdllm_rag.cli.console import (
    StreamedText,
    notes,
    on_terminal,
    print_indented,
    results,
    visible_name,
    write_json,
)
from pdllm_rag.cli.opening import add_model, add_store, open_engine
from pdllm_rag.cli.options import add_asking, add_counts, add_load, add_min_support, asking_options
from pdllm_rag.cli.values import KeyValues, seed, share, temperature

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer, AnswerStats, Citation
    from pdllm_rag.config import AskOptions


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ask",
        help="answer a question from a store",
        description="Answer a question from the documents of a store and list what the model read.",
    )
    parser.add_argument("question", metavar="QUESTION", help="the question; - reads it from stdin")
    add_store(parser, may_read_only=True)
    add_load(parser)
    add_model(parser)
    parser.add_argument(
        "--filter",
        action=KeyValues,
        default={},
        metavar="KEY=VALUE",
        help="only documents with this metadata, doc_id or source; may be given several times, once a key",
    )
    add_counts(parser, ("max-new-tokens", 32, "longest answer"))
    parser.add_argument(
        "--stop",
        type=_not_empty,
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--no-abstain", action="store_true", help="show answers that the documents do not support")
    add_min_support(shown)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--trace", metavar="FILE", help="write one JSON object a denoising step to this file")
    add_asking(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (default: 0)",
    )
    sampling.add_argument(
        "--top-p",
        type=share,
        default=1.0,
        metavar="P",
        help="draw only among the likeliest tokens that have this probability together (default: 1)",
    )
    sampling.add_argument("--seed", type=seed, default=0, metavar="N", help="of a temperature above 0 (default: 0)")
    parser.set_defaults(run=run)


def options_of(args: argparse.Namespace) -> AskOptions:
    """The engine's options that a command line asks for."""
    return asking_options(
        args,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        filter=args.filter,
        abstain=not args.no_abstain,
        min_support=args.min_support,
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and show the answer as it becomes final, or as JSON."""
    from pdllm_rag.events import CanvasUpdate, Final, TextDelta

    question = sys.stdin.read() if args.question == "-" else args.question
    options = options_of(args)
    console = results()
    text = StreamedText(console)
    with ExitStack() as stack:
        waiting = notes().status(f"Loading {args.model}")
        if on_terminal(sys.stderr) and not args.json:
            stack.enter_context(waiting)
        engine = stack.enter_context(open_engine(args, load=args.load))
        trace = stack.enter_context(open(args.trace, "w", encoding="utf-8")) if args.trace else None
        waiting.update("Looking for sources")
        stack.callback(text.end)  # an error's line does not hang on half an answer
        for event in engine.stream(question, options=options):
            if isinstance(event, CanvasUpdate):
                waiting.update(f"Answering, step {event.step.nfe}")
                if trace:
                    print(json.dumps(event.step._asdict()), file=trace, flush=True)
            elif isinstance(event, TextDelta) and not args.json:
                waiting.stop()  # stdout is the answer's from here on
                text.write(event.text)
            elif isinstance(event, Final):
                waiting.stop()
                answer = event.answer
    if args.json:
        write_json(answer.as_dict())
    else:
        _show(answer, args, console)
    return 0


def _show(answer: Answer, args: argparse.Namespace, console: Console) -> None:
    """What stands under the text: sources, or that there are none, and what the answer cost."""
    console.print()
    if answer.stats.supported:
        console.print(Text("Sources", style="bold"))
        for number, citation in enumerate(answer.citations, start=1):
            _show_citation(number, citation, console)
    else:
        nothing = (
            f"No source: the documents in {args.store} do not hold an answer to this question."
            if answer.stats.chunks.candidates
            else f"No source: {answer.stats.note or f'no document in {args.store} can be read'}, so nothing was read."
        )
        print_indented(console, nothing, indent=0)
    console.print()
    if answer.stats.finish_reason == "length":
        cut = f"The answer was cut at {args.max_new_tokens} tokens; --max-new-tokens allows more."
        print_indented(console, cut, indent=0, style="dim")
    print_indented(console, _cost(answer.stats), indent=0, style="dim")


def _show_citation(number: int, citation: Citation, console: Console) -> None:
    place = [] if citation.page is None else [f"page {citation.page}"]
    if citation.page_end is not None:
        place = [f"pages {citation.page} to {citation.page_end}"]
    score = "not scored" if citation.score is None else f"score {citation.score:.2f}"
    place += [f"chunk {citation.ordinal}", score]
    line = Text.assemble(f"{number:>2}  ", (visible_name(citation.doc_id), "cyan"), (f"  {', '.join(place)}", "dim"))
    console.print(line, soft_wrap=True)
    print_indented(console, citation.quote, indent=4)


def _cost(stats: AnswerStats) -> str:
    phases = ", ".join(f"{name} {ms:.0f}" for name, ms in stats.ms.items() if name != "total")
    chunks = f"{stats.chunks.hit} hit, {stats.chunks.recomputed} recomputed"
    support = "" if stats.support is None else f", support {stats.support:.2f}"
    return f"{stats.ms['total']:.0f} ms ({phases}), nfe {stats.nfe}, chunks {chunks}{support}"


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got an empty text, expected one or more characters")
    return text
