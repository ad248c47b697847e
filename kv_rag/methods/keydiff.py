"""Keep the keys that differ most from the average key."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kv_rag.methods.base import LayerStates


@dataclass(frozen=True)
class KeyDiff:
    """Park, Jones, Morse, Goel, Lee, Lott (2025), "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
    Inference in Resource-Constrained Environments", arXiv 2504.15364: the score of a key is its negative cosine
    similarity to the mean of all normalised keys of its head. Computed on keys without rotary position, which do not
    make neighbours look alike.
    """

    def score(self, states: LayerStates) -> Tensor:
        directions = F.normalize(states.keys.float(), dim=-1)
        similarity: Tensor = F.cosine_similarity(directions, directions.mean(dim=1, keepdim=True), dim=-1)
        return -similarity
