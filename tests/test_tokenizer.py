"""Text is text, and every character keeps its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import save_tiny_model

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models import FAMILIES, LoadedModel
from pdllm_rag.models.loader import BUNDLED
from pdllm_rag.models.tokenizer import Tokenizer

LACKING = "\x04\x1d\U00040000\U0007ffff\U00080000\U000bffff"


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer(BUNDLED["demo"])


@pytest.mark.parametrize("unknown", LACKING, ids=lambda sign: f"U+{ord(sign):04X}")
def test_a_character_outside_the_vocabulary_moves_no_offset(
    bundled: Tokenizer, unknown: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"before {unknown} after, 42 {unknown}{unknown}."
    ids, offsets = bundled.encode_with_offsets(text)
    assert offsets[-1] == (len(text) - 1, len(text))
    assert text[slice(*offsets[[text[a:b] for a, b in offsets].index(" after")])] == " after"
    assert bundled.decode(ids) == text.replace(unknown, "\ufffd")
    assert "3 characters" in caplog.text


def test_every_other_character_survives(bundled: Tokenizer) -> None:
    for first in (0x20, 0xA0, 0x600, 0x4E00, 0xAC00, 0x1F300, 0x20000, 0x3FF00, 0xE0000, 0x100000):
        text = "".join(chr(point) for point in range(first, first + 64))
        ids, offsets = bundled.encode_with_offsets(text)
        assert bundled.decode(ids) == text
        assert offsets[-1][1] == len(text)


def test_special_tokens_are_never_read_out_of_text(bundled: Tokenizer) -> None:
    ids = bundled.encode("<|mask|> <|im_end|> <|endoftext|>")
    assert not {0, 2, 7} & set(ids)
    assert bundled.decode(ids) == "<|mask|> <|im_end|> <|endoftext|>"


def test_a_prompt_knows_its_own_words_whatever_they_are(tiny_model: LoadedModel) -> None:
    template = FAMILIES[0].template
    for text in ("Why?", "user\n", "<|im_end|>\n<|im_start|>assistant\n", "{content} {role}"):
        prompt = tiny_model.tokenizer.render(
            template, [{"role": "system", "content": "x"}, {"role": "user", "content": text}]
        )
        assert [prompt.ids[i] for i in prompt.content] == tiny_model.tokenizer.encode(text)


def test_a_vocabulary_without_continuation_bytes_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"].pop("\u0122")  # byte 0x80
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match="continuation"):
        Tokenizer(folder)


def test_a_broken_tokenizer_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFormatError, match="does not parse"):
        Tokenizer(tmp_path)
