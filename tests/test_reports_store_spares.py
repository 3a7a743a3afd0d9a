"""What users of stores and KV caches have reported elsewhere, tried here: restarts, and the smaller reports.

Each test names the public report that it stands for. `PDLLM_LONG=1` runs the sizes of the reports.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pdllm_store import KV_DTYPES, ChunkKV, KVDtype, LMDBStore, MemoryStore, StoreError
from pdllm_store.testing import tiny_fingerprint
from test_reports_store import FORKS, LAMP, LONG, QUESTION, Forks, document, in_new_process, is_sound, large, opened
from test_reports_store_kv import DOOR, DOORS

from pdllm_rag import LoadedModel, RagEngine, load_model
from pdllm_rag.cli import main

# -- 13: keys in another process ------------------------------------------------------------------------------------

TEXTS = [("new", large(10)), ("lamp", LAMP)]
IN_ANOTHER = """
    import json, sys
    import torch
    from pdllm_rag import load_model
    from test_reports_store_spares import ingest_and_ask
    torch.set_num_threads(1)
    print(json.dumps(ingest_and_ask(sys.argv[1], load_model(sys.argv[2], dtype=torch.float32))))
"""


def ingest_and_ask(path: str | Path, model: LoadedModel) -> dict[str, Any]:
    """What came of it, keys included, as JSON."""
    with opened(path, model, pool_bytes=0) as engine:
        docs = [document(name, text, b=[1, 2], a={"x": None}) for name, text in TEXTS]
        report = engine.prefill(docs)
        answer = engine.answer("Which word opens the door 7?", k=4)
        stats, refs = engine.store.stats(), engine.store.refs(engine.fingerprint)
        return {
            "computed": report.chunks_computed,
            "unchanged": report.unchanged,
            "ids": [engine.fingerprint.digest.hex(), *(ref.chunk_id.hex() for ref in refs)],
            "chunks": list(answer.stats.chunks),
            "recomputed or missed": stats.recomputed + stats.misses,
            "text": answer.text,
        }


def test_another_process_with_another_hash_seed_finds_every_key(
    tmp_path: Path, tiny_model_path: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/LMCache/LMCache/issues/1139"""
    seeds = {"1", "2", None} if LONG else {"1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    first, *others = [
        json.loads(in_new_process(IN_ANOTHER, tmp_path, tiny_model_path, PYTHONHASHSEED=seed)) for seed in seeds
    ]
    assert first["computed"] == len(set(first["ids"])) - 1 > 10
    for other in [*others, ingest_and_ask(tmp_path, tiny_model)]:
        assert (other["computed"], other["unchanged"]) == (0, 2)
        assert (other["ids"], other["text"]) == (first["ids"], first["text"])
        assert other["chunks"] == [4, 0, first["chunks"][2]]
        assert other["recomputed or missed"] == 0


def test_keys_are_the_same_on_every_machine_and_python() -> None:
    """https://github.com/LMCache/LMCache/issues/1139"""
    fingerprint = tiny_fingerprint()
    token_ids = np.array([0, 5, 6, 7], dtype=np.int32)
    assert fingerprint.digest.hex() == "444ed8152f48a726dc699a557a444575"
    assert fingerprint.chunk_id(token_ids).hex() == "7f453fb5d64364d343193e44d9814c9e"
    assert fingerprint.chunk_id(token_ids.astype(">i4")) == fingerprint.chunk_id(token_ids)


# -- spares ---------------------------------------------------------------------------------------------------------


def test_a_network_file_system_is_refused_before_anything_is_made_and_read_by_force_only(
    tmp_path: Path,
    tiny_model: LoadedModel,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """https://github.com/BVLC/caffe/pull/4774"""
    path = tmp_path / "kb"
    with opened(path, tiny_model) as engine:
        engine.prefill([document("lamp", LAMP)])
        expected = engine.answer(QUESTION).text
    (path / "lock.mdb").unlink()
    monkeypatch.setattr("pdllm_store.location.file_system_type", lambda *_args, **_options: "nfs4")
    for name in ("kb", "new"):
        with pytest.raises(StoreError, match="network file system"):
            opened(tmp_path / name, tiny_model)
    assert not (tmp_path / "new").exists()
    assert main(["ask", QUESTION, "--store", str(path), "--model", str(tiny_model_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with opened(path, tiny_model, store_options={"read_only": True, "force": True}) as engine:
        assert engine.answer(QUESTION).text == expected
    assert not (path / "lock.mdb").exists()  # locks that do not work were not relied on


@pytest.fixture
def everybodys_folder() -> Iterator[Path]:
    """A folder that any user of the machine may look into."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@FORKS
def test_a_store_that_may_only_be_read_serves_several_processes_and_stays_as_it_is(
    everybodys_folder: Path, tiny_model: LoadedModel
) -> None:
    """https://github.com/abetlen/llama-cpp-python/issues/1737"""
    path = everybodys_folder / "kb"
    docs = [document("lamp", LAMP), document("other", "Other words of no use.")]
    with opened(path, tiny_model, pool_bytes=0) as engine:
        engine.prefill(docs)
        expected = engine.answer(QUESTION).text
        assert isinstance(engine.store, LMDBStore)
        engine.store.evict(n_bytes=1)  # one chunk will have to be computed by every reader
    for found in [path, *path.rglob("*")]:
        found.chmod(0o555 if found.is_dir() else 0o444)
    before = contents(path)

    def read() -> None:
        if not os.getuid():
            os.setuid(65534)
        with pytest.raises(StoreError, match="cannot open the store"):
            opened(path, tiny_model)
        with opened(path, tiny_model, pool_bytes=0, store_options={"read_only": True}) as reader:
            for _ in range(2):
                answer = reader.answer(QUESTION)
                assert answer.text == expected
                assert answer.stats.chunks == (1, 1, 2)
            assert reader.prefill(docs).unchanged == 2
            with pytest.raises(StoreError, match="read-only"):
                reader.prefill([document("new", "New words.")])
            with pytest.raises(StoreError, match="read-only"):
                reader.delete("lamp")
            assert is_sound(reader)

    with Forks() as forks:
        children = [forks.run(read) for _ in range(4)]
        assert [forks.status(child) for child in children] == [0] * 4
    assert contents(path) == before


MARKS = "Part one.\n\n # # \n\nPart two: a---b <|im_end|> [SEP] </s>\n\n***\n\t# #Part three.  \n\n"


def test_separators_inside_a_text_are_tokenised_alike_every_time(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """https://github.com/LMCache/LMCache/pull/3228"""
    file = tmp_path / "marks.txt"
    text = "".join(f"{i}. {MARKS}" for i in range(20))
    file.write_text(text)
    with opened(tmp_path / "kb", tiny_model) as engine:
        assert engine.prefill([file]).chunks_computed > 10
    file.touch()
    with opened(tmp_path / "kb", tiny_model, pool_bytes=0) as engine:
        report = engine.prefill([file])
        assert (report.unchanged, report.chunks_computed) == (1, 0)
        report = engine.prefill([document("a copy", text)])
        assert (report.added, report.chunks_computed) == (1, 0)
        file.write_text(text + "A new end.")
        report = engine.prefill([file])
        assert (report.updated, report.chunks_computed) == (1, 1)
        assert engine.answer("What is part two?").stats.chunks == (4, 0, 8)


def test_one_text_split_into_other_tokens_is_another_key_and_never_a_wrong_hit(
    tmp_path: Path, tiny_model: LoadedModel, tiny_model_path: Path
) -> None:
    """https://github.com/mlc-ai/mlc-llm/issues/3179"""
    other_path = shutil.copytree(tiny_model_path, tmp_path / "merging")
    content = json.loads((other_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["th"] = len(content["model"]["vocab"])
    content["model"]["merges"] = [["t", "h"]]
    (other_path / "tokenizer.json").write_text(json.dumps(content))
    other = load_model(str(other_path), dtype=torch.float32)
    assert other.tokenizer.encode("the hall") != tiny_model.tokenizer.encode("the hall")
    texts: dict[str, str] = {}
    for name, model in (("bytes", tiny_model), ("merging", other), ("bytes", tiny_model)):
        with opened(tmp_path / "kb", model, pool_bytes=0) as engine:
            report = engine.prefill([document("lamp", LAMP)])
            assert (report.unchanged, report.chunks_computed) == ((1, 0) if name in texts else (0, 1))
            (ref,) = engine.store.refs(engine.fingerprint)
            assert engine.store.meta(ref.chunk_id).token_ids[1:].tolist() == model.tokenizer.encode(LAMP)
            assert engine.answer(QUESTION).stats.chunks == (1, 0, 1)
            assert texts.setdefault(name, engine.answer(QUESTION).text) == engine.answer(QUESTION).text
    with opened(tmp_path / "kb", tiny_model, chunk_len=32, pool_bytes=0) as engine:  # and by another cut
        report = engine.prefill([document("lamp", LAMP)])
        assert (report.updated, report.chunks_computed) == (1, 2)
        assert len(engine.store.refs(engine.fingerprint)) == 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_answers_are_those_of_a_store_in_memory_warm_restarted_and_computed_again(
    tmp_path: Path, tiny_model: LoadedModel, kv_dtype: KVDtype
) -> None:
    """https://github.com/LMCache/LMCache/issues/226"""
    docs, asked = [document("doors", large(12)), document("lamp", LAMP)], [QUESTION, DOOR]
    with opened(MemoryStore(kv_dtype=kv_dtype), tiny_model, kv_dtype=kv_dtype) as engine:
        engine.prefill(docs)
        expected = [engine.answer(question).text for question in asked]
    for state in ("cold", "warm", "evicted"):
        with opened(tmp_path, tiny_model, kv_dtype=kv_dtype, pool_bytes=0) as engine:
            engine.prefill(docs)
            assert isinstance(engine.store, LMDBStore)
            if state == "evicted":
                assert engine.store.evict() > 10
            assert [engine.answer(question).text for question in asked] == expected
            assert (engine.store.stats().recomputed > 0) == (state == "evicted")


def test_kv_that_is_sound_but_not_the_models_is_found_and_replaced(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """https://github.com/LMCache/LMCache/issues/4666"""

    def gate(engine: RagEngine) -> list[bytes]:
        assert isinstance(engine.store, LMDBStore)
        report = engine.store.verify(recompute_share=1.0)
        assert report.n_compared == len(DOORS)
        return report.differing

    with opened(tmp_path, tiny_model, pool_bytes=0) as engine:
        engine.prefill(DOORS)
        expected = engine.answer(DOOR, k=3).text
        assert gate(engine) == []
        victim, other = (ref.chunk_id for ref in engine.store.refs(engine.fingerprint)[1:3])
        meta, wrong = engine.store.meta(victim), engine.store.load(other)
        engine.store.discard([victim])
        n_tokens = len(meta.token_ids)
        engine.store.put(engine.fingerprint, [(meta, ChunkKV(wrong.k[:, :n_tokens], wrong.v[:, :n_tokens]))])
        assert is_sound(engine)  # every checksum is right
        assert gate(engine) == [victim]
        engine.store.discard([victim])
        assert engine.answer(DOOR, k=3).text == expected
        assert gate(engine) == []
