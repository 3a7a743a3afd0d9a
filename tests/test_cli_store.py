"""`pdllm store`, in this process: on stores of made-up chunks, and of a tiny random model where chunks are computed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from command_line import Pdllm, one_line, one_object
from pdllm_store import LMDBStore, ModelStats, StoreStats
from pdllm_store.rows import document_key
from pdllm_store.testing import add_chunks, make_document, random_chunk, tiny_fingerprint
from tiny import save_tiny_model

from pdllm_rag.cli.console import byte_size

ONE, OTHER = tiny_fingerprint(weights="01"), tiny_fingerprint(weights="02")


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    """Three documents of one model, the last of them of another one, too."""
    with LMDBStore.open(tmp_path / "kb") as store:
        add_chunks(store, ONE, "a.md", [1, 2, 3])
        add_chunks(store, ONE, "b.md", [4, 5])
        add_chunks(store, ONE, "c.md", [6])
        add_chunks(store, OTHER, "c.md", [7])
    return tmp_path / "kb"


def contents(kb: Path) -> dict[tuple[str, str], bool]:
    """Documents of a store, by model and id, and whether they are pinned."""
    with LMDBStore.open(kb, create=False) as store:
        return {
            (model.weights_digest, info.doc_id): info.pinned
            for model in store.fingerprints()
            for info in store.documents(model)
        }


def damage_document(kb: Path, doc_id: str) -> None:
    with LMDBStore.open(kb) as store:
        key = document_key(ONE.digest, doc_id)
        store._transactions.write(lambda tables: tables.put("documents", key, b"nonsense"))


def every_byte(kb: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(kb.rglob("*")) if path.is_file())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("delete --store s", "either one or more DOC_ID or --all"),
        ("delete a --all --store s", "either one or more DOC_ID or --all"),
        ("pin --store s", "DOC_ID"),
        ("evict --store s", "expected --unused-for, --bytes or both"),
        ("evict --store s --unused-for 30", "got '30', expected a duration such as 90s, 15m, 12h or 30d"),
        ("evict --store s --bytes 0", "got '0', expected a size such as 500MB, 2GiB or 1073741824 (bytes)"),
        ("limit much --store s", "got 'much', expected a size such as 500MB, 2GiB or 1073741824 (bytes), or none"),
        ("verify --store s --recompute 0", "got '0', expected a number above 0 and up to 1"),
        ("verify --store s --model demo", "--recompute is missing"),
        ("verify --store s --seed 1", "--recompute is missing"),
        ("verify --store s --repair --read-only", "expected one of them"),
        ("pin a --store s --read-only", "--read-only"),
        ("export kb", "expected one store and one file"),
        ("export kb file more", "expected one store and one file"),
        ("import file kb --store s", "expected one store and one file"),
    ],
)
def test_wrong_usage_ends_with_2_before_the_store_is_opened(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], pdllm: Pdllm
) -> None:
    with pytest.raises(SystemExit) as leaving:
        pdllm("store", *line.split())
    assert leaving.value.code == 2
    assert expected in capsys.readouterr().err


# -- list and stats ------------------------------------------------------------------------------------------


def test_list_has_the_documented_form(pdllm: Pdllm, filled: Path) -> None:
    documents = one_object(pdllm("store", "list", "--store", filled, "--json"))["documents"]
    assert [document["doc_id"] for document in documents] == ["buoys/gannet.txt", "leave.md"]
    for document in documents:
        assert set(document) == {
            "doc_id", "source", "chunks", "chunk_ids", "evicted", "tokens", "bytes", "pinned", "model",
        }  # fmt: skip
        assert document["chunks"] == len(document["chunk_ids"])
        assert all(len(bytes.fromhex(chunk_id)) == 16 for chunk_id in document["chunk_ids"])
        assert document["source"].endswith(document["doc_id"])
        bytes.fromhex(document["model"])
    shown = pdllm("store", "list", "--store", filled).out
    assert "leave.md" in shown
    assert not any(line != line.rstrip() for line in shown.splitlines())


def test_list_marks_what_is_pinned_and_what_was_evicted(pdllm: Pdllm, kb: Path) -> None:
    with LMDBStore.open(kb) as store:
        store.set_pinned(ONE, "b.md", pinned=True)
        store.touch([info.chunk_ids[0] for info in store.documents(ONE) if info.doc_id == "a.md"])
        assert store.evict(n_bytes=2 * 4096) == 2
    documents = one_object(pdllm("store", "list", "--store", kb, "--json"))["documents"]
    assert [(document["doc_id"], document["evicted"], document["pinned"]) for document in documents] == [
        ("a.md", 2, False),
        ("b.md", 0, True),
        ("c.md", 0, False),
        ("c.md", 0, False),
    ]
    lines = pdllm("store", "list", "--store", kb).out.splitlines()
    assert [line.partition("   ")[0] for line in lines[1:]] == ["a.md (2 evicted)", "b.md (pinned)", "c.md", "c.md"]


def test_no_document_name_breaks_the_table(pdllm: Pdllm, tmp_path: Path) -> None:
    names = ["a\nb", "a\r\tb", "red\x1b[31m", "line\u2028two", "right\u202eleft", "caf\u00e9 \u6f22\u5b57"]
    with LMDBStore.open(tmp_path / "kb") as store:
        for seed, name in enumerate(names, start=1):
            add_chunks(store, ONE, name, [seed])
    lines = pdllm("store", "list", "--store", tmp_path / "kb").out.splitlines()
    assert len(lines) == 1 + len(names)
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "a\\nb", "a\\r\\tb", "café 漢字", "line\\u2028two", "red\\x1b[31m", "right\\u202eleft",
    ]  # fmt: skip
    listed = one_object(pdllm("store", "list", "--store", tmp_path / "kb", "--json"))["documents"]
    assert sorted(document["doc_id"] for document in listed) == sorted(names)


def test_stats_have_a_fixed_form_in_json(pdllm: Pdllm, kb: Path) -> None:
    counts = ("documents", "chunks", "orphans", "evicted", "tokens", "kv_bytes")
    types: dict[str, object] = dict.fromkeys(
        (*counts, "used_bytes", "free_bytes", "file_bytes", "evictions", "generation"), int
    )
    types |= dict.fromkeys(("hits", "misses", "damaged", "recomputed", "fetched"), int)
    types |= {"path": str, "kv_dtype": str, "max_bytes": type(None), "fingerprints": dict}
    stats = one_object(pdllm("store", "stats", "--store", kb, "--json"))
    assert {key: type(value) for key, value in stats.items()} == types
    assert set(stats) == set(StoreStats._fields)
    assert set(stats["fingerprints"]) == {ONE.digest.hex(), OTHER.digest.hex()}
    for model in stats["fingerprints"].values():
        assert {key: type(value) for key, value in model.items()} == dict.fromkeys(counts, int)
        assert tuple(model) == ModelStats._fields
    assert (stats["documents"], stats["chunks"], stats["fingerprints"][OTHER.digest.hex()]["documents"]) == (4, 7, 1)
    pdllm("store", "limit", "2MiB", "--store", kb)
    assert one_object(pdllm("store", "stats", "--store", kb, "--json"))["max_bytes"] == 2 << 20


def test_stats_are_for_people_in_the_table(pdllm: Pdllm, kb: Path) -> None:
    with LMDBStore.open(kb) as store:
        store.evict(n_bytes=1)
        store.put(ONE, [random_chunk(ONE, seed=99)])
        stats = store.stats()
    shown = pdllm("store", "stats", "--store", kb).out
    facts = {line[:9].strip(): line[11:] for line in shown.partition("\n\n")[0].splitlines()}
    assert list(facts) == [
        "store", "stored as", "documents", "chunks", "evicted", "evictions", "tokens", "KV", "used", "free", "on disk",
        "cap",
    ]  # fmt: skip
    assert facts["chunks"] == "7, 1 of which no document refers to"
    assert facts["evicted"] == "1, computed again when they are needed"
    assert (facts["evictions"], facts["cap"], facts["KV"]) == ("1", "none", byte_size(stats.kv_bytes))
    header, *models = shown.partition("\n\n")[2].splitlines()
    assert header.split() == ["model", "family", "documents", "chunks", "evicted", "tokens", "KV"]
    assert sorted(line.split()[:5] for line in models) == sorted(
        [model.digest.hex()[:12], model.family, *counts]
        for model, counts in ((ONE, ["3", "6", "1"]), (OTHER, ["1", "1", "0"]))
    )
    pdllm("store", "limit", "1MiB", "--store", kb)
    assert "\ncap        1.0 MB\n" in pdllm("store", "stats", "--store", kb).out


# -- pin, limit, evict ---------------------------------------------------------------------------------------


def test_pinning_holds_under_every_model(pdllm: Pdllm, kb: Path) -> None:
    place = ("--store", kb)
    assert one_object(pdllm("store", "pin", "c.md", "a.md", "c.md", *place, "--json")) == {
        "pinned": ["c.md", "a.md"],
        "unchanged": [],
    }
    assert [doc for doc, pinned in contents(kb).items() if pinned] == [("01", "a.md"), ("01", "c.md"), ("02", "c.md")]
    assert pdllm("store", "pin", "a.md", "b.md", *place).out == "1 document pinned (already pinned: 1)\n"
    assert one_object(pdllm("store", "unpin", "a.md", "c.md", *place, "--json")) == {
        "unpinned": ["a.md", "c.md"],
        "unchanged": [],
    }
    assert pdllm("store", "unpin", "a.md", *place).out == "0 documents unpinned (not pinned: 1)\n"
    assert [doc for doc, pinned in contents(kb).items() if pinned] == [("01", "b.md")]


@pytest.mark.parametrize("action", ["pin", "unpin", "delete"])
def test_an_unknown_document_is_named_before_anything_is_changed(action: str, pdllm: Pdllm, kb: Path) -> None:
    before = contents(kb)
    refused = one_line(pdllm("store", action, "a.md", "typo.md", "--store", kb))
    assert "no document 'typo.md'; nothing was changed" in refused
    assert contents(kb) == before


def test_a_cap_is_set_printed_and_lifted(pdllm: Pdllm, kb: Path) -> None:
    place = ("--store", kb)
    assert pdllm("store", "limit", *place).out.startswith("No cap; the file takes ")
    assert pdllm("store", "limit", "2MiB", *place).out.startswith("The cap is 2.1 MB (2,097,152 bytes); the file ")
    limit = one_object(pdllm("store", "limit", *place, "--json"))
    assert set(limit) == {"max_bytes", "file_bytes", "used_bytes"}
    assert limit["max_bytes"] == 2 << 20
    assert limit["file_bytes"] >= limit["used_bytes"] > 0
    assert one_object(pdllm("store", "limit", "none", *place, "--json"))["max_bytes"] is None
    assert "at least 1048576" in one_line(pdllm("store", "limit", "1MB", *place))


def test_a_cap_below_the_file_says_what_shrinks_it(pdllm: Pdllm, tmp_path: Path) -> None:
    place = ("--store", tmp_path / "kb")
    large = tiny_fingerprint(kv_dtype="float32", n_layers=64)
    with LMDBStore.open(tmp_path / "kb", kv_dtype="float32") as store:
        for number in range(20):
            items = [random_chunk(large, seed=4 * number + part, n_tokens=32) for part in range(4)]
            store.put(large, items)
            store.add_document(large, make_document(f"d{number}", [meta for meta, _ in items]))
    told = pdllm("store", "limit", "2MB", *place).out
    _, _, evict = told.partition("more than the cap: `pdllm store ")
    command, _, then = evict.partition("`, then ")
    assert then == "`pdllm store compact` shrinks it.\n"
    assert pdllm("store", *command.split(), *place).status == 0
    assert pdllm("store", "limit", *place).out.endswith("more than the cap: `pdllm store compact` shrinks it.\n")
    assert ", more than the cap\n" in pdllm("store", "stats", *place).out
    assert pdllm("store", "compact", *place).status == 0
    assert "more than the cap" not in pdllm("store", "limit", *place).out


def test_eviction_takes_as_much_as_is_asked_for_and_nothing_pinned(pdllm: Pdllm, kb: Path) -> None:
    place = ("--store", kb)
    pdllm("store", "pin", "c.md", *place)
    untouched = pdllm("store", "evict", "--unused-for", "1h", *place)
    assert untouched.out.startswith("Nothing evicted: ")
    assert untouched.status == 0
    with LMDBStore.open(kb) as store:
        before = store.stats().kv_bytes
    first = one_object(pdllm("store", "evict", "--bytes", "4KiB", "--unused-for", "0s", *place, "--json"))
    assert set(first) == {"evicted", "bytes"}
    assert first["evicted"] == 1
    shown = pdllm("store", "evict", "--unused-for", "0s", *place).out
    assert shown.startswith("4 chunks evicted, ")
    with LMDBStore.open(kb) as store:
        stats = store.stats()
        assert (stats.evicted, stats.chunks) == (5, 2)
        assert byte_size(before - stats.kv_bytes - first["bytes"]) in shown


# -- delete and compact --------------------------------------------------------------------------------------


def test_delete_takes_named_documents_under_every_model(pdllm: Pdllm, kb: Path) -> None:
    assert one_object(pdllm("store", "delete", "c.md", "a.md", "--store", kb, "--json")) == {
        "deleted": ["c.md", "a.md"]
    }
    assert list(contents(kb)) == [("01", "b.md")]
    assert pdllm("store", "delete", "--all", "--store", kb).out.startswith("1 document deleted")
    assert "holds no documents" in pdllm("store", "list", "--store", kb).out


def test_deleting_everything_asks_a_person_first(pdllm: Pdllm, kb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.StringIO("n\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    refused = pdllm("store", "delete", "--all", "--store", kb)
    assert refused.status == 1
    assert "Delete 3 documents" in refused.err
    assert len(contents(kb)) == 4
    assert pdllm("store", "delete", "--all", "--yes", "--store", kb).status == 0
    assert contents(kb) == {}


def test_a_damaged_document_is_deleted_by_its_name_and_not_passed_over(pdllm: Pdllm, kb: Path) -> None:
    damage_document(kb, "a.md")
    damage_document(kb, "b.md")
    assert one_object(pdllm("store", "delete", "a.md", "--store", kb, "--json")) == {"deleted": ["a.md"]}
    assert pdllm("store", "delete", "--all", "--store", kb).out.startswith("3 documents deleted")
    assert pdllm("store", "verify", "--store", kb).status == 0


def test_a_purge_leaves_nothing_in_the_files(pdllm: Pdllm, tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    with LMDBStore.open(kb) as store:
        for seed, name in enumerate(("secret", "open", "other"), start=1):
            items = [random_chunk(ONE, seed=seed)]
            store.put(ONE, items)
            document = make_document(name, [meta for meta, _ in items], text=f"the {name} word of ten or more")
            store.add_document(ONE, document)
    assert b"the secret word" in every_byte(kb)
    deleted = one_object(pdllm("store", "delete", "secret", "--purge", "--store", kb, "--json"))
    assert set(deleted) == {"deleted", "bytes"}
    assert deleted["deleted"] == ["secret"]
    assert b"the secret word" not in every_byte(kb)
    assert b"the open word" in every_byte(kb)
    assert "'typo'; nothing was changed" in one_line(pdllm("store", "delete", "open", "typo", "--purge", "--store", kb))
    with LMDBStore.open(kb):
        assert "is open" in one_line(pdllm("store", "delete", "open", "--purge", "--store", kb))
    assert len(contents(kb)) == 2
    purged = pdllm("store", "delete", "--all", "--purge", "--store", kb)
    assert purged.out.startswith(f"2 documents purged from {kb}; ")
    assert b"the open word" not in every_byte(kb)
    assert contents(kb) == {}


def test_compact_drops_what_nobody_refers_to(pdllm: Pdllm, kb: Path) -> None:
    with LMDBStore.open(kb) as store:
        store.put(ONE, [random_chunk(ONE, seed=99)])
    compacted = one_object(pdllm("store", "compact", "--store", kb, "--json"))
    assert set(compacted) == {"orphans", "bytes"}
    assert compacted["orphans"] == 1
    assert pdllm("store", "compact", "--store", kb).out.startswith("0 orphan chunks dropped, ")


# -- verify --------------------------------------------------------------------------------------------------


@pytest.fixture
def computed(tmp_path: Path, tiny_model_path: Path, pdllm: Pdllm) -> Path:
    """A store of one document that the tiny model has computed in float32."""
    (tmp_path / "a.txt").write_text(" ".join(f"Sentence {i} of a text with words." for i in range(30)))
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path, "--kv-dtype", "float32", "--json")
    assert pdllm("prefill", tmp_path / "a.txt", *argv).status == 0
    return tmp_path / "kb"


def forge(kb: Path) -> None:
    """Give one chunk the KV of other tokens, with right checksums."""
    with LMDBStore.open(kb, create=False) as store:
        (model,) = store.fingerprints()
        meta = store.meta(store.refs(model)[0].chunk_id)
        _, kv = random_chunk(model, seed=1, n_tokens=len(meta.token_ids))
        store.discard([meta.chunk_id])
        store.put(model, [(meta, kv)])


def test_verify_has_the_documented_form(pdllm: Pdllm, kb: Path) -> None:
    with LMDBStore.open(kb) as store:
        store.evict(n_bytes=1)
    outcome = pdllm("store", "verify", "--store", kb, "--json")
    assert outcome.err == ""
    assert outcome.status == 0
    assert one_object(outcome) == {
        "ok": True,
        "chunks": 7,
        "documents": 4,
        "damaged": [],
        "missing": [],
        "problems": [],
        "evicted": 1,
        "compared": 0,
        "differing": [],
        "repaired": 0,
    }
    shown = pdllm("store", "verify", "--store", kb)
    assert shown.out == (
        "7 chunks and 4 documents checked: all sound\n1 chunk evicted, computed again when they are needed\n"
    )
    assert shown.err == ""


def test_verify_finds_a_flipped_byte_and_repair_lets_it_be_computed_again(
    pdllm: Pdllm, computed: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    place = ("--store", computed)
    assert pdllm("store", "verify", *place).status == 0
    with LMDBStore.open(computed, create=False) as store:
        (model,) = store.fingerprints()
        kv = store.load(store.refs(model)[0].chunk_id)
    content = bytearray((computed / "data.mdb").read_bytes())
    content[content.find(kv.v[-1, -2].numpy().tobytes()) + 5] ^= 0x10
    (computed / "data.mdb").write_bytes(content)
    found = pdllm("store", "verify", *place, "--json")
    assert found.status == 1
    report = one_object(found)
    assert (report["ok"], len(report["damaged"]), report["repaired"]) == (False, 1, 0)
    shown = pdllm("store", "verify", *place)
    assert shown.status == 1
    assert ": 1 chunk damaged\n" in shown.out
    assert shown.out.endswith("The damaged chunks stay; --repair drops them.\n")
    repaired = pdllm("store", "verify", *place, "--repair")
    assert repaired.status == 1
    assert "The damaged chunks were dropped" in repaired.out
    assert ": 1 chunk without KV\n" in pdllm("store", "verify", *place).out
    assert pdllm("prefill", tmp_path / "a.txt", *place, "--model", tiny_model_path, "--json").status == 0
    assert pdllm("store", "verify", *place).status == 0


def test_verify_says_each_thing_that_is_wrong(pdllm: Pdllm, kb: Path) -> None:
    with LMDBStore.open(kb) as store:
        key = document_key(ONE.digest, "b.md")
        store._transactions.write(lambda tables: tables.delete("texts", key))
    shown = pdllm("store", "verify", "--store", kb)
    assert shown.status == 1
    first, *problems = shown.out.splitlines()
    assert first == "7 chunks and 4 documents checked: 1 thing wrong besides"
    assert problems == ["document 'b.md' has lost its text; add it again"]


def test_computing_a_sample_again_finds_kv_that_is_not_the_models(
    pdllm: Pdllm, computed: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    again = ("--store", computed, "--recompute", "1", "--model", tiny_model_path)
    sound = pdllm("store", "verify", *again)
    assert sound.status == 0
    n_chunks = one_object(pdllm("store", "verify", *again, "--json"))["compared"]
    assert f"{n_chunks} chunks computed again with {tiny_model_path}, {n_chunks} of them as stored\n" in sound.out
    forge(computed)
    assert pdllm("store", "verify", "--store", computed).status == 0
    found = pdllm("store", "verify", *again)
    assert found.status == 1
    assert ": 1 chunk not what the model computes\n" in found.out
    assert found.out.endswith("The differing chunks stay; --repair drops them.\n")
    repaired = one_object(pdllm("store", "verify", *again, "--repair", "--json"))
    assert (len(repaired["differing"]), repaired["repaired"]) == (1, 1)
    argv = ("--store", computed, "--model", tiny_model_path, "--json")
    assert one_object(pdllm("prefill", tmp_path / "a.txt", *argv))["chunks"]["computed"] == 1
    assert pdllm("store", "verify", *again).status == 0


def test_the_sample_follows_from_its_share_and_seed(pdllm: Pdllm, computed: Path, tiny_model_path: Path) -> None:
    forge(computed)
    again = ("--store", computed, "--model", tiny_model_path, "--json", "--recompute", "0.01")
    reports = {seed: one_object(pdllm("store", "verify", *again, "--seed", seed)) for seed in range(20)}
    assert {report["compared"] for report in reports.values()} == {1}
    assert {len(report["differing"]) for report in reports.values()} == {0, 1}
    assert reports[0] == one_object(pdllm("store", "verify", *again))


def test_a_model_that_the_store_holds_nothing_of_compares_nothing(pdllm: Pdllm, computed: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    refused = one_line(pdllm("store", "verify", "--store", computed, "--recompute", "1", "--model", other))
    assert "holds nothing of the model" in refused
    assert "'nope'" in one_line(pdllm("store", "verify", "--store", computed, "--recompute", "1", "--model", "nope"))


def test_verify_shows_its_progress_to_a_person_only(
    pdllm: Pdllm, computed: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    again = ("--store", computed, "--recompute", "1", "--model", tiny_model_path)
    assert one_object(pdllm("store", "verify", *again, "--json"))["ok"]
    assert screen.getvalue() == ""
    shown = pdllm("store", "verify", *again)
    assert "Computing a sample again" in screen.getvalue()
    assert "\x1b" not in shown.out


def test_an_export_answers_as_the_store_did(pdllm: Pdllm, filled: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "kb.pdllm", tmp_path / "copy"
    exported = one_object(pdllm("store", "export", filled, file, "--json"))
    assert exported == {"file": str(file), "bytes": file.stat().st_size}
    imported = one_object(pdllm("store", "import", file, copy, "--json"))
    assert (imported["documents"], imported["unchanged"]) == (2, 0)

    def told(kb: Path) -> list[object]:
        asked = pdllm("ask", "battery", "--store", kb, "--model", tiny_model_path, "--no-abstain", "--json")
        answer = one_object(asked)
        listed = one_object(pdllm("store", "list", "--store", kb, "--json"))
        return [answer["answer"], answer["citations"], answer["stats"]["chunks"], listed]

    assert told(copy) == told(filled)
    assert pdllm("store", "verify", "--store", copy).status == 0
    again = pdllm("store", "import", file, "--store", copy)
    assert "0 documents imported into" in again.out
    assert "2 unchanged" in again.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import file s3://bucket/kb", "import into a folder"),
        ("export nothing file", "there is no store at"),
        ("import README kb", "no export of a store"),
    ],
)
def test_an_export_or_import_that_cannot_be_says_why(
    pdllm: Pdllm, line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README").write_text("no export" * 20)
    assert said in one_line(pdllm("store", *line.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["README"]
