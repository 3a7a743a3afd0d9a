"""The YAML block at the top of a Markdown file, between two lines of dashes: what it says is metadata, not text.

It is one only if the file's first line is `---` and the next that is no comment names a key, so that a text may begin
with a rule. Aliases are not read: they could make a small block unfold to any size.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pdllm_rag.errors import UnreadableDocumentError
from pdllm_rag.metadata import plain

MAX_CHARS = 64 * 2**10  # of the block; YAML is read slowly

_BEGIN = re.compile(r"---[ \t]*\r?\n(?=(?:#[^\n]*\n)*(?:---[ \t]*\r?$|[\"']?\w[^\n:]{0,100}:(?:[ \t\r]|$)))", re.M)
_END = re.compile(r"^(?:---|\.\.\.)[ \t]*\r?(?:\n|\Z)", re.M)


def parted(text: str, name: str) -> tuple[dict[str, Any], str]:
    """The metadata of a Markdown text and the text behind it; `name` stands in messages.

    Raises:
        UnreadableDocumentError: the block is not closed, too long, no YAML, or no mapping of names to plain values.
    """
    begin = _BEGIN.match(text)
    if begin is None:
        return {}, text
    end = _END.search(text, begin.end())
    if end is None or end.start() > begin.end() + MAX_CHARS:
        raise _bad(name, 1, f"is not closed by a line of dashes within {MAX_CHARS:,} characters")
    from yaml import YAMLError

    try:
        found = plain(_load(text[begin.end() : end.start()]), "it")
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()  # what JSON cannot hold is refused
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it holds signs that YAML does not admit"
        raise _bad(name, 2 + (mark.line if mark else 0), f"is no YAML: {problem}") from error
    except Exception as error:  # a value that is none of its type (`!!bool x`) makes PyYAML raise nearly anything
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"
        raise _bad(name, 1, f"cannot be kept: {reason}") from error
    if not isinstance(found, dict | None):
        raise _bad(name, 2, f"is a {type(found).__name__}; expected lines of `key: value`")
    return found or {}, text[end.end() :]


def _load(block: str) -> Any:
    from yaml import AliasEvent, MarkedYAMLError, SafeLoader, parse, safe_load

    for event in parse(block, Loader=SafeLoader):
        if isinstance(event, AliasEvent):
            raise MarkedYAMLError(problem="aliases (*name) are not read", problem_mark=event.start_mark)
    return safe_load(block)


def _bad(name: str, line: int, problem: str) -> UnreadableDocumentError:
    return UnreadableDocumentError(
        f"{name}: line {line}: the front matter {problem}. Mend it, or, if the first line is only a rule, put an empty "
        "line below it"
    )
