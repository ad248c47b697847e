"""LangChain's messages as turns that any chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
)

from kv_rag.errors import InvalidSetting
from kv_rag.turns import Turn, merged

_ROLES = {
    "human": "user", "user": "user", "ai": "assistant", "assistant": "assistant",
    "system": "system", "developer": "system",
}  # fmt: skip


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """``messages`` as ``{"role": …, "content": …}``: one system turn, first; no role twice in a row.

    Strict templates (Mistral's) refuse anything else. A person's ``name`` is written before the words, because templates
    have no place for it and merged messages would lose who said what.

    Raises:
        EmptyInput: there is no text in any message.
        InvalidSetting: a kind of message or content that this model cannot read.

    """
    return merged([{"role": _role(message), "content": _text(message)} for message in messages])


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


