"""What each part of the score is worth: variants of `ScoringOptions` over the same candidates of the first stage.

Parts that several variants share are computed once; a variant's milliseconds are those of all its parts, as if it had
been alone, without reading the candidates' KV.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pdllm_rag.clock import Clock
from pdllm_rag.combinations import UnionMean
from pdllm_rag.engine import RagEngine
from pdllm_rag.estimators import CausalShift, LeaveOneOut, MaskedGroups
from pdllm_rag.evaluation.qa import Question
from pdllm_rag.evaluation.retrieval import Ranking
from pdllm_rag.evidence import Evidence
from pdllm_rag.first_stage import FirstStage
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.scoring import ScoringOptions

REFERENCE = "as shipped"
AT_ONCE = 4  # readings of one pass


def _always(**options: Any) -> ScoringOptions:
    """A sum whose s_P is never left out."""
    return ScoringOptions(clear_lead=math.inf, **options)


VARIANTS: Mapping[str, ScoringOptions] = {
    REFERENCE: ScoringOptions(),
    "s_I, 1 group": ScoringOptions(estimator=MaskedGroups(1), draft_weight=0.0),
    "s_I, 2 groups": ScoringOptions(draft_weight=0.0),
    "s_I, 4 groups": ScoringOptions(estimator=MaskedGroups(4), draft_weight=0.0),
    "s_I, leave one out": ScoringOptions(estimator=LeaveOneOut(), draft_weight=0.0),
    "s_I, causal shift": ScoringOptions(estimator=CausalShift(), draft_weight=0.0),
    "s_I, 2 groups, last 8 tokens": ScoringOptions(window=8, draft_weight=0.0),
    "-s_I (sign turned)": ScoringOptions(question_weight=-1.0, draft_weight=0.0),
    "s_P, first stage's draft": _always(question_weight=0.0, draft_weight=1.0),
    "s_P, draft without a chunk": _always(question_weight=0.0, draft_weight=1.0, draft_context="none"),
    "s_P, draft of each chunk": _always(question_weight=0.0, draft_weight=1.0, draft_context="per_chunk"),
    "s_P, first stage's draft, 4 rounds": _always(question_weight=0.0, draft_weight=1.0, draft_rounds=4),
    "s_P, first stage's draft, 4 slots": _always(question_weight=0.0, draft_weight=1.0, draft_len=4),
    "s_I + 0.1 s_P, always": _always(draft_weight=0.1),
    "s_I + 0.5 s_P, always": _always(draft_weight=0.5),
    "s_I + 1.0 s_P, always": _always(draft_weight=1.0),
    "s_I + 0.1 s_P, draft without a chunk": _always(draft_weight=0.1, draft_context="none"),
    "s_I + 0.1 s_P, draft of each chunk": _always(draft_weight=0.1, draft_context="per_chunk"),
    "-s_I + s_P (the formula as printed)": _always(question_weight=-1.0, draft_weight=1.0),
    "union, 2 groups": ScoringOptions(combination=UnionMean()),
    "union, causal shift, 4 slots without a chunk (the authors' code)": ScoringOptions(
        combination=UnionMean(), estimator=CausalShift(), draft_len=4, draft_rounds=2, draft_context="none"
    ),
}


def chosen(names: Collection[str]) -> dict[str, ScoringOptions]:
    """The variants of these names beside the shipped one; all of them for no names.

    Raises:
        ValueError: there is no variant of a name.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"there is no variant {unknown[0]!r}; expected one of: {'; '.join(VARIANTS)}")
    return {name: options for name, options in VARIANTS.items() if not names or name in names or name == REFERENCE}


def meaningful(variants: Mapping[str, ScoringOptions], spec: ModelSpec) -> dict[str, ScoringOptions]:
    """The variants whose estimator means something for a model."""
    found = {}
    for name, options in variants.items():
        try:
            options.estimator.check(spec)
        except ValueError:
            continue
        found[name] = options
    return found


def rank_variants(
    engine: RagEngine,
    questions: Sequence[Question],
    stage: FirstStage,
    variants: Mapping[str, ScoringOptions],
    *,
    candidates: int,
) -> Iterator[dict[str, Ranking]]:
    """For every question a ranking of the stage's candidates by each variant, and the stage's own ("unscored").

    Raises:
        PdllmError: as `RagEngine.retrieve`.
    """
    model = engine.model
    draft_len = max(options.draft_len for options in variants.values())
    for question in questions:
        refs = [hit.ref for hit in stage.search(question.text, candidates)]
        kv = engine.store.fetch([ref.chunk_id for ref in refs]).kv
        message = {"role": "user", "content": question.text.strip()}
        prompt = model.tokenizer.render(model.spec.family.template, [message])
        kvs = [kv[ref.chunk_id] for ref in refs]
        evidence = Evidence(model, prompt, kvs, Clock(), draft_len=draft_len, at_once=AT_ONCE)
        found = {"unscored": Ranking(tuple(ref.doc_id for ref in refs), 0.0)}
        for name, options in variants.items():
            parts = evidence.under(options)
            scores = options.combination.scores(parts)
            order = list(refs)
            if scores is not None:
                order = [ref for _, ref in sorted(zip(scores, refs, strict=True), key=lambda pair: (-pair[0], pair[1]))]
            found[name] = Ranking(tuple(ref.doc_id for ref in order), parts.ms())
        yield found
