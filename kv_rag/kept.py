"""Which tokens of a document stayed, in every layer and head: for pictures and for one's own eyes."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kv_rag.compose import Composition
from kv_rag.document import DocumentCache
from kv_rag.snapkv import Range, SnapKV, attended

Positions = tuple[tuple[Tensor, ...], ...]  # for each layer and KV head ``[kept]`` int64, ascending


@dataclass(frozen=True)
class KeptTokens:
    """The tokens of one document, and where each of them stayed.

    Attributes:
        document: the document's name, or its id.
        chosen: what picked them: a compression, or SnapKV and its question.
        texts: one a token; they add up to the document.
        positions: for each layer and KV head the tokens whose pairs it keeps.

    """

    document: str
    chosen: str
    texts: tuple[str, ...] = field(repr=False)
    positions: Positions = field(repr=False, compare=False)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """For each token the share of (layer, head) places that keep its pair, 0 to 1."""
        places = [head for layer in self.positions for head in layer]
        counts = torch.bincount(torch.cat(places), minlength=len(self.texts))
        return tuple((counts.double() / len(places)).tolist())

    @property
    def keep(self) -> float:
        """Fraction of all pairs kept."""
        return sum(self.shares) / len(self.shares)

    def _repr_html_(self) -> str:
        title = f"<strong>{html.escape(self.document)}</strong>: {html.escape(self.chosen)}, {self.keep:.0%} of pairs kept"
        tokens = "".join(
            f'<span style="background:rgba(255,140,0,{share:.2f})" title="{share:.0%}">{html.escape(text)}</span>'
            for text, share in zip(self.texts, self.shares, strict=True)
        )
        return f'{title}<div style="white-space:pre-wrap;max-width:60em;line-height:1.5">{tokens}</div>'


def kept_in_state(cache: DocumentCache) -> Positions:
    """The pairs that ``cache`` holds."""
    return tuple(tuple(torch.split(layer.positions.cpu().long(), list(layer.lengths))) for layer in cache.layers)


def kept_for_question(
    composition: Composition, piece: int, tokens: int, keep: float, settings: SnapKV
) -> Positions:
    """What SnapKV picks of a full document of ``tokens`` tokens, ``piece`` of the prompt, for the prompt's question."""
    begins = [row[piece] for row in composition.begins]
    ranges = [[Range(begin, begin + tokens, keep)] for begin in begins]
    picked = attended(composition.state, composition.window, ranges, settings)
    return tuple(
        tuple(slots[(slots >= begin) & (slots < begin + tokens)].cpu() - begin for slots in heads)
        for begin, heads in zip(begins, picked, strict=True)
    )
