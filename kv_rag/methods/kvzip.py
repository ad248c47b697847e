"""Keep the pairs the model needs to repeat the document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.attention import LayerScores
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep
from kv_rag.scoring import attention_blocks, output_norms

_FIRST = "\n\nRepeat the previous context exactly.\n\n"
_NEXT = "\n\nRepeat the part of the previous context that starts with:"
_OVERLAP = 8  # tokens of the part before that say where to go on


@dataclass(frozen=True)
class KVzip:
    """Kim, Kim, Kwon, Lee, Yun, Song (2025), "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
    arXiv 2505.23416: the model is asked to repeat the document and is fed the document as the answer; a pair's score is
    the most attention that any token of the repetition pays to it. In parts, so that scoring stays linear.

    Args:
        part: tokens repeated at a time, at most; fewer where the model's context leaves no room for so many.
        weight: "none", or "value" to multiply attention by the norm of the value after the output projection, relative
            to the largest of its head.

    """

    allocation: ClassVar[str] = "model"
    part: int = 2048
    weight: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.part, int) or self.part < 2 * _OVERLAP:
            raise InvalidSetting(f"kvzip: part must be a number of tokens, at least {2 * _OVERLAP}, got {self.part!r}")
        if self.weight not in ("none", "value"):
            raise InvalidSetting(f"kvzip: weight must be 'none' or 'value', got {self.weight!r}")

    def parts(self, reading: Reading) -> list[tuple[int, int]]:
        """The document cut into parts of about the same length."""
        prompt = max(reading.encode(_FIRST).numel(), reading.encode(_NEXT).numel() + _OVERLAP)
        room = reading.context - reading.before - reading.tokens - prompt
        count = -(-reading.tokens // min(self.part, max(room, 2 * _OVERLAP)))
        bounds = [round(index * reading.tokens / count) for index in range(count + 1)]
        return list(pairwise(bounds))

    def replays(self, reading: Reading) -> Iterator[Tensor]:
        for begin, end in self.parts(reading):
            if begin == 0:
                prompt = reading.encode(_FIRST)
            else:
                prompt = torch.cat([reading.encode(_NEXT), reading.token_ids[begin - _OVERLAP : begin]])
            yield torch.cat([prompt, reading.token_ids[begin:end]])

    def watch_replay(self, reading: Reading) -> _MostAttention:
        return _MostAttention(self, reading)


class _MostAttention:
    """For each document pair the most attention so far."""

    def __init__(self, settings: KVzip, reading: Reading) -> None:
        self._settings, self._reading = settings, reading
        self._parts = settings.parts(reading)
        self._at = [-1] * reading.layers  # the part a layer is at
        self._most = LayerScores(reading)

    def observe(self, step: LayerStep) -> None:
        reading = self._reading
        first = reading.before + reading.tokens  # slot of a replay's first token
        if int(step.slots.index[0]) == first:
            self._at[step.layer] += 1
        begin, end = self._parts[self._at[step.layer]]
        most = self._most.of(step)
        keys, before = step.state.keys, reading.before
        seen = torch.cat([keys[:, :before], keys[:, before + begin : before + end], keys[:, first : step.slots.end]], dim=1)
        visible = step.slots.index + 1 - first + before + end - begin
        for _, weights in attention_blocks(step.queries, seen, visible, step.scaling):
            part = weights[..., before : before + end - begin].amax(dim=(1, 2))
            most[:, begin:end] = torch.maximum(most[:, begin:end], part)

    def score(self, states: LayerStates) -> Tensor:
        most = self._most[states.layer]
        if self._settings.weight == "none":
            return most
        norms = output_norms(states.values, states.reading.output_weight(states.layer), order=2)
        return most * norms / norms.amax(dim=1, keepdim=True)
