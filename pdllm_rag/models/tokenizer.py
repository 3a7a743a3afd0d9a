"""A checkpoint's tokenizer, read by the `tokenizers` library alone: no remote code, no guessing.

- Text is text: special tokens are never read out of it, so a document that quotes a mask token holds no mask.
- A byte-level vocabulary that was cut can lack bytes. The library drops them and then miscounts every offset behind
  them, so characters that need one are read as U+FFFD, one for one; a warning says how many.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import blake3

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models.families import Template

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """Templated token ids, and which of them are the last message's own words."""

    ids: tuple[int, ...]
    content: range


class Tokenizer:
    """Tokens of one checkpoint.

    Raises:
        ModelFormatError: the folder has no readable tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFormatError(
                f"{folder} has no tokenizer.json; expected a fast tokenizer. Save one with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        content = path.read_bytes()
        try:
            self._backend = Backend.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise ModelFormatError(f"{path} does not parse as a tokenizer: {error}") from error
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self.digest = blake3.blake3(content).hexdigest()
        self.size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self._names = _special_names(folder)
        self._unknown = self._unknown_characters(json.loads(content))

    def special_id(self, kind: str) -> int | None:
        """Id of "mask_token", "bos_token" or "eos_token" as the checkpoint names it, or None."""
        token = self._names.get(kind)
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and the code points [start, end) that each stands for."""
        text, n_unknown = self._unknown.subn("\ufffd", text)
        if n_unknown:
            logger.warning("%d characters are not in the model's vocabulary and are read as U+FFFD", n_unknown)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, template: Template, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Prompt of messages ({"role", "content"}), up to and with the answer's prefix."""
        ids: list[int] = []
        content = range(0)
        for message in messages:
            for piece in template.turn:
                added = self._piece(piece, message)
                if piece == "{content}":
                    content = range(len(ids), len(ids) + len(added))
                ids += added
        for piece in template.answer:
            ids += self._piece(piece, {})
        return Prompt(tuple(ids), content)

    def _unknown_characters(self, content: Mapping[str, Any]) -> re.Pattern[str]:
        """Matches lone surrogates and characters whose UTF-8 holds a byte that a byte-level vocabulary lacks."""
        ranges = [(0xD800, 0xDFFF)]
        if (content.get("decoder") or {}).get("type") == "ByteLevel":
            ranges += self._lacking_ranges()
        return re.compile("[" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges) + "]")

    def _lacking_ranges(self) -> list[tuple[int, int]]:
        lacking = [byte for byte, sign in enumerate(_byte_signs()) if self.token_id(sign) is None]
        if any(0x80 <= byte < 0xC0 for byte in lacking):
            raise ModelFormatError(
                f"the tokenizer's vocabulary lacks continuation bytes ({lacking}); expected all of them"
            )
        ranges = [(byte, byte) for byte in lacking if byte < 0x80]
        for lead, first, per_lead in ((0xC2, 0x80, 0x40), (0xE0, 0x0, 0x1000), (0xF0, 0x0, 0x40000)):
            last = {0xC2: 0xDF, 0xE0: 0xEF, 0xF0: 0xF4}[lead]
            for byte in lacking:
                if lead <= byte <= last:
                    start = first + (byte - lead) * per_lead
                    ranges.append((start, min(start + per_lead - 1, 0x10FFFF)))
        return ranges

    def _piece(self, piece: str, message: Mapping[str, str]) -> list[int]:
        if piece == "{content}":
            return self.encode(message["content"])
        if "{role}" in piece:
            return self.encode(piece.replace("{role}", message["role"]))
        special = self.token_id(piece)
        return self.encode(piece) if special is None else [special]


def _byte_signs() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    signs = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [signs[byte] for byte in range(256)]


def _special_names(folder: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    for filename in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / filename
        if path.is_file():
            try:
                content: dict[str, Any] = json.loads(path.read_text())
            except ValueError as error:
                raise ModelFormatError(f"{path} is no JSON: {error}") from error
            for kind in ("mask_token", "bos_token", "eos_token"):
                token = content.get(kind)
                if isinstance(token, dict):
                    token = token.get("content")
                if token is not None:
                    names[kind] = token
    return names
