"""Where the prompt templates that people use put the context, and where the question.

- context stands in tags such as <context>, else between two rules of dashes, else behind a label such as "Context:" or
  "these documents:", or in the paragraphs behind "the following pieces of context", up to a label such as "Question:";
- the question stands behind a label such as "Question:", in Open WebUI's template behind the context's tags.
"""

from __future__ import annotations

import re

_CONTEXT = r"(?:contexts?|documents?|sources?|passages?|excerpts?|snippets?)"
_POINTING = rf"\b(?P<pointing>%s)[ \t]+(?:\w+[ \t]+){{0,3}}?{_CONTEXT}\b"
_TAG = re.compile(rf"</?{_CONTEXT}\b[^<>]*>", re.IGNORECASE)
_TAGS = re.compile(rf"<({_CONTEXT})\b[^<>]*>((?:(?!<{_CONTEXT}\b).)*?)</\1>", re.IGNORECASE | re.DOTALL)  # innermost
_OPEN_WEBUI = re.compile(rf"\A\s*### Task:.*</{_CONTEXT}>(?P<question>.*)\Z", re.IGNORECASE | re.DOTALL)
_RULE = re.compile(r"^[ \t]*([-=_*#])\1{2,}[ \t]*$", re.MULTILINE)
_LABEL = re.compile(
    rf"(?:(?:^|[.!?][ \t]+)[^\w\n]{{0,8}}(?:(?:retrieved|relevant|provided|reference)[ \t]+)?{_CONTEXT}"
    rf"|{_POINTING % 'following|below|given|provided|retrieved|relevant|these|this'}(?:[ \t]+\w+){{0,4}})[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_ANNOUNCED = re.compile(_POINTING % "following|below", re.IGNORECASE)
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")
_QUESTION = re.compile(r"^[^\w\n]*(?:user(?:'s)?[ \t]+)?(?:question|query)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_ANSWER = re.compile(r"^[^\w\n]*(?:\w+[ \t]+)?(?:answer|response)[ \t]*:", re.IGNORECASE | re.MULTILINE)

_INSTRUCTION = re.compile(
    rf"^[^\w\n]*instructions?[ \t]*:.*\b(?:above|{_CONTEXT})\b", re.IGNORECASE | re.MULTILINE
)  # one about the context: a document may have other ones


def context_regions(text: str, *, is_question: bool) -> list[tuple[int, int]]:
    """Code points [start, end) where context is expected.

    Args:
        is_question: the question is in this text too, so that a label counts only if there is one for the question.
    """
    if found := [match.span(2) for match in _TAGS.finditer(text)]:
        return found
    if is_question and _QUESTION.search(text) is None:
        return []
    rules = list(_RULE.finditer(text))
    if len(rules) > 1:
        return [(rules[0].end(), rules[-1].start())]
    for label in _LABEL.finditer(text):
        line_end = text.find("\n", label.end())
        rest_of_line = text[label.end() : line_end if line_end >= 0 else len(text)]
        if is_question or not label["pointing"] or not rest_of_line.strip():
            return [(label.end(), _end(text, label.end()))]
    announced = _ANNOUNCED.search(text)
    empty_line = announced and _EMPTY_LINE.search(text, announced.end())
    return [(empty_line.end(), _end(text, empty_line.end()))] if empty_line else []


def labelled_question(text: str) -> str | None:
    """What stands behind the last label of a question, up to one of an answer or of context; None without one."""
    labels = list(_QUESTION.finditer(text))
    if not labels:
        behind = _OPEN_WEBUI.search(text)
        return behind and (behind["question"].strip() or None)
    start = labels[-1].end()
    following = [match.start() for pattern in (_ANSWER, _LABEL) if (match := pattern.search(text, start))]
    return text[start : min(following, default=len(text))].strip() or None


def without_tags(text: str) -> str:
    """A text without the tags that context is put in."""
    return _TAG.sub("", text)


def is_template(text: str, *, is_question: bool) -> bool:
    """Whether a text has a place for context, or a labelled question with anything before it or another label behind.

    A question that is labelled and nothing else ("Question: who?") is none.
    """
    if context_regions(text, is_question=is_question):
        return True
    label = _QUESTION.search(text) if is_question and labelled_question(text) else None
    return label is not None and (label.start() > 0 or _ANSWER.search(text, label.end()) is not None)


def _end(text: str, start: int) -> int:
    """Where context ends: at the last label from `start` on of a question, else an answer, else an instruction."""
    for pattern in (_QUESTION, _ANSWER, _INSTRUCTION):
        if labels := list(pattern.finditer(text, start)):
            return labels[-1].start()
    return len(text)
