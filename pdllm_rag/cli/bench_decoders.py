"""`pdllm bench decoders`: decoders against each other, by what they answer or by what a step costs."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_prefill import add_model, chosen_model
from pdllm_rag.cli.bench_report import add_output, check_files, model_subject, quartiles, report, save, waiting
from pdllm_rag.cli.bench_values import count, list_of
from pdllm_rag.cli.console import progress, table
from pdllm_rag.cli.opening import add_store, is_store_given, open_engine
from pdllm_rag.cli.options import add_counts
from pdllm_rag.cli.values import not_negative, positive_int, share, typed

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.bench.decoder_quality import Setting


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "decoders",
        help="decoders against each other: their answers, or their speed",
        description="With --questions: every answerable question, over the same chunks, by each decoder: right "
        "answers against those of plain denoising over stored chunks (paired), tokens a forward pass, and time. "
        "Without: what a step of each decoder costs against vanilla's, commits being forced, so that random weights "
        "(--shape) do. The two ratios, of steps and of a step's time, are reported apart.",
    )
    add_model(parser)
    answers = parser.add_argument_group("answers")
    answers.add_argument("--questions", metavar="FILE", help="as for `pdllm eval qa`; needs --store")
    about = "folder or URL of the store that is asked"
    add_store(parser, help=about, required=False, may_read_only=True, shared=False)
    answers.add_argument(
        "--setting",
        type=_setting,
        action="append",
        metavar="'NAME KEY=VALUE ...'",
        help="a decoder with its options (docs/decoders.md) and those of a question, such as 'fast_dllm cache=prefix "
        "threshold=0.8'; may be repeated (default: several of every decoder that runs on the model)",
    )
    add_counts(answers, ("k", 4, "most chunks read"), ("max-new-tokens", 32, "longest answer"))
    answers.add_argument("--limit", type=positive_int, metavar="N", help="ask only the first N questions")
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--cases",
        type=list_of(_case),
        default="1kx16,8kx1",
        metavar="PROMPTxN,...",
        help="tokens of a prompt, and sequences decoded together (default: 1kx16,8kx1)",
    )
    speed.add_argument(
        "--tokens-per-step",
        type=list_of(positive_int),
        default="1,2,4",
        metavar="N,...",
        help="tokens of a sequence that a step commits (default: 1,2,4)",
    )
    speed.add_argument(
        "--salient",
        type=share,
        default=0.25,
        metavar="P",
        help="share of the rows that decoders with salient rows compute anew (default: 0.25)",
    )
    add_counts(
        speed,
        ("question-rows", 64, "tokens of a prompt that are not its context's"),
        ("answer-rows", 256, "tokens of an answer"),
        ("repeat", 2, "rounds"),
    )
    speed.add_argument(
        "--max-s",
        type=not_negative,
        default=1.0,
        metavar="S",
        help="cut a run after so many seconds, but not before two blocks or refreshes of it (default: 1)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the JSON object to a file too, after every part")
    add_output(parser, plots="F1 over speed, or tokens a second over tokens a step")
    parser.set_defaults(run=run_decoders)


def run_decoders(args: argparse.Namespace) -> int:
    """Measure decoders and report."""
    from pdllm_rag.bench.plots import plot_decoders

    check_files(args)
    of_answers = (args.questions, args.setting, args.limit)
    if is_store_given(args) != (args.questions is not None) or (not args.questions and any(of_answers)):
        raise ValueError(
            "answers need both --store and --questions; speed takes neither of them, and no --setting or --limit"
        )
    figures = _answers(args) if args.questions else _speed(args)
    save(args.out, figures)
    if args.plot:
        plot_decoders(figures, args.plot)
    tables = [_quality_table(figures)] if args.questions else [_speed_table(case) for case in figures["speed"]]
    return report(args, figures, tables, model_subject(figures))


def _answers(args: argparse.Namespace) -> dict[str, Any]:
    from pdllm_rag.bench.decoder_quality import bench_quality, default_settings
    from pdllm_rag.config import AskOptions
    from pdllm_rag.evaluation import read_questions

    questions = read_questions(args.questions, limit=args.limit)
    options = AskOptions(k=args.k, max_new_tokens=args.max_new_tokens)
    for setting in args.setting or ():
        setting.options(options)  # refused before a model is loaded
    args.model = chosen_model(args)
    n_asked = sum(bool(question.answers) for question in questions)
    with open_engine(args) as engine, progress(args, "Asking", n_asked) as advance:
        return bench_quality(engine, questions, args.setting or default_settings(engine), options, on_question=advance)


def _speed(args: argparse.Namespace) -> dict[str, Any]:
    from pdllm_rag.bench.decoders import SpeedSizes, bench_decoders

    with waiting(args):
        return bench_decoders(
            chosen_model(args),
            cases=args.cases,
            tokens_per_step=args.tokens_per_step,
            salient=args.salient,
            sizes=SpeedSizes(args.question_rows, args.answer_rows, args.repeat, args.max_s),
            on_part=lambda so_far: save(args.out, so_far),
        )


def _case(text: str) -> tuple[int, int]:
    prompt, times, sequences = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a prompt's tokens x sequences, such as 8kx4")
    return count(prompt), positive_int(sequences)


def _setting(text: str) -> Setting:
    from pdllm_rag.bench.decoder_quality import Setting
    from pdllm_rag.config import AskOptions

    decoder, *pairs = text.split() or [""]
    if not all(key and value for key, _, value in (pair.partition("=") for pair in pairs)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a decoder's name and KEY=VALUE pairs")
    values = {key: typed(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    asked = {field.name for field in fields(AskOptions)} & set(values)
    return Setting(
        decoder,
        {key: value for key, value in values.items() if key in asked},
        {key: value for key, value in values.items() if key not in asked},
    )


def _quality_table(figures: dict[str, Any]) -> Table:
    title = f"{figures['n']} questions"
    headers = (title, "accuracy", "against", "F1", "against", "same", "tokens/pass", "passes x", "step x", "ms")
    rows = table(*headers, right=headers[1:])
    for one in figures["quality"]:
        against = one["against_baseline"]
        rows.add_row(
            one["setting"] + " (baseline)" * (one["setting"] == figures["baseline"]),
            f"{one['accuracy']['value']:.3f}",
            _difference(against["accuracy"]),
            f"{one['f1']['value']:.3f}",
            _difference(against["f1"]),
            f"{one['same_answers']:.0%}",
            f"{one['tokens_per_nfe']:.2f}",
            f"{one['policy_ratio']:.2f}",
            f"{one['step_ratio']:.2f}",
            f"{one['ms']['median']:.0f}",
        )
    return rows


def _difference(found: dict[str, float]) -> str:
    return f"{found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _speed_table(case: dict[str, Any]) -> Table:
    title = f"prompt {case['prompt']} x {case['sequences']}, {case['tokens_per_step']} tokens a step"
    headers = (title, "ms a step", "quartiles", "tokens/s", "step x", "passes x", "faster")
    rows = table(*headers, right=headers[1:])
    for name, side in case["contenders"].items():
        rows.add_row(
            f"{name} ({side['backend']})",
            f"{side['step_ms']['median']:.2f}",
            quartiles(side["step_ms"], 2),
            f"{side['tokens_per_s']['median']:.0f}",
            f"{side['step_ratio']['median']:.2f}",
            f"{side['policy_ratio']:.1f}",
            f"{side['speed_up']:.1f}",
        )
    return rows
