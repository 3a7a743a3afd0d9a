"""Chunks of a text: nothing lost, nothing doubled, limits kept, characters whole."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdllm_rag.chunking import is_blank, recipe, split, text_id
from pdllm_rag.models.loader import BUNDLED
from pdllm_rag.models.tokenizer import Tokenizer

SENTENCES = "One fish swims. Two fish swim too! Do three fish swim? Four of them do. "
TEXTS = st.text(
    st.one_of(st.sampled_from("ab \n.é漢字。😀\u200b\u0301\r\t"), st.characters(exclude_categories=("Cs",))),
    max_size=120,
)
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def byte_encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """One token per byte."""
    pairs = [(byte, (i, i + 1)) for i, char in enumerate(text) for byte in char.encode()]
    return [byte for byte, _ in pairs], [offset for _, offset in pairs]


def word_encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """One token per word, blanks in none of them: offsets with gaps."""
    offsets = []
    begin = None
    for i, char in enumerate(text + " "):
        if char.isspace():
            if begin is not None:
                offsets.append((begin, i))
            begin = None
        elif begin is None:
            begin = i
    return list(range(len(offsets))), offsets


ENCODERS = {"byte": byte_encode, "word": word_encode, "real": Tokenizer(BUNDLED["demo"]).encode_with_offsets}


@PROPERTY
@given(
    text=TEXTS,
    chunk_len=st.integers(2, 40),
    name=st.sampled_from(sorted(ENCODERS)),
)
def test_chunks_tile_text_and_tokens(text, chunk_len, name):
    encode = ENCODERS[name]
    ids, offsets = encode(text)
    spans, n_blank = split(text, encode, chunk_len=chunk_len)

    if spans:
        assert "".join(text[s.char_start : s.char_end] for s in spans) == text
    else:
        assert is_blank(text)
    assert all(a.char_end == b.char_start for a, b in pairwise(spans))
    assert all(s.char_start < s.char_end and s.token_ids.dtype == np.int32 for s in spans)
    if chunk_len >= 5:  # four tokens beside the BOS hold any one character
        assert all(1 <= len(s.token_ids) < chunk_len for s in spans)
    joined = [int(i) for s in spans for i in s.token_ids]
    if n_blank == 0:
        assert joined == ids
    else:
        visible = [i for i, (a, b) in zip(ids, offsets, strict=True) if not is_blank(text[a:b])]
        remaining = iter(ids)
        assert all(i in remaining for i in joined)  # a subsequence of the whole
        kept = iter(joined)
        assert all(i in kept for i in visible)  # that has every visible token


@PROPERTY
@given(text=TEXTS, chunk_len=st.integers(2, 12), name=st.sampled_from(["byte", "real"]))
def test_no_chunk_starts_inside_a_character(text, chunk_len, name):
    _, offsets = ENCODERS[name](text)
    spans, n_blank = split(text, ENCODERS[name], chunk_len=chunk_len)
    at = 0
    if n_blank:
        return
    for span in spans:
        assert all(end <= offsets[at][0] for _, end in offsets[:at])
        at += len(span.token_ids)


@pytest.mark.parametrize("name", ["byte", "real"])
def test_without_a_place_to_cut_at_every_run_but_the_last_is_full(name):
    text = "plainlettersofasciionly" * 40
    lengths = [len(s.token_ids) for s in split(text, ENCODERS[name], chunk_len=10).spans]
    assert set(lengths[:-1]) == {9}
    assert 1 <= lengths[-1] <= 9


def test_an_emoji_moves_the_cut_back_to_its_first_token():
    spans = split("ab😀cd", byte_encode, chunk_len=5).spans
    assert [s.token_ids.tobytes()[::4] for s in spans] == [b"ab", "😀".encode(), b"cd"]


def test_a_character_longer_than_a_chunk_stays_whole():
    spans = split("a😀b", byte_encode, chunk_len=3).spans
    assert [(s.char_start, s.char_end, len(s.token_ids)) for s in spans] == [(0, 1, 1), (1, 2, 4), (2, 3, 1)]


@pytest.mark.parametrize("name", ["byte", "real"])
def test_sentence_cut_ends_at_a_sentence(name):
    text = SENTENCES * 8
    limit = 80 if name == "byte" else 24
    for span in split(text, ENCODERS[name], chunk_len=limit).spans:
        assert text[span.char_start : span.char_end].rstrip().endswith((".", "!", "?"))


def test_a_paragraph_end_is_preferred_to_a_later_sentence_end():
    text = "A short paragraph, which ends here.\n\nNext one. And more. " + "x" * 60
    first = split(text, byte_encode, chunk_len=61).spans[0]
    assert text[: first.char_end] == "A short paragraph, which ends here.\n\n"


def test_a_sentence_end_needs_no_blank_in_chinese_and_counts_closing_quotes():
    text = "甲乙丙丁戊己庚。」辛壬癸子丑寅卯辰巳午未申酉戌亥" * 2
    first = split(text, byte_encode, chunk_len=40).spans[0]
    assert text[: first.char_end] == "甲乙丙丁戊己庚。」"


def test_an_abbreviation_before_a_small_letter_ends_no_sentence():
    text = "We met a great many. They had fruit, e.g. apples and so on and on and on"
    first = split(text, byte_encode, chunk_len=43).spans[0]
    assert text[: first.char_end].rstrip() == "We met a great many."
    assert split(text, byte_encode, chunk_len=43).spans[0].char_end == 21


def test_a_line_end_is_preferred_to_a_blank():
    text = "item number one\nitem two is here and goes on"
    first = split(text, byte_encode, chunk_len=25).spans[0]
    assert text[: first.char_end] == "item number one\n"


def test_a_break_in_the_first_half_is_not_used():
    text = "Yes. " + "x" * 60
    assert split(text, byte_encode, chunk_len=33).spans[0].char_end == 32


@pytest.mark.parametrize("text", ["", " ", "  \n\t", "\u200b\u200b\ufeff", "\x00"])
def test_blank_text_has_no_chunks(text):
    spans, n_blank = split(text, byte_encode, chunk_len=8)
    assert spans == []
    assert (n_blank > 0) == (text != "")


def test_blank_runs_are_dropped_and_counted_and_the_good_sentence_stays():
    text = "\n" * 50 + "The key is under the mat." + "\u200b \n" * 20
    spans, n_blank = split(text, byte_encode, chunk_len=33)
    assert n_blank >= 2
    assert "".join(text[s.char_start : s.char_end] for s in spans) == text
    assert b"The key is under the mat." in b"".join(bytes(s.token_ids.astype(np.uint8)) for s in spans)


def test_quotes_extend_over_gaps_between_tokens():
    text = "  one   two\nthree  "
    spans = split(text, word_encode, chunk_len=2).spans
    assert [text[s.char_start : s.char_end] for s in spans] == ["  one   ", "two\n", "three  "]


def test_control_words_in_a_document_are_ordinary_text():
    spans = split("the form says <|mask|> here", ENCODERS["real"], chunk_len=160).spans
    assert 7 not in spans[0].token_ids


@pytest.mark.parametrize(
    "text",
    ["x" * 1_000_000, "漢字" * 166_000, SENTENCES * 14_000, "\n" * 1_000_000],
    ids=["no blank", "chinese", "prose", "only line ends"],
)
def test_a_megabyte_is_cut_in_seconds(text):
    begin = time.perf_counter()
    result = split(text, ENCODERS["real"], chunk_len=160)
    assert result.spans or result.n_blank
    assert time.perf_counter() - begin < 10  # 3 s when the machine is idle


@pytest.mark.parametrize("chunk_len", [1, 0, -5])
def test_a_chunk_len_without_room_is_refused_with_value_and_limit(chunk_len):
    with pytest.raises(ValueError, match=rf"chunk_len is {chunk_len}, but must be at least 2"):
        split("text", byte_encode, chunk_len=chunk_len)
    with pytest.raises(ValueError, match="at least 2"):
        recipe(chunk_len)


def test_offsets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 token ids and 1 offsets"):
        split("text", lambda _: ([1, 2], [(0, 1)]), chunk_len=8)
    with pytest.raises(ValueError, match="code points, not bytes"):
        split("é", lambda _: ([1], [(0, 2)]), chunk_len=8)


def test_the_recipe_is_stable_text():
    assert recipe(160) == "split=1 chunk_len=160 cut=sentence"


def test_two_spellings_of_a_text_have_one_id():
    assert text_id("re\u0301sume\u0301") == text_id("r\u00e9sum\u00e9")
    assert text_id("\u1112\u1161\u11ab") == text_id("\ud55c")
    assert text_id("a \r\nb\t\rc\n") == text_id("a\nb\nc") == text_id("\n a\nb\nc".strip())
    assert len(text_id("")) == 16


def test_different_texts_have_different_ids():
    texts = ["a b", "a  b", "ab", "A b", "a\nb", "a\n\nb", "１", "1", "x\n  y", "x\ny"]
    assert len({text_id(text) for text in texts}) == len(texts)


def test_a_tower_of_combining_marks_takes_linear_time():
    begin = time.perf_counter()
    assert text_id("a" + "\u0301\u0316" * 500_000) != text_id("a" + "\u0316\u0301" * 500_000 + "b")
    assert time.perf_counter() - begin < 5


def test_half_a_surrogate_pair_has_an_id():
    assert text_id("a\ud800") != text_id("a")
