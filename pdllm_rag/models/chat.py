"""Chat templates, rendered so that no message can open or close a turn.

The template never sees a message's text. It is rendered, by the library's sandbox, with a mark in place of each
content and split there; only its own pieces are searched for special tokens, contents are put in as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdllm_rag.errors import ModelFormatError, RequestError

# Private-use signs that the template cannot mean; the outer spaces (U+2003) tell whether it trims contents.
_MARK = "\u2003\ue000{}\ue001\u2003"
_MARKS = re.compile("(\u2003?)\ue000(\\d+)\ue001(\u2003?)")
_ROLE = re.compile(r"\w+")


class Spoken(NamedTuple):
    """A message's content within a rendered template."""

    message: int
    text: str


def split_conversation(
    template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]
) -> list[str | Spoken]:
    """The template's own pieces and the contents, in order, up to and with the answer's prefix.

    Args:
        template: Jinja source.
        tokens: texts of special tokens by name, such as "bos_token".

    Raises:
        RequestError: a role is no word, or the template refuses the conversation.
        ModelFormatError: the template leaves the last message out.
    """
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    bad = [message["role"] for message in messages if not _ROLE.fullmatch(message["role"])]
    if bad:
        raise RequestError(f"a message has the role {bad[0]!r}; expected a word such as system, user or assistant")
    marked = [{"role": message["role"], "content": _MARK.format(i)} for i, message in enumerate(messages)]
    try:
        rendered = render_jinja_template([marked], chat_template=template, add_generation_prompt=True, **tokens)[0][0]
    except TemplateSyntaxError as error:
        raise ModelFormatError(f"the model's chat template does not parse: {error}") from error
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise RequestError(f"the model's chat template refuses a conversation of {roles}: {error}") from error
    except (ArithmeticError, LookupError, ValueError, RecursionError, MemoryError) as error:
        raise ModelFormatError(f"the model's chat template fails: {type(error).__name__}: {error}") from error
    pieces: list[str | Spoken] = []
    own, before, number, after = 0, 1, 2, 3
    parts = _MARKS.split(rendered)
    for start in range(0, len(parts) - 1, 4):
        message = int(parts[start + number])
        text = messages[message]["content"]
        text = text if parts[start + before] else text.lstrip()
        pieces += [parts[start + own], Spoken(message, text if parts[start + after] else text.rstrip())]
    pieces.append(parts[-1])
    last = len(messages) - 1
    if sum(isinstance(piece, Spoken) and piece.message == last for piece in pieces) != 1:
        raise ModelFormatError("the model's chat template does not show the last message once; expected it to")
    return [piece for piece in pieces if piece != ""]
