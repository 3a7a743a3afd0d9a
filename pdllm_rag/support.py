"""Whether the documents hold an answer at all.

Two signs, both free: how likely the model finds its own trained no-answer text in the first denoising step, and how far
the best candidate's s_I stands above the candidates' median. Raw likelihoods cannot be compared between questions;
differences within one question can.
"""

from __future__ import annotations

import math

from pdllm_rag.models.families import Support


def support_probability(calibration: Support | None, probe: float | None, margin: float | None) -> float | None:
    """Probability in [0, 1] that the answer is supported, or None if it cannot be told.

    Args:
        probe: mean ln p of the no-answer text in the first step.
        margin: best s_I minus median s_I, None when nothing was scored (its term is then left out).
    """
    if calibration is None or probe is None:
        return None
    logit = calibration.bias + calibration.no_answer * probe
    logit += calibration.margin * (calibration.typical_margin if margin is None else margin)
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))
