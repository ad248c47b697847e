"""Turns of a conversation as any chat template accepts them. Strict templates (Mistral's) refuse anything else."""

from __future__ import annotations

from kv_rag.engine import Engine
from kv_rag.errors import EmptyInput, InvalidSetting

Turn = dict[str, str]  # {"role": "system", "user" or "assistant", "content": …}

BETWEEN = "\n\n"  # between merged messages


def merged(turns: list[Turn]) -> list[Turn]:
    """One system turn, first; no role twice in a row.

    Raises:
        EmptyInput: there is no text in any turn.

    """
    if not any(turn["content"].strip() for turn in turns):
        raise EmptyInput("the messages hold no text to answer")
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    result: list[Turn] = [{"role": "system", "content": BETWEEN.join(system)}] if system else []
    for turn in turns:
        if turn["role"] == "system":
            continue
        if result and result[-1]["role"] == turn["role"]:
            result[-1]["content"] += BETWEEN + turn["content"]
        else:
            result.append(dict(turn))
    return result


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
