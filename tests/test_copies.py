"""Copies of stored chunks in other texts are found, whatever white space does to them, and nothing else is."""

from __future__ import annotations

import random
import textwrap
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import ChunkRef, MemoryStore

from pdllm_rag import InputDocument, RagEngine
from pdllm_rag.copies import Copies
from pdllm_rag.models import LoadedModel
from pdllm_rag.squeezing import ANCHOR_SIGNS, signs_of, squeeze

WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "juniper", "larch", "maple", "oak", "pine", "rowan", "yew")


def prose(seed: int, n_words: int) -> str:
    """Words with sentence ends and paragraphs, different for each seed."""
    rng = random.Random(seed)
    words = [f"{rng.choice(WORDS)}{seed}" if rng.random() < 0.3 else rng.choice(WORDS) for _ in range(n_words)]
    return " ".join(word + rng.choice(("", "", "", ".", ".\n\n")) for word in words).strip()


TEXTS = {
    "long": prose(1, 120),
    "other": prose(2, 60),
    "short": "Tea is at four.",
    "accents": "Le café de Zoë est fermé le lundi, le mardi et le jour de Noël jusqu'à midi.",
    "signs": "国家安全局今天在首都宣布了关于远洋浮标和气象站的全部新的维护规定。" * 3,
    "tail": f"{prose(3, 12)}\n\nEnd.",
}


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel) -> Iterator[RagEngine]:
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=100) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        yield engine


@pytest.fixture(scope="module")
def copies(engine: RagEngine) -> Copies:
    return Copies(engine.store, engine.fingerprint, engine._index)


@pytest.fixture(scope="module")
def chunks(engine: RagEngine) -> dict[ChunkRef, str]:
    """Every stored chunk's text."""
    refs = engine.store.refs(engine.fingerprint)
    return {ref: TEXTS[ref.doc_id][ref.char_start : ref.char_end] for ref in refs}


def of(doc_id: str, chunks: dict[ChunkRef, str]) -> list[bytes]:
    return [ref.chunk_id for ref in chunks if ref.doc_id == doc_id]


def found(copies: Copies, text: str) -> list[bytes]:
    return [copy.chunk_id for copy in copies.find(text)]


@pytest.mark.parametrize("doc_id", TEXTS)
def test_a_whole_document_is_the_ordered_run_of_its_chunks(
    copies: Copies, chunks: dict[ChunkRef, str], doc_id: str
) -> None:
    text = f"Read this:\n{TEXTS[doc_id]}\nand answer."
    expected = of(doc_id, chunks)
    assert found(copies, text) == expected
    inside = "".join(text[copy.start : copy.end] for copy in copies.find(text))
    assert signs_of(inside) == signs_of(TEXTS[doc_id])


@pytest.mark.parametrize("width", [20, 60, 10_000])
@pytest.mark.parametrize("doc_id", ["long", "accents", "tail"])
def test_wrapping_indenting_and_line_ends_do_not_matter(
    copies: Copies, chunks: dict[ChunkRef, str], doc_id: str, width: int
) -> None:
    wrapped = textwrap.fill(TEXTS[doc_id], width, break_on_hyphens=False, break_long_words=False)
    for text in (wrapped, textwrap.indent(wrapped, "    "), wrapped.replace("\n", "\r\n")):
        assert found(copies, text) == of(doc_id, chunks)


def test_composed_and_decomposed_spellings_are_one(copies: Copies, chunks: dict[ChunkRef, str]) -> None:
    decomposed = unicodedata.normalize("NFD", f"> {TEXTS['accents']} <")
    assert found(copies, decomposed) == of("accents", chunks)
    (first, *_), (*_, last) = copies.find(decomposed), copies.find(decomposed)
    assert unicodedata.normalize("NFC", decomposed[first.start : last.end]) == TEXTS["accents"]


def test_chunks_in_any_order_are_found_in_that_order(copies: Copies, chunks: dict[ChunkRef, str]) -> None:
    picked = [(ref.chunk_id, text) for ref, text in chunks.items() if len(signs_of(text)) >= ANCHOR_SIGNS][::-2]
    prompt = "\n\n---\n\n".join(text.strip() for _, text in picked)
    assert found(copies, f"Context: {prompt}\n\nQuestion: who?") == [chunk_id for chunk_id, _ in picked]


def test_a_text_that_lacks_or_changes_a_word_of_a_chunk_is_no_copy(copies: Copies, chunks: dict[ChunkRef, str]) -> None:
    text = next(text for ref, text in chunks.items() if ref.doc_id == "other").strip()
    for other in (text[:-3], text[3:], text.replace(" ", " x ", 1), text.upper(), text.replace(text[10], "é", 1)):
        assert found(copies, f"So: {other}") == []


def test_a_short_chunk_must_fill_lines(copies: Copies, chunks: dict[ChunkRef, str]) -> None:
    expected = of("short", chunks)
    for text in ("a\nTea is at four.\nb", "Tea  is\nat four.", "Context: Tea is at four. \nAnswer:"):
        assert found(copies, text) == expected
    for text in ("I hear that Tea is at four. Is it?", "Tea is at four. Really?", "What? Tea is at four."):
        assert found(copies, text) == []


def test_a_short_last_chunk_is_known_behind_the_chunk_before_it(tiny_model: LoadedModel) -> None:
    text = "A harbour master keeps a list of all boats, their owners, crews and cargo.\nNo more."
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=77) as engine:
        engine.prefill([InputDocument("a", text, "a")])
        refs = engine.store.refs(engine.fingerprint)
        assert [len(signs_of(text[ref.char_start : ref.char_end])) for ref in refs] == [61, 7]
        copies = Copies(engine.store, engine.fingerprint, engine._index)
        prompt = f"Is it so? {text} I wonder."
        assert found(copies, prompt) == [ref.chunk_id for ref in refs]


def test_deleted_and_changed_documents_are_no_longer_found(tiny_model: LoadedModel) -> None:
    texts = {"a": prose(7, 30), "b": prose(8, 30)}
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=400) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in texts.items()])
        copies = Copies(engine.store, engine.fingerprint, engine._index)
        prompt = "\n\n".join(texts.values())
        assert len(found(copies, prompt)) == 2
        engine.delete("a")
        assert len(found(copies, prompt)) == 1
        engine.prefill([InputDocument("b", f"New. {texts['b']}", "b")])
        assert found(copies, prompt) == []


def test_the_index_on_disk_finds_copies_after_it_is_opened_again(tmp_path: Path, tiny_model: LoadedModel) -> None:
    text = prose(9, 30)
    for _ in range(2):
        with RagEngine.open(tmp_path / "kb", tiny_model, chunk_len=400) as engine:
            engine.prefill([InputDocument("a", text, "a")])
            assert len(found(Copies(engine.store, engine.fingerprint, engine._index), f"x {text}")) == 1


# -- against a slow reference --------------------------------------------------------------------------------------


def most_covered(text: str, texts: list[str]) -> int:
    """Most signs of a text that whole chunk texts can cover without overlap, by trying everything."""
    signs, beginnings = squeeze(text).signs, set(squeeze(text).beginnings())
    stored = [one for one in map(signs_of, texts) if len(one) >= ANCHOR_SIGNS]

    @cache
    def best(at: int) -> int:
        if at >= len(signs):
            return 0
        fitting = [one for one in stored if at in beginnings and signs.startswith(one, at)]
        return max([best(at + 1), *(len(one) + best(at + len(one)) for one in fitting)])

    for at in range(len(signs), -1, -50):
        best(at)  # from behind, so that recursion stays shallow
    return best(0)


PIECES = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from(("whole", "two", "half", "wrapped", "filler"))), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(PIECES)
def test_as_much_as_possible_is_covered_by_copies_that_are_ones(
    copies: Copies, chunks: dict[ChunkRef, str], pieces: list[tuple[int, str]]
) -> None:
    long = [(ref, text) for ref, text in chunks.items() if ref.doc_id in ("long", "other")]
    long = [(ref, text) for ref, text in long if len(signs_of(text)) >= ANCHOR_SIGNS]
    parts = []
    for number, kind in pieces:
        at = number % (len(long) - 1)
        text = long[at][1]
        two = text + long[at + 1][1]
        parts.append(
            {
                "whole": text.strip(),
                "two": two,
                "half": text[number % 20 :],
                "wrapped": textwrap.fill(two, 30),
                "filler": prose(number, 4),
            }[kind]
        )
    prompt = "\n".join(parts)
    by_id = {ref.chunk_id: text for ref, text in long}
    result = copies.find(prompt)
    assert all(signs_of(prompt[copy.start : copy.end]) == signs_of(by_id[copy.chunk_id]) for copy in result)
    assert all(a.end <= b.start for a, b in pairwise(result))
    covered = sum(len(signs_of(by_id[copy.chunk_id])) for copy in result)
    assert covered == most_covered(prompt, [text for _, text in long])
