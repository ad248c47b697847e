"""What is compared: methods with their settings, and what only an evaluation may do with them.

SnapKV comes twice. ``snapkv`` is what the product offers: the full state is kept and every question picks its own pairs,
so its bytes are those of the full state. ``snapkv-window`` compresses with SnapKV's window at the end of what was read: the
document's end, where no question is in sight, or the question itself (protocol context+task). The product refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag import methods
from kv_rag.document import Scalar
from kv_rag.errors import InvalidSetting
from kv_rag.methods import AnyMethod, LayerStates, Reading, Watcher, peers
from kv_rag.methods.attention import LayerScores, document_attention
from kv_rag.observation import LayerStep
from kv_rag.selection import SETTINGS, Budget, method_settings
from kv_rag.snapkv import SnapKV

PER_QUERY = "snapkv"
WINDOW = "snapkv-window"
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Contestant:
    """A method as it was asked for.

    Attributes:
        label: what was written, for tables.
        name: of the method.
        allocation: see ``selection.Budget``.
        settings: of the method and of the selection.

    """

    label: str
    name: str
    allocation: str
    settings: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Contestant:
        """``NAME[/ALLOCATION][,SETTING=VALUE…]``: ``kvzip/model``, ``h2o,normalise=false``.

        Raises:
            UnknownMethod, InvalidSetting: as the product does, but that evaluate-only methods are allowed.

        """
        place, *pairs = text.split(",")
        name, _, allocation = place.partition("/")
        settings: dict[str, Scalar] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise InvalidSetting(f"{text!r}: a setting is written name=value, got {pair!r}")
            if key == "allocation":
                raise InvalidSetting(f"{text!r}: an allocation is written after the method's name, {name}/{value}")
            settings[key] = _scalar(value)
        contestant = cls(text, name, allocation or "uniform", tuple(sorted(settings.items())))
        if not allocation:  # what suits the method, as the product does
            its = SnapKV.allocation if contestant.is_per_query else methods.allocation_of(contestant.method())
            contestant = replace(contestant, allocation=its)
        contestant.budget(1.0)
        if contestant.is_per_query:
            contestant.snapkv()
        else:
            contestant.method()
        return contestant

    @property
    def is_per_query(self) -> bool:
        return self.name == PER_QUERY

    def budget(self, keep: float) -> Budget:
        chosen = {key: value for key, value in self.settings if key in SETTINGS}
        return Budget(keep, allocation=self.allocation, **chosen)  # type: ignore[arg-type]

    def method(self) -> AnyMethod:
        """The method, evaluate-only ones included."""
        own = method_settings(dict(self.settings))
        if self.name == WINDOW:
            return _made(SnapKVWindow, self.label, own)
        if self.name.startswith(peers.PREFIX):
            return peers.create(self.name, own, evaluate_only=True)
        return methods.create(self.name, own)

    def snapkv(self) -> SnapKV:
        """Settings of the per-query mode."""
        return _made(SnapKV, self.label, {"allocation": self.allocation, **dict(self.settings)})


def _made(kind: type[_Kind], label: str, settings: dict[str, Scalar]) -> _Kind:
    try:
        return kind(**settings)
    except TypeError as error:
        raise InvalidSetting(f"{label!r}: {str(error).split('__init__() ')[-1]}") from None


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class SnapKVWindow:
    """SnapKV (arXiv 2404.14469) as an ingest method, for evaluations alone: the last ``window`` tokens that were read vote.

    Args:
        window: tokens.
        pool: neighbours over which the maximum is taken, odd.

    Raises:
        InvalidSetting: no token in the window, pool even.

    """

    window: int = 64
    pool: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise InvalidSetting(f"{WINDOW}: window must be a number of tokens, at least 1, got {self.window!r}")
        if not isinstance(self.pool, int) or self.pool < 1 or self.pool % 2 == 0:
            raise InvalidSetting(f"{WINDOW}: pool must be an odd number of neighbours, got {self.pool!r}")

    def watch(self, reading: Reading) -> Watcher:
        return _Voted(self, reading)


class _Voted:
    def __init__(self, settings: SnapKVWindow, reading: Reading) -> None:
        self._settings, self._reading = settings, reading
        self._sums = LayerScores(reading)

    def observe(self, step: LayerStep) -> None:
        reading = self._reading
        first = reading.before + max(0, reading.tokens - self._settings.window)  # slot of the first voting token
        if step.slots.end <= first:
            return
        sums = self._sums.of(step)
        for visible, weights in document_attention(step, reading.before, reading.tokens):
            sums[:, : weights.shape[-1]] += weights[:, :, visible > first].sum(dim=2).mean(dim=1)

    def score(self, states: LayerStates) -> Tensor:
        pool = self._settings.pool
        pooled = F.max_pool1d(self._sums[states.layer][None], pool, stride=1, padding=pool // 2)[0]
        pooled[:, -self._settings.window :] = torch.inf  # the window itself stays, as in the paper
        return pooled
