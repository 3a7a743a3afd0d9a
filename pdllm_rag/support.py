"""Whether the documents hold an answer at all.

Two signs, both free: how likely the model finds its own trained no-answer text in the first denoising step, and how far
the best candidate's s_I stands above the candidates' median. Raw likelihoods cannot be compared between questions;
differences within one question can.
"""

from __future__ import annotations

import math

from pdllm_rag.models.families import Support

MIN_SUPPORT = 0.5  # the calibration's own boundary: logit 0


def says_nothing(text: str, no_answer: str | None) -> bool:
    """Whether a text is empty, or the family's no-answer text, or the beginning of it (a cut one)."""
    said = text.strip()
    return not said or (no_answer is not None and no_answer.startswith(said))


def is_too_low(support: float | None, min_support: float | None) -> bool:
    """Whether an answer's support is known, held against something, and below it."""
    return support is not None and min_support is not None and support < min_support


def support_probability(calibration: Support | None, probe: float | None, margin: float | None) -> float | None:
    """Probability in [0, 1] that the answer is supported, or None if it cannot be told.

    Args:
        probe: mean ln p of the no-answer text in the first step.
        margin: best s_I minus median s_I; None where too little was scored, `typical_margin` then stands in.
    """
    if calibration is None or probe is None:
        return None
    logit = calibration.bias + calibration.no_answer * probe
    logit += calibration.margin * (calibration.typical_margin if margin is None else margin)
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))
