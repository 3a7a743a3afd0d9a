"""Scores in a model card: what reports of `pdllm eval qa` and `pdllm bench decoders` hold, as a section of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdllm_rag.models.vocabulary import read_json
from pdllm_rag.training.card import README, SCORES, digest_of, nameable, table

_UNKNOWN = "not recorded"


def write_scores(folder: Path, reports: Sequence[Path]) -> None:
    """Put the scores of reports into the card of a folder, in place of those that are there; all else stays.

    Raises:
        OSError: there is no card, or no report.
        ModelFormatError: a report is no JSON object.
        ValueError: a report holds no value with an interval, or was measured on other weights than a model's here.
    """
    text = (folder / README).read_text(encoding="utf-8")
    digest = digest_of(folder) if (folder / "config.json").is_file() else None
    rows, origins = [], []
    for path in reports:
        path.stat()
        report = read_json(path)
        figures = report.get("result", report)
        settings, found = figures.get("settings", {}), list(_estimates(figures, "", _UNKNOWN))
        measured = settings.get("weights", _UNKNOWN)
        if not found:
            raise ValueError(f"{path} holds no value with an interval; expected what pdllm eval qa --json or pdllm "
                             "bench decoders --questions FILE --json prints")  # fmt: skip
        if digest and measured not in (_UNKNOWN, digest):
            raise ValueError(f"{path} was measured on weights {measured}, those of {folder} are {digest}; expected "
                             "scores of this model. Measure it")  # fmt: skip
        rows += [(path.name, *row) for row in found]
        model, data = settings.get("model") or figures.get("model", _UNKNOWN), figures.get("data", _UNKNOWN)
        command = shlex.join(map(nameable, shlex.split(report.get("command", _UNKNOWN))))
        date = report.get("date", _UNKNOWN)
        origins.append((path.name, nameable(str(model)), measured, nameable(str(data)), date, command))
    section = table(("report", "measure", "n", "value", "95 % interval"), rows) + "\n\n"
    section += table(("report", "model", "BLAKE3 of weights and config", "data", "date", "command"), origins)
    head, _, rest = text.partition(f"\n{SCORES}\n")
    behind = re.search(r"^#{1,2} ", rest, re.MULTILINE)
    tail = f"\n{rest[behind.start() :]}" if behind else ""
    (folder / README).write_text(f"{head.rstrip()}\n\n{SCORES}\n\n{section}\n{tail}", encoding="utf-8")


def _estimates(node: Mapping[str, Any], place: str, n: Any) -> Iterator[tuple[str, Any, str, str]]:
    """Measure, n, value and interval of all that has one; of a list only what is named as a setting."""
    if {"value", "low", "high"} <= node.keys():
        yield place, n, f"{node['value']:.3f}", f"{node['low']:.3f} to {node['high']:.3f}"
        return
    n = node.get("n", n)
    for key, inner in node.items():
        of_retrieval = "recall" in key or key == "mrr"
        for one in inner if isinstance(inner, list) else [inner]:
            name = key if one is inner else isinstance(one, dict) and one.get("setting")
            if name and isinstance(one, dict):
                where = f"{place}, {name}" if place else str(name)
                yield from _estimates(one, where, node.get("n_retrieval", n) if of_retrieval else n)
