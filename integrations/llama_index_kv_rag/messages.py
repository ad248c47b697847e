"""LlamaIndex's messages as turns that any chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock

from kv_rag import Engine
from kv_rag.errors import EmptyInput, InvalidSetting

Turn = dict[str, str]

_ROLES = {
    "system": "system", "developer": "system", "user": "user",
    "assistant": "assistant", "chatbot": "assistant", "model": "assistant",
}  # fmt: skip
BETWEEN = "\n\n"  # between merged messages


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """``messages`` as ``{"role": …, "content": …}``: one system turn, first; no role twice in a row.

    Strict templates (Mistral's) refuse anything else.

    Raises:
        EmptyInput: there is no text in any message.
        InvalidSetting: a role or content that this model cannot read.

    """
    turns = [{"role": _role(message), "content": _text(message)} for message in messages]
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
    return [{"role": "user", "content": BETWEEN.join([*system, others[0]["content"]])}, *others[1:]]


def _role(message: ChatMessage) -> str:
    role = str(message.role.value)
    if role not in _ROLES:
        raise InvalidSetting(
            f"a message of role {role!r} cannot be read: this model calls no tools; roles are {', '.join(_ROLES)}"
        )
    return _ROLES[role]


def _text(message: ChatMessage) -> str:
    """As ``message.content``, but that nothing is left out in silence."""
    if message.additional_kwargs.get("tool_calls"):
        raise InvalidSetting("a message with tool calls cannot be read: this model calls no tools; leave it out")
    texts = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif not isinstance(block, ThinkingBlock):  # another model's thoughts are no part of the conversation
            raise InvalidSetting(f"content of type {block.block_type!r} cannot be read: this model reads text only")
    return "\n".join(texts)
