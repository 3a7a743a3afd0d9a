"""Flip one bit of a store's data file, read everything that is in it, go on writing; many times."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.location import DATA_FILE
from pdllm_store.memory_store import MemoryStore
from pdllm_store.testing.campaigns import file_map
from pdllm_store.testing.campaigns.children import Child, Ending, Report
from pdllm_store.testing.campaigns.contents import ABOVE, BELOW, GENERATION, SAME, Reading, deviation, readings
from pdllm_store.testing.campaigns.file_map import Area, file_areas
from pdllm_store.testing.campaigns.guarantee import BrokenGuaranteeError, require
from pdllm_store.testing.campaigns.specimen import Specimen

Outcome = Literal["error", "verify", "died", "hung", "late", "harmless", "earlier", "WRONG"]
OUTCOMES: dict[Outcome, str] = {
    "error": "reading raised an error, or counted a damaged row",
    "verify": "only `verify` names it",
    "died": "the reading process died",
    "hung": "the reading process did not end",
    "late": "everything reads as before; found after some more writing",
    "harmless": "everything reads as before, after more writing too",
    "earlier": "everything reads as it was before the last transaction",
    "WRONG": "something else was handed out, or something left out, and nothing says so",
}
_WEIGHTS = {file_map.ROW_KEY: 2, file_map.META_PAGE: 2, file_map.TREE_PAGE: 2, "KV payload": 4, "KV header": 2}
_ROWS = ("row of ", "KV ", file_map.ROW_KEY)  # where every flip must be found
_FOUND: tuple[Outcome, ...] = ("error", "verify", "died")
_FORBIDDEN: tuple[Outcome, ...] = ("hung", "WRONG")
_PATIENCE_S = 20.0


class FlipsResult(NamedTuple):
    """Figures of a flips campaign."""

    flips: int
    outcomes: dict[str, int]
    parts: dict[str, dict[str, int]]  # part of the file -> outcome -> flips
    errors: dict[str, int]  # type of error -> flips that led to it before anything else
    file_bytes: dict[str, int]  # kind of store -> size of its data file
    seconds: float


class _Trial(NamedTuple):
    """A store to be damaged, and what it must hand out at each stage."""

    specimen: Specimen
    data: bytes
    parts: dict[str, list[Area]]
    generation: int
    now: dict[str, Reading]
    earlier: dict[str, Reading]  # before its last transaction
    changed: dict[str, Reading]  # after more writing


def flips(*, flips: int = 5000, seed: int = 0) -> FlipsResult:
    """Examine `flips` copies of a small store, each with one bit flipped.

    Raises:
        BrokenGuaranteeError: something false was handed out, reading never ended, or a flip inside a row or record
            was not found.
    """
    started = time.monotonic()
    chance = random.Random(seed)
    parts: dict[str, Counter[str]] = {}
    errors: Counter[str] = Counter()
    wrong: list[str] = []
    with TemporaryDirectory(prefix="pdllm-flips-") as folder:
        specimens = [Specimen("bfloat16"), Specimen("float32"), Specimen("int8"), Specimen("float32", key=bytes(32))]
        trials = [_trial(specimen, Path(folder) / "whole") for specimen in specimens]
        for index in range(flips):
            trial = trials[index % len(trials)]
            part = _drawn(chance, trial.parts)
            areas = trial.parts[part]
            area = chance.choices(areas, [area.end - area.start for area in areas])[0]
            at, bit = chance.randrange(area.start, area.end), chance.randrange(8)
            ending = Child(partial(_examine, Path(folder) / "flipped", trial, at, bit)).end(_PATIENCE_S)
            outcome = _outcome(ending)
            errors.update(word[2] for word in ending.said[:1] if word[0] == "failed")
            parts.setdefault(part, Counter())[outcome] += 1
            if outcome in _FORBIDDEN or (part.startswith(_ROWS) and outcome not in _FOUND):
                where = f"bit {bit} of byte {at} ({part}) of the {trial.specimen.kind} store"
                wrong.append(f"flip {index} of seed {seed}, {where}: {outcome}, {ending.said[:3]} {ending.error or ''}")
        sizes = {trial.specimen.kind: len(trial.data) for trial in trials}
    total: Counter[str] = Counter()
    for counted in parts.values():
        total.update(counted)
    result = FlipsResult(
        flips=flips,
        outcomes={outcome: total[outcome] for outcome in OUTCOMES},
        parts={part: dict(parts[part]) for part in sorted(parts)},
        errors=dict(errors.most_common()),
        file_bytes=sizes,
        seconds=round(time.monotonic() - started, 1),
    )
    if wrong:
        message = f"{len(wrong)} of {flips} flips were not found, or gave something false:"
        raise BrokenGuaranteeError("\n".join([message, *wrong[:20]]), result._asdict())
    return result


def _drawn(chance: random.Random, parts: dict[str, list[Area]]) -> str:
    names = sorted(parts)
    return chance.choices(names, [_WEIGHTS.get(name, 1) for name in names])[0]


def _trial(specimen: Specimen, path: Path) -> _Trial:
    kind = specimen.kind
    shutil.rmtree(path, ignore_errors=True)
    ending = Child(partial(_build, specimen, path)).end(_PATIENCE_S)
    require(ending.error is None and bool(ending.said), f"the {kind} store could not be made: {ending.error}")
    parts: dict[str, list[Area]] = {}
    generation, areas = ending.said[0]
    for area in areas:
        parts.setdefault(area[0], []).append(Area(*area))
    states = []
    memory = MemoryStore(kv_dtype=specimen.kv_dtype)
    for step, reached in ((specimen.fill, BELOW), (specimen.finish, SAME), (specimen.change, ABOVE)):
        step(memory)
        states.append({**dict(readings(memory, specimen.names)), GENERATION: [reached]})
    earlier, now, changed = states
    trial = _Trial(specimen, (path / DATA_FILE).read_bytes(), parts, generation, now, earlier, changed)
    whole = Child(partial(_examine, path, trial, None, 0)).end(_PATIENCE_S)
    require(_outcome(whole) == "harmless", f"an unharmed {kind} store reads differently: {whole}")
    return trial


def _build(specimen: Specimen, path: Path, report: Report) -> None:
    with LMDBStore.open(path, kv_dtype=specimen.kv_dtype, key=specimen.key) as store:
        specimen.fill(store)
        specimen.finish(store)
        generation = store.generation
    report([generation, file_areas(str(path))])


def _examine(path: Path, trial: _Trial, at: int | None, bit: int, report: Report) -> None:
    """Report each deviation at once: the process may die of the next one."""
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB prints its failed assertions
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    data = bytearray(trial.data)
    if at is not None:
        data[at] ^= 1 << bit
    (path / DATA_FILE).write_bytes(data)
    try:
        with LMDBStore.open(path, create=False, key=trial.specimen.key) as store:
            if _compare(store, trial, trial.now, report):
                report(["stage", "change"])
                trial.specimen.change(store)
                _compare(store, trial, trial.changed, report)
    except Exception as error:  # whatever it is, it is how the damage was found
        report(["failed", "open, write or verify", type(error).__name__])


def _compare(store: LMDBStore, trial: _Trial, expected: dict[str, Reading], report: Report) -> bool:
    """Report every deviation; True if there is none."""
    is_same = is_earlier = True
    for name, got in readings(store, trial.specimen.names, trial.generation):
        states = [trial.earlier[name], trial.now[name], trial.changed[name]]
        word = deviation(name, got, expected[name], states)
        is_earlier = is_earlier and got == trial.earlier[name]
        if word is not None:
            is_same = False
            report([word, name, got if isinstance(got, str) else ""])
    if damaged := store.stats().damaged:
        report(["damaged", "", damaged])
    is_sound = store.verify().ok
    report(["verify", "", is_sound])
    if is_earlier and not is_same:
        report(["earlier", "", ""])
    return is_same and is_sound and not damaged


def _outcome(ending: Ending) -> Outcome:
    words: list[Any] = ending.said
    kinds = [word[0] for word in words]
    if ending.error is not None:
        return "WRONG"  # the campaign itself failed
    if "earlier" in kinds and "failed" not in kinds and ["verify", "", True] in words:
        return "earlier"
    if "false" in kinds:
        return "WRONG"
    if ending.timed_out:
        return "hung"
    if "stage" in kinds:
        late = kinds[kinds.index("stage") :]
        is_found = ending.signal or {"failed", "damaged"} & set(late) or ["verify", "", False] in words
        return "late" if is_found else "WRONG" if "short" in late else "harmless"
    if ending.signal is not None:
        return "died"
    if "failed" in kinds or "damaged" in kinds:
        return "error"
    if ["verify", "", False] in words:
        return "verify"
    return "WRONG"
