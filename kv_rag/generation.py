"""From a prompt's state to tokens and text.

Sampling goes through transformers' own logits processors, stopping through its criteria; stop strings are cut from the
text here, because a criterion only sees that one has appeared, after it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.model import LanguageModel
from kv_rag.state import PromptState, Slots


@dataclass(frozen=True)
class Generation:
    """How an answer is generated. Greedy unless ``temperature`` is above zero.

    Args:
        max_new_tokens: at most so many tokens.
        temperature: 0 for greedy, else logits are divided by it before sampling.
        top_p: sample from the smallest set of tokens with this much probability, in (0, 1].
        top_k: sample from so many most likely tokens; None for all.
        repetition_penalty: above 1 makes tokens of the prompt and answer less likely.
        seed: makes sampling repeatable.
        stop: strings that end the answer; they are not part of it.
        logits_processor: further transformers LogitsProcessor objects, run after the ones above.
        stopping_criteria: further transformers StoppingCriteria objects.

    Raises:
        InvalidSetting: a value out of range.

    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logits_processor: tuple[Any, ...] = field(default=(), repr=False)
    stopping_criteria: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise InvalidSetting(f"stop must be strings that are not empty, got {stop!r}")
        _check("max_new_tokens", self.max_new_tokens, isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1,
               "an int of at least 1")  # fmt: skip
        _check("temperature", self.temperature, _finite(self.temperature) and self.temperature >= 0, "at least 0")
        _check("top_p", self.top_p, _finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 1),
               "None or an int of at least 1")  # fmt: skip
        _check("repetition_penalty", self.repetition_penalty,
               _finite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0")  # fmt: skip

    def processors(self) -> Any:
        """The logits processors these settings stand for, in transformers' order."""
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        chain.extend(self.logits_processor)
        if self.temperature > 0:
            if self.temperature != 1.0:
                chain.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k is not None:
                chain.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                chain.append(TopPLogitsWarper(float(self.top_p)))
        return chain


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: Any, fine: bool, allowed: str) -> None:
    if not fine:
        raise InvalidSetting(f"{name} must be {allowed}, got {value!r}")


class TokenPicker:
    """Picks one token after another from logits ``[V]``, and says when to stop."""

    def __init__(self, model: LanguageModel, prompt_ids: Tensor, generation: Generation) -> None:
        from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        self._ids = prompt_ids.to(model.device)[None]
        self._prompt_tokens = prompt_ids.numel()
        self._processors = generation.processors()
        self._greedy = generation.temperature == 0
        self._random = torch.Generator(device=model.device)
        if generation.seed is not None:
            self._random.manual_seed(generation.seed)
        else:
            self._random.seed()
        self._end: Any = EosTokenCriteria(eos_token_id=model.end_ids) if model.end_ids else None
        self._stopping = StoppingCriteriaList(generation.stopping_criteria)
        self._length = MaxLengthCriteria(max_length=self._prompt_tokens + generation.max_new_tokens)
        self.finish_reason: str | None = None

    def pick(self, logits: Tensor) -> int:
        """The next token; ``finish_reason`` is set when it is the last ("stop" or "length")."""
        scores = self._processors(self._ids, logits[None].float())
        if self._greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._random)
        self._ids = torch.cat([self._ids, token], dim=1)
        if (self._end is not None and self._end(self._ids, scores).any()) or (
            len(self._stopping) and self._stopping(self._ids, scores).any()
        ):
            self.finish_reason = "stop"
        elif self._length(self._ids, scores).any():
            self.finish_reason = "length"
        return int(token)

    @property
    def generated(self) -> list[int]:
        return self._ids[0, self._prompt_tokens :].tolist()


def decode_step(model: LanguageModel, token: int, state: PromptState) -> Tensor:
    """Appends ``token`` to ``state`` and returns the logits ``[V]`` after it."""
    lengths = {layer.length for layer in state.layers}
    slots = {length: Slots.after(length, 1, model.device) for length in lengths}
    position = torch.tensor([state.tokens], device=model.device)
    logits = model.run(
        torch.tensor([token]), position, state, [slots[layer.length] for layer in state.layers]
    )
    assert logits is not None
    state.tokens += 1
    return logits[0]


class TextAssembler:
    """Turns tokens into pieces of text whose concatenation is the whole answer, stop strings cut off.

    A piece is held back while it ends in half a character or in what may become a stop string.
    """

    def __init__(self, model: LanguageModel, stop: Sequence[str]) -> None:
        self._model, self._stop = model, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # first token of the window that is decoded: whole characters stand before it
        self._known = 0  # tokens whose text is in _text
        self._text = ""
        self._sent = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """The new piece, possibly empty. ``stopped`` is set when a stop string has appeared."""
        self._ids.append(token)
        before = self._model.decode(self._ids[self._begin : self._known])
        now = self._model.decode(self._ids[self._begin :])
        if not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._begin, self._known = self._known, len(self._ids)
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back."""
        before = self._model.decode(self._ids[self._begin : self._known])
        self._text += self._model.decode(self._ids[self._begin :])[len(before) :]
        self._begin = self._known = len(self._ids)
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        cuts = [at for at in (self._text.find(stop, max(0, self._sent)) for stop in self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            end = min(cuts)
        elif final:
            end = len(self._text)
        else:
            end = len(self._text) - max((_overlap(self._text, stop) for stop in self._stop), default=0)
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def generate(
    model: LanguageModel, logits: Tensor, picker: TokenPicker, state_after_first: Callable[[], PromptState]
) -> Iterator[int]:
    """Tokens one by one: the first from ``logits`` ``[V]``, later ones from the state that ``state_after_first`` gives.

    The state is asked for only after the first token has been handed out: pruning by SnapKV costs it no time.
    """
    token = picker.pick(logits)
    yield token
    if picker.finish_reason is not None:
        return
    state = state_after_first()
    while picker.finish_reason is None:
        token = picker.pick(decode_step(model, token, state))
        yield token
