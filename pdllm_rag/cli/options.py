"""Arguments that several commands share: how a question is asked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdllm_rag.cli.values import TypedKeyValues, not_negative, positive_int, probability, weight

if TYPE_CHECKING:
    from pdllm_rag.config import AskOptions

# Spelled out, so that `--help` needs no model code; a test keeps them equal to the engine's.
DECODERS = ("static_kv", "vanilla", "fast_dllm", "dyllm", "d2f", "block_causal")
FIRST_STAGES = ("bm25", "sketch", "fusion")
LOADS = ("store", "auto")
POLICIES = ("independent", "joint", "joint_query")
PLACEMENTS = ("sequential", "gap", "reuse")


def add_asking(parser: argparse.ArgumentParser) -> None:
    """Add what decides which chunks are read and how the answer is denoised."""
    add_counts(parser, ("k", 4, "most chunks read"))
    tuning = parser.add_argument_group("reading and decoding")
    add_counts(tuning, ("candidates", 8, "chunks scored"))
    tuning.add_argument(
        "--first-stage", choices=FIRST_STAGES, default="bm25", help="what proposes the chunks scored (default: bm25)"
    )
    tuning.add_argument(
        "--rank-weight",
        type=weight,
        default=0.0,
        metavar="W",
        help="take W * ln(rank in the first stage) off each score (default: 0)",
    )
    tuning.add_argument(
        "--score-window",
        type=not_negative,
        metavar="NATS",
        help="leave out chunks that score this far below the best; inf reads all k (default: the model family's)",
    )
    tuning.add_argument("--decoder", choices=DECODERS, default="static_kv", help="(default: static_kv)")
    tuning.add_argument(
        "--decoder-option",
        action=TypedKeyValues,
        default={},
        metavar="KEY=VALUE",
        help="an option of that decoder (docs/decoders.md); may be given several times, once a key",
    )
    tuning.add_argument("--policy", choices=POLICIES, default="independent", help="(default: independent)")
    tuning.add_argument(
        "--chunk-rows",
        type=positive_int,
        metavar="N",
        help="read only the rows of each chunk that the question attends to most (experimental; default: all)",
    )
    tuning.add_argument("--placement", choices=PLACEMENTS, default="sequential", help="(default: sequential)")
    tuning.add_argument(
        "--threshold",
        type=probability,
        default=0.9,
        metavar="P",
        help="commit tokens surer than this (default: 0.9)",
    )
    tuning.add_argument("--steps", type=positive_int, metavar="N", help="most denoising steps a block (default: any)")


def add_counts(parser: argparse._ActionsContainer, *counts: tuple[str, int, str]) -> None:
    """Add options that are counts: of each its name, its default and what is counted."""
    for name, value, what in counts:
        shown = f"{what} (default: {value})"
        parser.add_argument(f"--{name}", type=positive_int, default=value, metavar="N", help=shown)


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add where KV comes from that is not in memory."""
    parser.add_argument(
        "--load",
        choices=LOADS,
        default="store",
        help="read chunk KV from the store, or compute it again where that is faster (default: store)",
    )


def add_min_support(parser: argparse._ActionsContainer) -> None:
    """Add what decides whether an answer is shown."""
    parser.add_argument(
        "--min-support",
        type=probability,
        metavar="P",
        help="withhold an answer whose support, a probability, is below this: 0 withholds none (default: 0.5, where "
        "the model family is calibrated)",
    )


def asking_options(args: argparse.Namespace, **others: object) -> AskOptions:
    """The engine's options that `add_asking`'s arguments ask for, and others."""
    from pdllm_rag.config import AskOptions

    return AskOptions().with_changes(
        {
            "k": args.k,
            "candidates": args.candidates,
            "first_stage": args.first_stage,
            "rank_weight": args.rank_weight,
            "score_window": args.score_window,
            "decoder": args.decoder,
            "decoder_options": args.decoder_option,
            "policy": args.policy,
            "chunk_rows": args.chunk_rows,
            "placement": args.placement,
            "threshold": args.threshold,
            "steps": args.steps,
            **others,
        }
    )
