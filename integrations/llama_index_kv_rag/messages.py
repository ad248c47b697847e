"""LlamaIndex's messages as turns that any chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock

from kv_rag.errors import InvalidSetting
from kv_rag.turns import Turn, merged

_ROLES = {
    "system": "system", "developer": "system", "user": "user",
    "assistant": "assistant", "chatbot": "assistant", "model": "assistant",
}  # fmt: skip


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """``messages`` as ``{"role": …, "content": …}``: one system turn, first; no role twice in a row.

    Strict templates (Mistral's) refuse anything else.

    Raises:
        EmptyInput: there is no text in any message.
        InvalidSetting: a role or content that this model cannot read.

    """
    return merged([{"role": _role(message), "content": _text(message)} for message in messages])


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
