"""Teacher-forced likelihood of a given answer: what evaluations measure on models too small to say it themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.model import LanguageModel
from kv_rag.state import PromptState, Slots


@dataclass(frozen=True)
class Likelihood:
    """Of one answer.

    Attributes:
        nll: mean negative log-likelihood in nats per token.
        predicted: share of the tokens that the argmax predicts.
        tokens: length of the answer.

    """

    nll: float
    predicted: float
    tokens: int


def answer_likelihood(model: LanguageModel, first: Tensor, state: PromptState, answer_ids: Tensor) -> Likelihood:
    """Scores ``answer_ids`` ``[T]``: the first token by ``first`` ``[V]``, later ones by running them over ``state``."""
    logits = first[None]
    later = answer_ids.numel() - 1
    if later:
        lengths = {layer.length for layer in state.layers}
        slots = {length: Slots.after(length, later, model.device) for length in lengths}
        positions = torch.arange(state.tokens, state.tokens + later)
        rest = model.run(
            answer_ids[:-1], positions, state, [slots[layer.length] for layer in state.layers], logits=later
        )
        assert rest is not None
        logits = torch.cat([logits, rest])
    targets = answer_ids.to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    predicted = (logits.argmax(dim=-1) == targets).float()
    return Likelihood(float(losses.mean()), float(predicted.mean()), answer_ids.numel())
