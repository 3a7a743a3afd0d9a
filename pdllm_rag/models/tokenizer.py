"""Text to tokens and back, for one checkpoint.

- Text is text: special tokens are never read out of it, so a document that quotes a mask token holds no mask.
- A byte-level vocabulary that was cut can lack bytes. The library drops them and then miscounts every offset behind
  them, so characters that need one are read as U+FFFD, one for one; a warning says how many.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models.chat import Spoken, split_conversation
from pdllm_rag.models.vocabulary import read_json, read_vocabulary

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """Templated token ids, and which of them are the last message's own words."""

    ids: tuple[int, ...]
    content: range


class Tokenizer:
    """Tokens of one checkpoint.

    Attributes:
        size: ids are below it.
        chat_template: the checkpoint's own Jinja source, or None.

    Raises:
        ModelFormatError: the folder has no readable tokenizer files.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_json(folder / "tokenizer_config.json")
        self._backend, self._added, self._hidden, byte_level, self.digest = read_vocabulary(folder, settings)
        self.size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self._names = _special_names({**read_json(folder / "special_tokens_map.json"), **settings})
        self.chat_template = _chat_template(folder, settings)
        self._unknown = self._unknown_characters(byte_level)
        texts = sorted(self._added, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def special_id(self, kind: str) -> int | None:
        """Id of "mask_token", "bos_token" or "eos_token" as the checkpoint names it, or None."""
        token = self._names.get(kind)
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """Text of a token in the vocabulary, or None."""
        found: str | None = self._backend.id_to_token(token_id)
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
        shown = [token_id for token_id in ids if token_id not in self._hidden]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def render(self, fallback: str, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Prompt of messages ({"role", "content"}), up to and with the answer's prefix.

        Args:
            fallback: the chat template where the checkpoint has none.

        Raises:
            RequestError: the template refuses the conversation.
        """
        ids: list[int] = []
        content = range(0)
        for piece in split_conversation(self.chat_template or fallback, messages, self._names):
            added = self.encode(piece.text) if isinstance(piece, Spoken) else self._with_marks(piece)
            if isinstance(piece, Spoken) and piece.message == len(messages) - 1:
                content = range(len(ids), len(ids) + len(added))
            ids += added
        return Prompt(tuple(ids), content)

    def _with_marks(self, text: str) -> list[int]:
        """Ids of a template's own text, added tokens recognised in it."""
        ids: list[int] = []
        for part in self._marks.split(text) if self._marks else [text]:
            ids += [self._added[part]] if part in self._added else self.encode(part)
        return ids

    def _unknown_characters(self, byte_level: bool) -> re.Pattern[str]:
        """Matches lone surrogates and characters whose UTF-8 holds a byte that a byte-level vocabulary lacks."""
        ranges = [(0xD800, 0xDFFF)]
        if byte_level:
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


def _byte_signs() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    signs = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [signs[byte] for byte in range(256)]


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by name ("bos_token", ...)."""
    names = {}
    for kind, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if kind.endswith("_token") and isinstance(text, str):
            names[kind] = text
    return names


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None
