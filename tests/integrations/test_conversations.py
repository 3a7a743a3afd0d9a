"""Which turns of a conversation count: one rule for both frameworks and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_pdllm import ChatPDLLM, as_message
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, TextBlock
from llama_index.llms.pdllm import PDLLM
from serving import served

from pdllm_rag import AskOptions, RagEngine
from pdllm_rag.errors import RequestError
from pdllm_rag.history import MAX_TOKENS
from pdllm_rag.server import ServerSettings

Turns = list[dict[str, str]]
Chat = Callable[[Turns, int], dict[str, int]]
QUESTION = "When does the beta boat sail?"  # in tokens of the tiny model, every text is as long as in signs

OLD, NEW = "The zeta boat sails at noon from pier nine.", "The eta boat sails at dusk from pier ten, on Sundays."


def turns(*words: str) -> Turns:
    """Turns of which the first letter is the role."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[word[0]], "content": word[1:]} for word in words]


@pytest.fixture(scope="module")
def engine(place: dict[str, str]) -> Iterator[RagEngine]:
    with RagEngine.open(**place, create=False, options=AskOptions(max_new_tokens=1)) as opened:
        yield opened


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """What engines are asked."""
    seen: list[Turns] = []
    original = RagEngine.asked

    def listening(self: RagEngine, question: Any, **arguments: Any) -> Any:
        seen.append([dict(turn) for turn in question])
        return original(self, question, **arguments)

    monkeypatch.setattr(RagEngine, "asked", listening)
    return seen


@pytest.fixture(params=["langchain", "llama_index", "http"])
def chat(request: pytest.FixtureRequest, place: dict[str, str], engine: RagEngine) -> Chat:
    """Asks a conversation with so many tokens of history; what the answer says of it."""

    def langchain(messages: Turns, room: int) -> dict[str, int]:
        model = ChatPDLLM(**place, max_tokens=1, max_history_tokens=room)
        history: dict[str, int] = model.invoke(messages).response_metadata["history"]
        return history

    def llama_index(messages: Turns, room: int) -> dict[str, int]:
        model = PDLLM(**place, max_tokens=1, max_history_tokens=room)
        history: dict[str, int] = model.chat([ChatMessage(**one) for one in messages]).raw["history"]
        return history

    def http(messages: Turns, room: int) -> dict[str, int]:
        with served(engine, max_history_tokens=room) as site:
            (model,) = site.client.get("/v1/models").json()["data"]
            body = {"model": model["id"], "messages": messages}
            response = site.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        history: dict[str, int] = response.json()["history"]
        return history

    ways: dict[str, Chat] = {"langchain": langchain, "llama_index": llama_index, "http": http}
    return ways[request.param]


@pytest.mark.parametrize(
    ("room", "earlier", "kept"),
    [
        (20, (), ()),
        (0, ("shint", "uold?", "aold."), ()),
        (20, ("shint", "uold?", "aold."), ("shint", "uold?", "aold.")),
        (12, ("shint", "uold?", "aold."), ("shint", "uold?", "aold.")),
        (11, ("shint", "uold?", "aold."), ("shint",)),
        (12, ("uone?", "aone.", "utwo?", "atwo."), ("utwo?", "atwo.")),
        (9, ("uone?", "a" + "x" * 10, "utwo?", "atwo."), ("utwo?", "atwo.")),
        (11, ("uold?", "shint", "aold.", "sbe brief"), ("sbe brief",)),
        (20, ("uold?", "shint", "aold.", "sbe brief"), ("shint", "sbe brief", "uold?", "aold.")),
        (5, ("s" + "x" * 6, "uold?"), ()),
    ],
)
def test_the_question_is_whole_and_system_messages_and_the_newest_turns_are_kept_as_far_as_they_fit(
    chat: Chat, asked: list[Turns], room: int, earlier: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    question = turns("u" + QUESTION)
    history = chat([*turns(*earlier), *question], room)
    assert asked == [[*turns(*kept), *question]]
    assert history == {"kept": len(kept), "given": len(earlier)}


def test_a_conversation_that_does_not_end_with_a_question_is_refused(place: dict[str, str], engine: RagEngine) -> None:
    given = turns("u" + QUESTION, "aAt dawn.")
    with pytest.raises(RequestError, match="expected the question there"):
        ChatPDLLM(**place).invoke(given)
    with pytest.raises(RequestError, match="expected the question there"):
        PDLLM(**place).chat([ChatMessage(**turn) for turn in given])
    with served(engine) as site:
        (model,) = site.client.get("/v1/models").json()["data"]
        body = {"model": model["id"], "messages": given}
        response = site.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 422
    assert "expected the question there" in response.json()["error"]["message"]


def test_the_limit_is_the_same_unless_somebody_says_otherwise(place: dict[str, str]) -> None:
    limits = {
        ChatPDLLM(**place).max_history_tokens,
        PDLLM(**place).max_history_tokens,
        ServerSettings().max_history_tokens,
    }
    assert limits == {MAX_TOKENS}


def test_documents_of_an_earlier_question_are_not_read_for_a_later_one(place: dict[str, str]) -> None:
    model = ChatPDLLM(**place, k=2, max_tokens=1)

    def read(*messages: BaseMessage) -> tuple[int, int]:
        kv = model.invoke([*messages]).response_metadata["kv"]
        return kv["hit"], kv["unmatched_chars"]

    old, new = (as_message([Document(page_content=text)], QUESTION) for text in (OLD, NEW))
    earlier = [old, AIMessage("At noon.")]
    assert read(*earlier, HumanMessage(QUESTION)) == read(HumanMessage(QUESTION)) == (2, 0)
    assert read(*earlier, new) == read(new) == (0, len(NEW))
    assert read(*earlier, as_message([], QUESTION)) == (0, 0)
    assert read(*earlier, old, HumanMessage(QUESTION)) == (0, len(OLD))  # both since the last answer
    standing = SystemMessage([{"type": "text-plain", "text": OLD}])
    assert read(standing, new, AIMessage("At dusk."), HumanMessage(QUESTION)) == (0, len(OLD))


def test_citable_blocks_of_an_earlier_question_are_not_read_for_a_later_one(place: dict[str, str]) -> None:
    llm = PDLLM(**place, k=2, max_tokens=1)

    def message(text: str) -> ChatMessage:
        block = CitableBlock(title="t", source="s", content=[TextBlock(text=text)])
        return ChatMessage(role="user", blocks=[block, TextBlock(text=QUESTION)])

    def read(*messages: ChatMessage) -> tuple[int, int]:
        kv = llm.chat([*messages]).raw["kv"]
        return kv["hit"], kv["unmatched_chars"]

    earlier = [message(OLD), ChatMessage(role="assistant", content="At noon.")]
    assert read(*earlier, ChatMessage(role="user", content=QUESTION)) == (2, 0)
    assert read(*earlier, message(NEW)) == (0, len(NEW))
