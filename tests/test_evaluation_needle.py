"""`pdllm eval needle`: what is hidden, where, what a swap costs, and what a miss is put down to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Pdllm, one_line, one_object
from pdllm_store import ChunkRef, MemoryStore

from pdllm_rag.answer import Answer, AnswerStats, ChunkCounts, Citation
from pdllm_rag.cli import eval_needle as cli
from pdllm_rag.config import AskOptions
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation import needle as evaluation
from pdllm_rag.evaluation.haystack import Haystack, Hidden, Part
from pdllm_rag.evaluation.haystack_store import HaystackStore
from pdllm_rag.evaluation.needle import NeedleGrid, Series, Trial, ask, dense_answer, run_trials, summary
from pdllm_rag.evaluation.needles import N_RIVALS, TASKS, Needle, make_needle
from pdllm_rag.models import LoadedModel
from pdllm_rag.reading import Retrieved

CHUNK_LEN = 250
OPTIONS = AskOptions(k=1, candidates=2, max_new_tokens=4)
CHUNKED = Series("chunked", CHUNK_LEN, True)


def haystack(task: str = "passkey", n_chunks: int = 5, *, chunk_len: int = CHUNK_LEN, seed: int = 0) -> Haystack:
    """A haystack of characters for tokens."""
    return Haystack(task, n_chunks * chunk_len, chunk_len, len, seed=seed)


# -- generators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_the_needle_stands_once_at_the_depth_asked_for(task: str, depth: float) -> None:
    hay = haystack(task, n_chunks=20)
    for trial in range(3):
        hidden = hay.hide(depth, trial)
        text = hay.text_with(hidden.part)
        for once in (hidden.needle.sentence, hidden.needle.value):
            assert text.count(once) == hidden.part.text.count(once) == 1
        at = text.index(hidden.needle.sentence)
        assert at / (len(text) - len(hidden.needle.sentence)) == hidden.depth == pytest.approx(depth, abs=0.04)


def test_the_same_seed_gives_the_same_text_and_another_gives_another() -> None:
    assert haystack().parts == haystack().parts
    assert haystack().hide(0.5, 1) == haystack().hide(0.5, 1)
    texts = {haystack(seed=seed).hide(0.5, trial).part.text for seed in (0, 1) for trial in (0, 1)}
    assert len(texts) == 4
    assert not set(haystack().parts) & set(haystack(seed=1).parts)


@pytest.mark.parametrize("task", TASKS)
def test_parts_fill_a_chunk_and_are_all_different(task: str) -> None:
    hay = haystack(task, n_chunks=40)
    lens = [len(part.text) for part in hay.parts]
    assert max(lens) < CHUNK_LEN
    assert sum(lens) / len(lens) > 0.8 * CHUNK_LEN
    assert len({part.text for part in hay.parts}) == len(hay.parts) == 39


def test_a_longer_haystack_begins_with_the_parts_of_a_shorter_one() -> None:
    assert haystack(n_chunks=9).parts[:4] == haystack(n_chunks=5).parts
    assert haystack("number").parts == haystack("passkey").parts


def test_parts_lie_in_the_order_of_the_text() -> None:
    hay = haystack()
    places = [[part.place for part in hay.parts_with(hay.hide(depth, 0).part)] for depth in (0, 0.5, 1)]
    assert places == [[0, 1, 3, 5, 7], [1, 3, 4, 5, 7], [1, 3, 5, 7, 8]]


def test_several_needles_are_of_places_that_are_not_asked_for() -> None:
    hay = haystack("multi", n_chunks=8)
    keys = re.findall(r"The pass key of the ([\w ]+) is (\d{5})\.", hay.text_with(hay.hide(0.5, 0).part))
    assert len(dict(keys)) == N_RIVALS + 1
    assert [len({part.place for part in hay.parts if "pass key" in part.text})] == [N_RIVALS]


def test_a_haystack_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of passkey, number, key_value, multi"):
        haystack("magic")
    with pytest.raises(ValueError, match="expected one of passkey, number, key_value, multi"):
        make_needle("magic", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one chunk or more"):
        Haystack("passkey", 100, 200, len, seed=0)
    with pytest.raises(ValueError, match="needs two chunks or more"):
        haystack("multi", n_chunks=1)
    with pytest.raises(ValueError, match="Take longer chunks"):
        haystack(chunk_len=20).hide(0, 0)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        haystack().hide(1.5, 0)


# -- the store -----------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(), tiny_model, chunk_len=CHUNK_LEN, options=OPTIONS) as opened:
        yield opened


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of chunks in each batch that was encoded."""
    batches: list[int] = []
    capture = ChunkEncoder.capture
    monkeypatch.setattr(
        ChunkEncoder, "capture", lambda self, chunks: batches.append(len(chunks)) or capture(self, chunks)
    )
    return batches


@pytest.mark.parametrize("bos", [True, False])
def test_another_needle_encodes_exactly_one_chunk(engine: RagEngine, encoded: list[int], bos: bool) -> None:
    stored, hay = HaystackStore(engine, bos=bos), haystack(n_chunks=5)
    assert stored.fill(hay) == sum(encoded) == 4
    for depth, trial in ((0.0, 0), (0.0, 1), (1.0, 0), (0.5, 0)):
        encoded.clear()
        hidden = hay.hide(depth, trial)
        assert stored.hide(hidden.part) == sum(encoded) == 1
        texts = [engine.store.document(engine.fingerprint, info.doc_id).text for info in engine.documents()]
        assert texts == [part.text for part in hay.parts_with(hidden.part)]
        assert len(engine.store.refs(engine.fingerprint)) == 5
    encoded.clear()
    assert stored.fill(haystack("number", n_chunks=7)) == sum(encoded) == 2
    assert stored.fill(haystack("key_value", n_chunks=3)) == 2
    assert len(engine.documents()) == 2


def test_without_bos_chunks_are_bare_and_answered_from(engine: RagEngine) -> None:
    hay, bos_id = haystack(n_chunks=3), engine.model.spec.bos_id
    lens = []
    for bos in (True, False):
        stored = HaystackStore(engine, bos=bos)
        stored.fill(hay)
        stored.hide(hay.hide(0.5, 0).part)
        metas = list(engine.store.iter_meta(engine.fingerprint))
        assert all((meta.token_ids[0] == bos_id) is np.bool_(bos) for meta in metas)
        lens.append(sum(len(meta.token_ids) for meta in metas))
        assert engine.answer("What?").stats.context_tokens > 0
        for info in engine.documents():
            engine.delete(info.doc_id)
    assert lens[0] - lens[1] == 3


def test_a_part_of_several_chunks_is_refused(engine: RagEngine) -> None:
    with pytest.raises(ValueError, match="Take longer chunks"):
        HaystackStore(engine, bos=True).hide(Part(0, "word " * CHUNK_LEN))


# -- hits and misses -----------------------------------------------------------------------------------------

NEEDLE = Needle("The pass key of the archive is 12345.", "What is the pass key of the archive?", "12345")
HIDDEN = Hidden(NEEDLE, Part(4, NEEDLE.sentence), 0.5)
WANTED, OTHER = "part-00000004", "part-00000001"


class FakeEngine:
    """Says one thing, having read these documents, retrieved those with their scores, and considered others."""

    def __init__(
        self, model: LoadedModel, said: str, read: list[str], retrieved: dict[str, float], candidates: list[str]
    ) -> None:
        self.model, self.options = model, OPTIONS
        self._said, self._read, self._retrieved, self._candidates = said, read, retrieved, candidates

    def answer(self, question: str) -> Answer:
        assert question == NEEDLE.question
        counts, ms = ChunkCounts(0, 0, 0), {"total": 7.0}
        supported = bool(self._read)
        stats = AnswerStats(3, 1, 1, 1, 1, ms, counts, "independent", "static_kv", "tiny", "stop", supported, 0.3)
        return Answer(self._said, tuple(Citation(doc_id, 0, 0, 1, 0.0, "x") for doc_id in self._read), stats)

    def retrieve(self, _question: str, k: int | None = None) -> list[Retrieved]:
        assert k in (None, OPTIONS.candidates)
        found = self._retrieved if k is None else dict.fromkeys(self._candidates, -5.0)
        return [Retrieved(ref(doc_id), score, "") for doc_id, score in found.items()]

    def documents(self) -> list[Any]:
        return []


def ref(doc_id: str) -> ChunkRef:
    return ChunkRef(doc_id, 0, doc_id.encode(), 0, 1)


@pytest.mark.parametrize(
    ("said", "read", "retrieved", "candidates", "expected"),
    [
        ("It is 12345.", [WANTED], {}, [], (True, None, True)),
        ("It is 123456.", [WANTED, OTHER], {}, [], (False, "reading", True)),
        ("It is 1234.", [WANTED], {}, [], (False, "reading", True)),
        ("Not found in the documents.", [], {OTHER: -1.0, WANTED: -1.2}, [], (False, "refused", True)),
        ("Not found in the documents.", [], {OTHER: -1.0, WANTED: -3.0}, [], (False, "window", False)),
        ("It is 54321.", [OTHER], {OTHER: -1.0, WANTED: -1.2}, [], (False, "window", False)),
        ("It is 54321.", [OTHER], {OTHER: -1.0}, [OTHER, WANTED], (False, "scoring", False)),
        ("It is 54321.", [OTHER], {OTHER: -1.0}, [OTHER], (False, "first_stage", False)),
    ],
)
def test_a_miss_says_which_stage_missed(
    tiny_model: LoadedModel,
    said: str,
    read: list[str],
    retrieved: dict[str, float],
    candidates: list[str],
    expected: tuple[bool, str | None, bool],
) -> None:
    engine: Any = FakeEngine(tiny_model, said, read, retrieved, candidates)
    trial = ask(engine, haystack(), HIDDEN, series=CHUNKED, depth=0.5, n_computed=1)
    assert (trial.hit, trial.missed, trial.retrieved) == expected
    assert trial.withheld
    assert trial.ms == 7


def a_trial(*, missed: str | None = None, depth: float = 0.0, length: int = 1000, support: float = 0.9) -> Trial:
    retrieved = missed in (None, "reading", "refused")
    return Trial(
        CHUNKED, "passkey", length, depth, HIDDEN, "12345", missed is None, missed, retrieved, support, length, 1, 5.0
    )


def test_cells_count_hits_and_what_missed_the_others() -> None:
    trials = [a_trial(), a_trial(support=0.1), a_trial(missed="reading"), a_trial(missed="scoring")]
    trials += [a_trial(depth=1.0), a_trial(length=2000)]
    (part,) = summary(trials)
    assert (part["mode"], part["chunk_len"], part["bos"]) == ("chunked", CHUNK_LEN, True)
    assert [(c["length"], c["depth"], c["n"], c["hits"]) for c in part["cells"]] == [
        (1000, 0.0, 4, 2),
        (1000, 1.0, 1, 1),
        (2000, 0.0, 1, 1),
    ]
    first = part["cells"][0]
    assert first["accuracy"] == pytest.approx({"value": 0.5, "low": 0.150, "high": 0.850}, abs=1e-3)
    assert first["missed"] == {"scoring": 1, "reading": 1}
    assert (first["retrieved"], first["withheld"], first["chunks_computed"]) == (3, 1, 4)
    assert [(row["length"], row["n"]) for row in part["lengths"]] == [(1000, 5), (2000, 1)]
    assert [(row["task"], row["hits"], row["n"]) for row in part["tasks"]] == [("passkey", 4, 6)]
    with pytest.raises(ValueError, match="no trials"):
        summary([])


# -- a whole run ---------------------------------------------------------------------------------------------


def test_both_modes_are_asked_the_same_needles(tiny_model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    grid = NeedleGrid(
        ["passkey", "multi"],
        [500, 1000],
        [1.0],
        2,
        [CHUNK_LEN],
        modes=("chunked", "dense"),
        dense_max=500,
        dense_trials=1,
    )
    trials = list(run_trials(tiny_model, grid, OPTIONS))
    assert len(trials) == grid.n_trials(tiny_model.spec.family.window) == 10
    assert "[1000] tokens are longer than is asked densely" in caplog.text
    by_mode = {mode: [t for t in trials if t.series.mode == mode] for mode in evaluation.MODES}
    assert [t.length for t in by_mode["chunked"]] == [500] * 4 + [1000] * 4
    assert [t.hidden for t in by_mode["dense"]] == [t.hidden for t in by_mode["chunked"][:4:2]]
    assert {t.n_computed for t in by_mode["chunked"]} == {1}
    assert {t.n_computed for t in by_mode["dense"]} == {0}
    assert {t.retrieved for t in by_mode["dense"]} == {None}
    for trial in trials:
        assert 0.7 * trial.length < trial.tokens <= trial.length + 10
        json.dumps(trial.as_dict())


def test_a_dense_answer_is_the_vanilla_decoders_over_the_same_text(tiny_model: LoadedModel) -> None:
    text, question = "Porto opens at nine.", "When does Porto open?"
    ids = [tiny_model.spec.bos_id, *tiny_model.tokenizer.encode(text)]
    with RagEngine.open(MemoryStore(), tiny_model) as engine:
        options = OPTIONS.with_changes({"decoder": "vanilla", "abstain": False})
        assert (
            dense_answer(tiny_model, ids, question, OPTIONS)
            == engine.answer(question, context=text, options=options).text
        )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tasks": ["magic"]}, "tasks has 'magic'"),
        ({"modes": ["sparse"]}, "modes has 'sparse'"),
        ({"lengths": []}, "lengths is"),
        ({"depths": [0.5, 0.5]}, "each once"),
        ({"depths": [1.5]}, "0 to 1 each"),
        ({"trials": 0}, "trials is 0"),
        ({"chunk_lens": [600]}, "one chunk or more"),
    ],
)
def test_a_bad_grid_is_refused(changes: dict[str, Any], problem: str) -> None:
    good = {"tasks": ["passkey"], "lengths": [500], "depths": [0.5], "trials": 1, "chunk_lens": [CHUNK_LEN]}
    with pytest.raises(ValueError, match=problem):
        NeedleGrid(**{**good, **changes})


# -- the command ---------------------------------------------------------------------------------------------

SMALL = ("--lengths", "500,750", "--depths", "0,1", "--trials", "1", "--k", "1", "--candidates", "2")


def test_json_is_one_object_of_the_stable_form(
    pdllm: Pdllm, tiny_model: LoadedModel, tiny_model_path: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture, details = tmp_path / "needles.png", tmp_path / "details.jsonl"
    asked = ("--tasks", "key_value", "--modes", "chunked,dense", "--dense-max", "500", "--chunk-len", "250")
    out = ("--plot", picture, "--details", details, "--json")
    figures = one_object(pdllm("eval", "needle", "--model", tiny_model_path, *SMALL, *asked, *out))
    assert list(figures) == ["grid", "window", "series", "settings", "machine"]
    assert figures["grid"]["seed"] == 0
    assert figures["settings"]["k"] == 1
    assert figures["window"] == tiny_model.spec.family.window
    assert figures["machine"]["torch"]
    assert [part["mode"] for part in figures["series"]] == ["chunked", "dense"]
    for part in figures["series"]:
        measures = {"n", "hits", "accuracy", "retrieved", "missed", "withheld", "tokens", "chunks_computed", "ms"}
        assert all(set(cell) == {"task", "length", "depth"} | measures for cell in part["cells"])
    chunked, dense = figures["series"]
    assert [(cell["length"], cell["depth"]) for cell in chunked["cells"]] == [(500, 0), (500, 1), (750, 0), (750, 1)]
    assert [cell["length"] for cell in dense["cells"]] == [500, 500]
    assert len(details.read_text().splitlines()) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_row_for_each_task_and_length(pdllm: Pdllm, tiny_model_path: Path) -> None:
    asked = ("--tasks", "number", "--chunk-len", "125,250", "--bos", "on,off", "--lengths", "250")
    outcome = pdllm("eval", "needle", "--model", tiny_model_path, *SMALL, *asked)
    assert outcome.status == 0
    for name in ("chunks of 125", "chunks of 125, no BOS", "chunks of 250, no BOS", "number", " on cpu, "):
        assert name in outcome.out
    compared = outcome.out.partition("all lengths asked")[2]
    assert [compared.count(f"chunks of {n}") for n in (125, 250)] == [2, 2]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (("--bos", "maybe"), "--bos has 'maybe'"),
        (("--modes", "dense", "--dense-max", "400", "--chunk-len", "250"), "raise --dense-max"),
    ],
)
def test_wrong_usage_is_one_line(pdllm: Pdllm, tiny_model_path: Path, wrong: tuple[str, ...], problem: str) -> None:
    assert problem in one_line(pdllm("eval", "needle", "--model", tiny_model_path, *SMALL, *wrong))


def test_names_on_the_command_line_are_the_evaluations() -> None:
    assert tuple(TASKS) == cli.TASKS
    assert evaluation.MODES == cli.MODES
    assert evaluation.STAGES == cli.STAGES
