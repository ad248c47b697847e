"""LangChain's messages as turns that any chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
)

from kv_rag import Engine
from kv_rag.errors import EmptyInput, InvalidSetting

Turn = dict[str, str]

_ROLES = {
    "human": "user", "user": "user", "ai": "assistant", "assistant": "assistant",
    "system": "system", "developer": "system",
}  # fmt: skip
BETWEEN = "\n\n"  # between merged messages


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """``messages`` as ``{"role": …, "content": …}``: one system turn, first; no role twice in a row.

    Strict templates (Mistral's) refuse anything else. A person's ``name`` is written before the words, because templates
    have no place for it and merged messages would lose who said what.

    Raises:
        EmptyInput: there is no text in any message.
        InvalidSetting: a kind of message or content that this model cannot read.

    """
    turns: list[Turn] = []
    for message in messages:
        turns.append({"role": _role(message), "content": _text(message)})
    if not any(turn["content"].strip() for turn in turns):
        raise EmptyInput("the messages hold no text to answer")
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    merged: list[Turn] = [{"role": "system", "content": BETWEEN.join(system)}] if system else []
    for turn in turns:
        if turn["role"] == "system":
            continue
        if merged and merged[-1]["role"] == turn["role"]:
            merged[-1]["content"] += BETWEEN + turn["content"]
        else:
            merged.append(turn)
    return merged


def acceptable(engine: Engine, turns: list[Turn]) -> list[Turn]:
    """``turns`` as they are, or, for a template that refuses them, beginning with the user, who says the system text."""
    try:
        engine.model.render(turns)
        return turns
    except InvalidSetting:
        folded = _user_first(turns)
        if folded == turns:
            raise
        return folded


def _user_first(turns: list[Turn]) -> list[Turn]:
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": BETWEEN.join(system)}, *others]
    first = {"role": "user", "content": BETWEEN.join([*system, others[0]["content"]])}
    return [first, *others[1:]]


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    if name not in _ROLES:
        raise InvalidSetting(
            f"a message of type {name!r} cannot be read: this model calls no tools; roles are "
            "system, user (human) and assistant (ai)"
        )
    return _ROLES[name]


def _text(message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and message.tool_calls:
        raise InvalidSetting("a message with tool calls cannot be read: this model calls no tools; leave it out")
    blocks = [message.content] if isinstance(message.content, str) else message.content
    text = ""
    for block in blocks:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind == "text":
            text += block if isinstance(block, str) else str(block["text"])
        elif kind not in ("reasoning", "thinking"):  # another model's thoughts are no part of the conversation
            raise InvalidSetting(f"content of type {kind!r} cannot be read: this model reads text only")
    named = message.name and isinstance(message, HumanMessage)
    return f"{message.name}: {text}" if named else text


