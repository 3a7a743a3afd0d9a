"""`pdllm train`: a diffusion model over chunks out of an autoregressive one, and adapters for one that is there."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli import train_card
from pdllm_rag.cli.bench_values import count, list_of
from pdllm_rag.cli.console import on_terminal, progress_bar, results, say, write_json
from pdllm_rag.cli.values import not_negative, positive_int, probability, seed, share

if TYPE_CHECKING:
    from pdllm_rag.training.card import Origin
    from pdllm_rag.training.runs import Run
    from pdllm_rag.training.texts import Corpus, Mixture

# Spelled out, so that `--help` needs no torch; a test keeps them equal to what they stand for.
ROUNDINGS = ("none", "4bit", "8bit")
RATES = {"adapt": 4e-4, "chunk-lora": 2e-4, "d2f": 1e-5}
ABOUT = {
    "adapt": "train all weights of a checkpoint to answer from chunks that see only themselves",
    "chunk-lora": "the same by an adapter on every row, for checkpoints too large to train whole",
    "d2f": "train an adapter for decoder d2f, which acts on question and answer only",
}
DETAILS = {
    "adapt": "An autoregressive checkpoint becomes a masked-diffusion model that reads chunks which were encoded on "
    "their own: --keep-layers and --vocabulary make it smaller first. A diffusion checkpoint is trained further.",
    "chunk-lora": "The result is given as --adapter. KV that was stored without it is not read with it.",
    "d2f": "Distils the model into itself with block-causal sight, as in D2F (arXiv 2508.09192); chunks are encoded "
    "without the adapter, so stored KV stays valid. The result is given as --canvas-adapter.",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and what can be trained."""
    parser = commands.add_parser(
        "train", help="train a demo-sized model, or adapters", description="Train; see docs/training.md."
    )
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True)
    for kind, about in ABOUT.items():
        _add_common(kinds.add_parser(kind, help=about, description=f"{about.capitalize()}. {DETAILS[kind]}"), kind)
    about = "round the mean of checkpoints to 4 bits, calibrated on data (GPTQ)"
    rounding = kinds.add_parser("round", help=about, description=f"{about[0].upper()}{about[1:]}; on the CPU. "
                                "Embedding and head are rounded to the nearest level.")  # fmt: skip
    rounding.add_argument("--model", required=True, nargs="+", metavar="M", help="one or several of the same shape")
    _add_data(rounding)
    rounding.add_argument("--out", required=True, metavar="DIR", help="of the rounded checkpoint")
    rounding.add_argument("--batches", type=positive_int, default=12, metavar="N",
                          help="rows of data that it is calibrated with (default: 12)")  # fmt: skip
    _add_row(rounding, context_len=1024, canvas_len=512)
    rounding.add_argument("--seed", type=seed, default=0, metavar="N", help="of samples and masks (default: 0)")
    rounding.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    rounding.set_defaults(run=run_round)
    train_card.add_parser(kinds)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH",
        help="questions (.jsonl) and prose (.txt), also .gz; folders",
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="PATH", help="texts never to be trained on, nor what resembles them"
    )
    parser.add_argument("--sources", metavar="FILE.json",
                        help="sources of the data, for the model card: [{name, licence, url}, ...]")  # fmt: skip


def _add_row(parser: argparse.ArgumentParser, *, context_len: int, canvas_len: int) -> None:
    parser.add_argument("--context-len", type=positive_int, default=context_len, metavar="N",
                        help="positions of a row for the chunks of its samples (default: %(default)s)")  # fmt: skip
    parser.add_argument("--canvas-len", type=positive_int, default=canvas_len, metavar="N",
                        help="positions of a row for their questions and answers (default: %(default)s)")  # fmt: skip


def _add_common(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument(
        "--model", required=True, metavar="M", help="where to begin: demo, a checkpoint's folder, an id"
    )
    _add_data(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="of the run; the result is in DIR/result")
    parser.add_argument("--steps", required=True, type=positive_int, metavar="N", help="batches; a run is resumed")
    parser.add_argument("--rows", type=positive_int, default=16, metavar="N", help="rows of a batch (default: 16)")
    parser.add_argument("--lr", type=not_negative, default=RATES[kind], help=f"peak rate (default: {RATES[kind]:g})")
    parser.add_argument("--warmup", type=positive_int, default=150, metavar="N", help="steps (default: 150)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of samples and masks (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that make batches (default: 0)")
    parser.add_argument("--recipe", choices=("short", "long", "both"), default="long" if kind == "d2f" else "short",
                        help="mostly short answers, or sentences, or both (default: %(default)s)")  # fmt: skip
    _add_row(parser, context_len=2048, canvas_len=1152)
    parser.add_argument(
        "--answer-lens", type=list_of(count), metavar="A,B,...", help="rows of an answer, one of them is drawn"
    )
    parser.add_argument(
        "--views", type=list_of(float), metavar="A,B,C",
        help="shares of samples whose chunks see only themselves, each other, or also the question",
    )  # fmt: skip
    parser.add_argument("--save-every", type=positive_int, default=1000, metavar="N", help="steps (default: 1000)")
    parser.add_argument("--validate-every", type=positive_int, default=500, metavar="N", help="steps (default: 500)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves there (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    if kind == "adapt":
        parser.add_argument("--rounding", choices=ROUNDINGS, default="none", help="train under it, and store it so")
        parser.add_argument("--keep-layers", type=_ranges, metavar="A-B,C", help="layers to begin with (default: all)")
        parser.add_argument("--vocabulary", type=positive_int, metavar="N", help="first entries to keep (default: all)")
        parser.add_argument("--mask-in-place-of", metavar="TOKEN", help="the token that becomes the mask of an "
                            "autoregressive checkpoint")  # fmt: skip
        parser.add_argument("--bos", metavar="TOKEN", help="the token that its chunks begin with (default: its own)")
    else:
        parser.add_argument("--rounding", choices=("none", "8bit"), default="none", help="likewise")
        parser.add_argument("--rank", type=positive_int, default=32, metavar="N", help="of the adapter (default: 32)")
        parser.add_argument("--alpha", type=positive_int, default=32, metavar="N", help="its scale (default: 32)")
        parser.add_argument("--dropout", type=probability, default=0.1, metavar="P", help="(default: 0.1)")
    if kind == "d2f":
        parser.add_argument("--block-len", type=positive_int, default=16, metavar="N", help="rows (default: 16)")
        parser.add_argument("--noise", type=list_of(share), default=[0.2, 0.7], metavar="A,B",
                            help="the first block's share of masks, later ones up to B (default: 0.2,0.7)")  # fmt: skip
        parser.add_argument("--fill", type=not_negative, default=1.0, metavar="W",
                            help="weight of an end token behind an answer's first (default: 1)")  # fmt: skip
        parser.add_argument("--hard-labels", type=probability, default=0.0, metavar="P",
                            help="share of the loss that is of the masked tokens themselves (default: 0)")  # fmt: skip
        parser.add_argument("--stored-alpha", type=positive_int, metavar="N",
                            help="the result's scale, if it is to act less than it was trained to")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and say where the result is."""
    from pdllm_rag.bench.plots import check_plot
    from pdllm_rag.training import runs
    from pdllm_rag.training.adapters import LoraShape
    from pdllm_rag.training.card import write_card
    from pdllm_rag.training.noise import MonotoneNoise

    check_plot(args.plot)
    origin = train_card.origin(args)
    settings = _settings(args, origin)
    with progress_bar(live=on_terminal(sys.stderr) and not args.json) as bar:
        task = bar.add_task("Training", total=args.steps)

        def report(line: dict[str, Any]) -> None:
            bar.update(task, completed=line["step"])
            if not args.json:
                say("note", " ".join(f"{key} {value:.4g}" for key, value in line.items()))

        if args.kind == "adapt":
            folder = runs.adapt(settings, report)
        else:
            lora = LoraShape(args.rank, args.alpha, args.dropout)
            if args.kind == "chunk-lora":
                folder = runs.train_chunk_lora(settings, lora, report)
            else:
                noise = MonotoneNoise(args.block_len, (args.noise[0], args.noise[1]), args.fill)
                ours = {"hard_labels": args.hard_labels, "stored_alpha": args.stored_alpha}
                folder = runs.train_d2f(settings, lora, report, noise, **ours)
    recipe = train_card.recipe(settings.folder, **_texts(settings.training, settings.validation))
    write_card(folder, origin, recipe, settings.folder / "log.jsonl")
    if args.plot is not None:
        from pdllm_rag.evaluation.plots import plot_curves

        plot_curves(settings.folder / "log.jsonl", args.plot)
    if args.json:
        write_json({"result": str(folder), "log": str(settings.folder / "log.jsonl"), "steps": args.steps})
    else:
        results().print(f"trained: {folder}", soft_wrap=True)
    return 0


def run_round(args: argparse.Namespace) -> int:
    """Round and say where the result is."""
    from pdllm_rag.training import runs
    from pdllm_rag.training.card import write_card
    from pdllm_rag.training.items import Shape

    origin = train_card.origin(args)
    training, held = _mixtures(args, args.model[0], "short")
    shape = Shape(context_len=args.context_len, canvas_len=args.canvas_len)
    with progress_bar(live=on_terminal(sys.stderr) and not args.json) as bar:
        task = bar.add_task("Rounding", total=None)

        def report(layer: int) -> None:
            bar.update(task, completed=layer + 1)

        folder = runs.round_mean(
            args.model, training, Path(args.out), report, shape=shape, n_batches=args.batches, seed=args.seed
        )
    recipe = {"rounding": "4bit", "rows": args.batches, "positions": args.batches * shape.row_len, "seed": args.seed}
    write_card(folder, origin, recipe | _texts(training, held))
    if args.json:
        write_json({"result": str(folder), "models": args.model})
    else:
        results().print(f"rounded: {folder}", soft_wrap=True)
    return 0


def _texts(training: Mixture, held: Mixture | None) -> dict[str, int]:
    """How many texts were trained on, held out and left out."""
    n_held = held.corpus.n_texts if held else 0
    corpus = training.corpus
    return {"texts trained on": corpus.n_texts, "texts held out": n_held, "texts excluded": corpus.n_excluded}


def _mixtures(args: argparse.Namespace, model: str, form: str) -> tuple[Mixture, Mixture | None]:
    """Of the data: what is trained on, and what is held out (None where it holds nothing)."""
    from pdllm_rag.models.loader import read_spec
    from pdllm_rag.training.texts import Corpus, Mixture, Recipe

    no_answer = read_spec(model)[0].family.no_answer
    recipe = {"short": Recipe, "long": Recipe.long, "both": Recipe.both}[form]()
    recipe = recipe if no_answer is None else replace(recipe, not_found=no_answer)
    training, held = Corpus.read(args.data, exclude=args.exclude).split()
    if training.n_excluded:
        say("note", f"{training.n_excluded} texts are known to --exclude and left out")
    return Mixture(training, recipe), Mixture(held, recipe) if _holds(held) else None


def _settings(args: argparse.Namespace, origin: Origin) -> Run:
    from pdllm_rag.training.items import Shape
    from pdllm_rag.training.loop import Plan
    from pdllm_rag.training.runs import Run

    start = _start(args, Path(args.out), origin)
    training, validation = _mixtures(args, start, args.recipe)
    plan = Plan(
        steps=args.steps, lr=args.lr, warmup=args.warmup, seed=args.seed, workers=args.workers,
        save_every=args.save_every, validate_every=args.validate_every,
    )  # fmt: skip
    chosen = {"context_len": args.context_len, "canvas_len": args.canvas_len}
    chosen |= {"answer_lens": tuple(args.answer_lens)} if args.answer_lens else {}
    chosen |= {"views": tuple(args.views)} if args.views else {}
    return Run(
        model=start,
        training=training,
        validation=validation,
        folder=Path(args.out),
        plan=plan,
        shape=Shape(**chosen),
        n_rows=args.rows,
        rounding=args.rounding,
        device=args.device,
    )


def _start(args: argparse.Namespace, folder: Path, origin: Origin) -> str:
    """The checkpoint to begin with; one that is to be pruned, or given a mask, is written into the run's folder."""
    if args.kind != "adapt" or not (args.keep_layers or args.vocabulary or args.bos or args.mask_in_place_of):
        return str(args.model)
    from pdllm_rag.models.hub import locate
    from pdllm_rag.training.card import write_card
    from pdllm_rag.training.pruning import prune

    if args.mask_in_place_of is None:
        raise ValueError("--keep-layers, --vocabulary and --bos begin with an autoregressive checkpoint; name a token "
                         "for its mask with --mask-in-place-of")  # fmt: skip
    start = folder / "start"
    prune(locate(args.model), start, mask_in_place_of=args.mask_in_place_of, layers=args.keep_layers,
          vocabulary=args.vocabulary, bos=args.bos)  # fmt: skip
    cut = {"layers": args.keep_layers, "vocabulary": args.vocabulary, "mask": args.mask_in_place_of, "bos": args.bos}
    write_card(start, replace(origin, kind="prune", data=(), sources=()), cut)
    return str(start)


def _holds(corpus: Corpus) -> bool:
    """Whether there is anything in it."""
    return any(getattr(corpus, field.name) for field in fields(corpus) if field.name != "n_excluded")


def _ranges(text: str) -> list[int]:
    """Numbers and ranges of them, such as 0-3,5,8."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers and ranges such as 0-3,5,8")
        found += range(int(first), int(last if dash else first) + 1)
    return found
