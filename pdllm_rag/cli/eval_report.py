"""What the measures of `pdllm eval` say in one way: settings, values with intervals, where they were measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdllm_rag.config import AskOptions
    from pdllm_rag.models import LoadedModel


def settings(model: LoadedModel, options: AskOptions) -> dict[str, Any]:
    """What was measured: the model, and how it was asked."""
    return {
        "model": model.spec.name,
        "weights": model.weights_digest,
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "k": options.k,
        "candidates": options.candidates,
        "rank_weight": options.rank_weight,
        "score_window": options.window_for(model.spec.family),
        "draft_weight": model.spec.family.draft_weight,
        "decoder": options.decoder,
        "decoder_options": dict(options.decoder_options),
        "policy": options.policy,
        "placement": options.placement,
        "max_new_tokens": options.max_new_tokens,
        "threshold": options.threshold,
        "abstain": options.abstain,
        "min_support": options.min_support,
    }


def estimate(estimate: dict[str, float] | None) -> tuple[str, str]:
    """A value and its interval, for a table."""
    if estimate is None:
        return "-", "-"
    return f"{estimate['value']:.3f}", f"{estimate['low']:.3f} to {estimate['high']:.3f}"


def estimated_difference(estimate: dict[str, float]) -> str:
    """A difference and its interval, with signs, for a table."""
    return f"{estimate['value']:+.3f} ({estimate['low']:+.3f} to {estimate['high']:+.3f})"


def where(figures: dict[str, Any]) -> str:
    """The model of figures and the machine that they were measured on, in a line."""
    machine = figures["machine"]
    return (
        f"{figures['settings']['model']} in {machine['dtype']} on {machine['device']}, {machine['threads']} threads; "
        f"{machine['cpu']}; torch {machine['torch']}, transformers {machine['transformers']}"
    )
