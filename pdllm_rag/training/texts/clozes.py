"""Questions made from a sentence by rule: blanks, wh-words in place of a span, inverted ones."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pdllm_rag.training.texts.corpus import Row
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.spans import Span, names, spans, values
from pdllm_rag.training.texts.words import STOP_WORDS, content, folded, stands_in, words

_BLANKS = ("____", "____", "___", "...", "[blank]", "[?]")
_FILLS = ("{}", "{}", "Fill in the blank: {}", "Complete the sentence: {}", "What is missing? {}", "Fill the gap: {}")
_CLAUSE_END = re.compile(r"[;:()—]|, | and (?=\w+ \w+ )| -- |, ?$")
_CLAUSE_WORDS = (5, 22)
_TAIL = re.compile(r"\b(?:of|in|to|by|for|with|as|the|a|an|from) ((?:[^\W\d_][\w'’-]*)(?: [\w'’-]+){0,3})[.!?]$")
_WHEN = re.compile(
    r"(?P<subject>[A-Z][^,;:()]{2,60}?) (?P<aux>was|were|is|are|will be) (?P<rest>[a-z][^,;:()]{4,80}?)"
    r" (?:in|on|at|during|since) (?P<date>[^,;:()]{4,20}?)(?:[,.;(]| and\b|$)"
)
_PAST = {
    "began": "begin", "became": "become", "won": "win", "left": "leave", "died": "die", "moved": "move",
    "opened": "open", "closed": "close", "joined": "join", "returned": "return", "arrived": "arrive",
    "started": "start", "ended": "end", "founded": "found", "wrote": "write", "published": "publish",
    "released": "release", "took": "take", "made": "make", "received": "receive", "signed": "sign",
    "entered": "enter", "married": "marry", "established": "establish", "invented": "invent", "lost": "lose",
    "introduced": "introduce", "created": "create", "bought": "buy", "sold": "sell", "gave": "give",
    "built": "build", "discovered": "discover", "proposed": "propose", "announced": "announce", "led": "lead",
    "adopted": "adopt", "launched": "launch", "completed": "complete", "acquired": "acquire", "fell": "fall",
    "defeated": "defeat", "produced": "produce", "visited": "visit", "went": "go", "came": "come",
}  # fmt: skip
_STOP = r"(?:[,.;(]| and\b| but\b|$)"
_VERBS = "|".join(_PAST)
_DID = re.compile(
    rf"(?P<subject>[A-Z][^,;:()]{{2,50}}?) (?P<verb>{_VERBS}) (?P<rest>[^,;:()]{{0,80}}?)"
    rf"(?: ?\b(?:in|on) (?P<date>[^,;:()]{{4,20}}?)){_STOP}"
)
_DATED = re.compile(
    r"(?:In|On|By|Since) (?P<date>[^;:()]{4,20}?), (?P<subject>[A-Zat][^,;:()]{2,60}?) "
    rf"(?:(?P<aux>was|were) (?P<rest>[a-z][^,;:()]{{6,90}}?)|(?P<verb>{_VERBS})(?P<object> [^,;:()]{{6,90}}?)){_STOP}"
)
_WHERE = re.compile(
    r"(?P<subject>[A-Z][^,;:()]{2,60}?) (?P<aux>is|are|was|were) (?P<rest>located|situated|based|born|held|buried|"
    r"raised|educated|headquartered|found|built|filmed) (?:in|at|near|on) (?P<place>.+)"
)
_MANY = re.compile(
    rf"(?P<subject>[A-Z][^,;:()]{{2,60}}?) (?P<verb>has|have|had|{_VERBS}) (?P<number>[\w.,]+?) "
    rf"(?P<noun>[a-z]\w+s)(?P<rest>(?: [^,;:()]{{2,60}}?)?){_STOP}"
)
_WHO = re.compile(rf"(?P<name>.+?) (?P<rest>(?:was|is|has|had|{_VERBS}|[a-z]{{3,}}ed) [^,;:()]{{10,100}}?)(?:[,.;(]|$)")
_AFTER_NAME = re.compile(r"$|[,;:)]|\s(?:in|on|at|and|by|for|to|with|from|as|during|after|before|until|who|which)\b")
_VAGUE = re.compile(
    r"^(?:He|She|It|They|This|These|Those|That|There|His|Her|Its|Their|We|You|In|On|At|As|When|While|After|Before|If"
    r"|Although|Since|During|By|For|From|One|Some|Many|Most|Another|Both|Here|What|Who)\b"
    r"|\b(?:which|who|that|where|when|if|and|but|or|was|were|is|are|had|has|not)\b"
)


def about(sentence: str, lexicon: Lexicon, rng: random.Random) -> Row | None:
    """A question that a span of the sentence answers, or None where no span is fit for one."""
    found = [span for span in spans(sentence, lexicon) if _is_fit(sentence, span)]
    tail = _TAIL.search(sentence)
    if tail and content(tail[1]) and (not found or rng.random() < 0.2):
        found = [Span(*tail.span(1), "name")]
        return _blank(sentence, found[0], rng)
    if not found:
        return None
    span, form, row = rng.choice(found), rng.random(), None
    if form < 0.5:
        row = _in_place(sentence, span, rng)
    if row is None and form > 0.92:
        row = _keywords(sentence, span)
    return row or _blank(sentence, span, rng)


def inverted(sentence: str, lexicon: Lexicon, rng: random.Random) -> Row | None:
    """ "When was X built?" or "Who founded Y?" where the sentence begins with X or the name and has a plain form."""
    found = [(_inverted(sentence, span), span) for span in spans(sentence, lexicon) if _is_fit(sentence, span)]
    asked = [Row(question, sentence[span.start : span.end]) for question, span in found if question]
    return rng.choice(asked) if asked else None


def _inverted(sentence: str, span: Span) -> str | None:
    answer = sentence[span.start : span.end]
    if span.sort in ("date", "year"):
        return _when(sentence, answer)
    if span.sort == "number":
        return _how_many(sentence, answer)
    if span.sort != "name":
        return None
    who, where = _WHO.match(sentence), _WHERE.match(sentence)
    if who and who["name"] == answer and " " in answer:
        return f"{'Who or what' if ' the ' in answer or ' of ' in answer else 'Who'} {who['rest']}?"
    if where and where.start("place") == span.start and not _VAGUE.search(where["subject"]):
        return f"Where {where['aux']} {_lower_article(where['subject'])} {where['rest']}?"
    return None


def _how_many(sentence: str, number: str) -> str | None:
    found = _MANY.match(sentence)
    if not found or found["number"] != number or _VAGUE.search(found["subject"]):
        return None
    having = {"has": "does", "have": "do", "had": "did"}
    aux, verb = having.get(found["verb"], "did"), _PAST.get(found["verb"], "have")
    return f"How many {found['noun']} {aux} {_lower_article(found['subject'])} {verb}{found['rest']}?"


def _when(sentence: str, date: str) -> str | None:
    for pattern in (_WHEN, _DID, _DATED):
        found = pattern.match(sentence)
        if not found or found["date"] != date or _VAGUE.search(found["subject"]):
            continue
        subject, parts = _lower_article(found["subject"]), found.groupdict()
        if parts.get("verb"):
            rest = (parts.get("object") or parts.get("rest") or "").strip()
            return f"When did {subject} {_PAST[parts['verb']]}{' ' if rest else ''}{rest}?"
        return f"When {parts['aux']} {subject} {parts['rest'].strip()}?"
    return None


def recurring(sentence: str, others: Sequence[str], lexicon: Lexicon, rng: random.Random) -> Row | None:
    """The sentence with a span blank that also stands in one of the other sentences; None where there is none.

    The sentence is to be taken out of what is read, so that only the other place tells the answer. Source: Splinter
    (arXiv 2101.00438).
    """
    tokens = list(re.finditer(r"\w+", sentence))
    said = folded("\n".join(others))
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(tokens):
        n = max(
            (
                n
                for n in range(1, min(5, len(tokens) - at) + 1)
                if _recurs(sentence, tokens[at : at + n], said, lexicon)
            ),
            default=0,
        )
        if n:
            found.append((tokens[at].start(), tokens[at + n - 1].end()))
        at += max(n, 1)
    if not found or len(tokens) < 8:
        return None
    start, end = max(found, key=lambda span: span[1] - span[0]) if rng.random() < 0.7 else rng.choice(found)
    answer = sentence[start:end]
    if stands_in(answer, folded(sentence[:start] + " | " + sentence[end:])):
        return None
    clause = f"{sentence[:start]}{rng.choice(_BLANKS)}{sentence[end:]}"
    return Row(rng.choice(_FILLS).format(clause), answer)


def short_answer(question: str, sentence: str, lexicon: Lexicon) -> str | None:
    """What in an evidence sentence answers the question, where only one span of the sort asked for can."""
    asked = question.lower()
    wanted: tuple[str, ...] = ()
    if re.match(r"when\b|(?:in |on )?(?:what|which) (?:year|date)\b", asked):
        wanted = ("date", "year")
    elif re.match(r"(?:what|which) percent|how much percent", asked):
        wanted = ("percentage",)
    elif re.match(r"how much (?:money|did|was|does|is)\b", asked):
        wanted = ("money",)
    elif re.match(r"how (?:many|tall|long|old|far|large|big|high|fast)\b", asked):
        wanted = ("number",)
    if wanted:
        sorts = [span for span in values(sentence) if span.sort in wanted]
        counted = re.match(r"how many (\w+)", asked)
        if len(sorts) != 1 or (counted and counted[1] not in words(sentence[sorts[0].end :])[:2]):
            return None
        answer = sentence[sorts[0].start : sorts[0].end]
    elif re.match(r"who\b", asked):
        persons = [sentence[start:end] for start, end, _ in names(sentence, lexicon)]
        persons = [name for name in persons if not set(words(name)) & set(words(question))]
        if len(persons) != 1 or not 2 <= len(persons[0].split()) <= 3 or re.search(r"\b(?:of|the)\b", persons[0]):
            return None
        answer = persons[0]
    else:
        return None
    return None if stands_in(answer, folded(question)) else answer


def _is_fit(sentence: str, span: Span) -> bool:
    """Whether a span stands only once in the sentence, and the sentence is more than the span."""
    answer = sentence[span.start : span.end]
    rest = folded(f"{sentence[: span.start]} | {sentence[span.end :]}")
    return len(answer) <= 60 and not stands_in(answer, rest) and len(content(rest)) >= 3


def _recurs(sentence: str, tokens: list[re.Match[str]], said: str, lexicon: Lexicon) -> bool:
    first, last = tokens[0][0], tokens[-1][0]
    if first.lower() in STOP_WORDS or last.lower() in STOP_WORDS:
        return False
    span = sentence[tokens[0].start() : tokens[-1].end()]
    if re.search(r"[^\w\s'’-]", span) or not stands_in(span, said):
        return False
    return (
        any(lexicon.is_name(token[0]) or (token[0].isdigit() and len(token[0]) > 2) for token in tokens)
        or len(content(span)) > 1
    )


def _clause(sentence: str, span: Span) -> tuple[int, int]:
    """Where the clause around a span begins and ends; the whole sentence where the clause is short."""
    fewest, most = _CLAUSE_WORDS
    begins = [0, *(m.end() for m in _CLAUSE_END.finditer(sentence, 0, span.start))]
    ends = [*(m.start() for m in _CLAUSE_END.finditer(sentence, span.end)), len(sentence)]
    start, end = begins[-1], ends[0]
    if len(content(sentence[start : span.start] + sentence[span.end : end])) < 3:
        start, end = begins[max(0, len(begins) - 2)], ends[min(1, len(ends) - 1)]
    if len(sentence[start:end].split()) < fewest:
        start, end = 0, len(sentence)
    while sentence[start] in " ,;:)":
        start += 1
    while len(sentence[start:end].split()) > most:
        if span.start - start > end - span.end:
            start = sentence.index(" ", start) + 1
        else:
            end = sentence.rindex(" ", span.end, end)
    return start, end


def _blank(sentence: str, span: Span, rng: random.Random) -> Row:
    start, end = (0, len(sentence)) if rng.random() < 0.3 else _clause(sentence, span)
    text = f"{sentence[start : span.start]}{rng.choice(_BLANKS)}{sentence[span.end : end]}".strip()
    return Row(rng.choice(_FILLS).format(text), sentence[span.start : span.end])


def _in_place(sentence: str, span: Span, rng: random.Random) -> Row | None:
    """The clause with a wh-word for the span: "The tower was built in which year?"."""
    start, end = _clause(sentence, span)
    before, after = sentence[start : span.start], sentence[span.end : end].rstrip(" .!")
    if span.sort == "name":
        if not re.search(r"\b(?:by|in|at|from|of|to|with)\s$", before) or not _AFTER_NAME.match(after):
            return None
        word = "which place" if re.search(r"\b(?:in|at|from)\s$", before) else "whom or what"
    elif span.sort == "number" and not re.match(r"\s[a-z]{3,}", after):
        return None
    else:
        word = {
            "date": rng.choice(("what date", "which date")),
            "year": rng.choice(("what year", "which year")),
            "percentage": "what percentage",
            "money": "how much money",
            "number": "how many",
        }[span.sort]
    text = f"{before}{word}{after}".strip()
    return Row(f"{text[0].upper()}{text[1:]}?", sentence[span.start : span.end])


def _keywords(sentence: str, span: Span) -> Row | None:
    """What a hurried reader types: "opened suez canal year"."""
    if span.sort == "name":
        return None
    start, end = _clause(sentence, span)
    said = content(f"{sentence[start : span.start]} {sentence[span.end : end]}")[:8]
    head = {"number": "how many", "money": "how much"}.get(span.sort, span.sort)
    return Row(f"{' '.join(said)} {head}", sentence[span.start : span.end]) if len(said) >= 3 else None


def _lower_article(subject: str) -> str:
    first, _, rest = subject.partition(" ")
    return f"{first.lower()} {rest}" if first in ("The", "A", "An") else subject
