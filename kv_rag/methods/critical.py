"""Weigh attention by what the value can change."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates, Reading, Watcher
from kv_rag.methods.expected import ExpectedAttention
from kv_rag.methods.h2o import H2O
from kv_rag.methods.tova import Tova
from kv_rag.observation import LayerStep
from kv_rag.scoring import output_norms

# Only attention can be weighed: scores of other kinds may be negative, and a factor would turn their order around.
_BASES: dict[str, ExpectedAttention | H2O | Tova] = {
    "expected": ExpectedAttention(value_norm=False),
    "h2o": H2O(),
    "tova": Tova(),
}


@dataclass(frozen=True)
class Critical:
    """Feng, Lv, Guo, Cao, Xie, Zhou (2025), "Identify Critical KV Cache in LLM Inference from an Output Perturbation
    Perspective", arXiv 2502.03805: the attention of another method times the L1 norm of the value after the output
    projection. The paper first spends half of the budget on attention alone; a score that holds for any budget cannot.

    Args:
        base: whose attention: "expected", "h2o" or "tova". ``KVzip`` has a setting of its own for it.
        epsilon: added to the attention, so that a value with a large norm is not dropped for want of attention.

    """

    base: str = "expected"
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if self.base not in _BASES:
            raise InvalidSetting(f"critical: base must be one of {', '.join(_BASES)}, got {self.base!r}")

    def watch(self, reading: Reading) -> _Weighed:
        return _Weighed(_BASES[self.base].watch(reading), self.epsilon)


class _Weighed:
    def __init__(self, base: Watcher, epsilon: float) -> None:
        self._base, self._epsilon = base, epsilon

    def observe(self, step: LayerStep) -> None:
        self._base.observe(step)

    def score(self, states: LayerStates) -> Tensor:
        norms = output_norms(states.values, states.reading.output_weight(states.layer), order=1)
        return (self._base.score(states) + self._epsilon) * norms
