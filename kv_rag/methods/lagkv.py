"""Keep the pairs that stand out against the part of the document that follows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates


@dataclass(frozen=True)
class LagKV:
    """Liang, Zhang, Wang, Xu (2025), "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
    arXiv 2504.04704: the document is cut into parts of ``lag`` tokens. Each part's keys and values are scaled by the
    minimum and maximum of every channel over the NEXT part; a token's score is the softmax (within its part) of the
    standard deviation over its channels, keys and values averaged. The part before last and the tail have no next part
    and stay.

    Args:
        lag: tokens of a part.
        sinks: first tokens that belong to no part and stay.
        cross: compare scores across parts; otherwise each part's scores are replaced by their ranks, so that every part
            keeps the same share.

    """

    lag: int = 128
    sinks: int = 4
    cross: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lag, int) or self.lag < 2:
            raise InvalidSetting(f"lagkv: lag must be a number of tokens, at least 2, got {self.lag!r}")

    def score(self, states: LayerStates) -> Tensor:
        heads, tokens = states.keys.shape[:2]
        scores = torch.ones(heads, tokens, device=states.keys.device)
        parts = (tokens - self.sinks) // self.lag
        if parts < 2:  # nothing has a next part: keep the latest
            scores[:, self.sinks :] = torch.arange(tokens - self.sinks, device=scores.device) / tokens
            return scores
        end = self.sinks + parts * self.lag
        inside = slice(self.sinks, end)
        each = (self._stand_out(states.rotated_keys()[:, inside]) + self._stand_out(states.values[:, inside])) / 2
        if not self.cross:
            each = each.argsort(dim=-1).argsort(dim=-1).float() / self.lag
        scores[:, self.sinks : end - self.lag] = each.flatten(1)
        return scores

    def _stand_out(self, states: Tensor) -> Tensor:
        """``[H, parts * lag, D]`` to ``[H, parts - 1, lag]``."""
        heads, tokens, dim = states.shape
        parts = states.float().reshape(heads, tokens // self.lag, self.lag, dim)
        this, following = parts[:, :-1], parts[:, 1:]
        low, high = following.amin(dim=2, keepdim=True), following.amax(dim=2, keepdim=True)
        scores: Tensor = ((this - low) / (high - low)).std(dim=-1).softmax(dim=-1)
        return scores
