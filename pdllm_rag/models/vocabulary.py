"""A checkpoint's vocabulary, by the `tokenizers` library alone: no remote code, no guessing.

`tokenizer.json` is read where there is one. Dream's family ships vocab.json and merges.txt instead, with a tokenizer
class of its own whose rules are Qwen2's; those are written out here. Added tokens may also stand in
tokenizer_config.json or added_tokens.json; they must have the ids that are declared there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import blake3

from pdllm_rag.errors import ModelFormatError

# Source: transformers Qwen2Tokenizer.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")


class Vocabulary(NamedTuple):
    """A `tokenizers.Tokenizer` that reads no added token out of text, and what the files say of it.

    Attributes:
        added: id of every added token by its text.
        hidden: ids that decoding leaves out.
        byte_level: the decoder's kind.
        digest: BLAKE3 of the files' content.
    """

    backend: Any
    added: dict[str, int]
    hidden: frozenset[int]
    byte_level: bool
    digest: str


def read_vocabulary(folder: Path, settings: dict[str, Any]) -> Vocabulary:
    """Read a folder's tokenizer files; `settings` is its tokenizer_config.json.

    Raises:
        ModelFormatError: there are none, they do not parse, or an added token has another id than declared.
    """
    from tokenizers import AddedToken, Tokenizer

    path = folder / "tokenizer.json"
    if path.is_file():
        content = path.read_bytes()
        try:
            backend = Tokenizer.from_str(content.decode())
            byte_level = (json.loads(content).get("decoder") or {}).get("type") == "ByteLevel"
        except Exception as error:  # the library raises bare Exception
            raise ModelFormatError(f"{path} does not parse as a tokenizer: {error}") from error
    else:
        backend, content = _qwen2(folder, settings)
        byte_level = True
    declared = _declared(folder, settings)
    held = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [declared[token_id] for token_id in sorted(declared) if declared[token_id]["content"] not in held]
    for entry in new:
        token = AddedToken(**entry)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    for token_id, entry in declared.items():
        got = backend.token_to_id(entry["content"])
        if got != token_id:
            raise ModelFormatError(
                f"{folder}: token {entry['content']!r} has id {got} in the vocabulary and {token_id} in "
                "tokenizer_config.json or added_tokens.json; expected one id. The tokenizer's files do not belong "
                "together"
            )
    decoder = backend.get_added_tokens_decoder()
    hidden = frozenset(token_id for token_id, token in decoder.items() if token.special)
    backend.encode_special_tokens = True
    backend.add_special_tokens(
        [  # so that text cannot name the others either; decoding still shows them
            AddedToken(token.content, special=True, normalized=False) for token in decoder.values() if not token.special
        ]
    )
    backend.no_padding()
    backend.no_truncation()
    if new:
        content += json.dumps(new, sort_keys=True).encode()
    added = {token.content: token_id for token_id, token in decoder.items()}
    return Vocabulary(backend, added, hidden, byte_level, blake3.blake3(content).hexdigest())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where there is no file.

    Raises:
        ModelFormatError: the file is something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _qwen2(folder: Path, settings: dict[str, Any]) -> tuple[Any, bytes]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    named = settings.get("tokenizer_class")
    if not (vocab.is_file() and merges.is_file() and named in _QWEN2_CLASSES):
        raise ModelFormatError(
            f"{folder} has no tokenizer.json, and its tokenizer class is {named!r}; expected a tokenizer.json, or "
            f"vocab.json and merges.txt of one of {', '.join(_QWEN2_CLASSES)}. Save one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"{vocab} and {merges.name} do not parse as a vocabulary: {error}") from error
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            words,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, vocab.read_bytes() + merges.read_bytes()


def _declared(folder: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Added tokens by id, as keyword arguments of `AddedToken`."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        found = {
            int(token_id): {"content": content, "special": True, "normalized": False}
            for content, token_id in read_json(folder / "added_tokens.json").items()
        }
        for token_id, entry in (settings.get("added_tokens_decoder") or {}).items():
            found[int(token_id)] = {"content": entry["content"], **{key: entry[key] for key in flags if key in entry}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{folder}: the added tokens are no table of ids: {error}") from error
    return found
