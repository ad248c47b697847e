"""Documents and their KV state. Immutable values: every question shares them, none may change them.

Dimension letters: L layers, H KV heads, D head_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_rag import html
from kv_rag.errors import EmptyInput, InvalidSetting

Scalar = str | int | float | bool

FULL = "full"

# How many bits a stored state has for a number; see kv_rag.store.quantise.
MODEL, BFLOAT16, INT8, INT4, FP8 = "model", "bfloat16", "int8", "int4", "fp8"
STORED_DTYPES = (MODEL, BFLOAT16, INT8, INT4, FP8)


@dataclass(frozen=True)
class Document:
    """A text to be ingested. Leading and trailing white space is dropped, because frameworks drop it too.

    Args:
        text: the document, not empty.
        name: what people call it (a file name, a title); need not be unique.

    Raises:
        EmptyInput: the text is empty or white space.

    """

    text: str
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidSetting(f"a document's text must be a str, got {type(self.text).__name__}")
        object.__setattr__(self, "text", self.text.strip())
        if not self.text:
            raise EmptyInput(f"document {self.name or ''!r} is empty: nothing but white space to ingest")

    @property
    def id(self) -> str:
        """Digest of the text, 32 hex digits: the same text is the same document."""
        return text_digest(self.text)

    def _repr_html_(self) -> str:
        beginning = self.text if len(self.text) <= 400 else self.text[:400].rstrip() + " …"
        title = f"{self.name or 'document'} ({self.id[:12]}, {len(self.text):,} characters)"
        return html.caption(title) + html.paragraph(beginning)


def text_digest(text: str) -> str:
    """SHA-256 of the UTF-8 text, first 32 hex digits (128 bits)."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True)
class Compression:
    """How a state was made from the full one: part of its identity in the store.

    Exactly one of ``keep`` (fraction of pairs, 0 < keep <= 1) and ``budget`` (pairs per head) is set.
    ``Compression.full()`` stands for the state with every pair. ``stored_dtype`` is one of ``STORED_DTYPES``; "model"
    stores the numbers as the model made them, to the bit.
    """

    method: str
    keep: float | None = None
    budget: int | None = None
    settings: tuple[tuple[str, Scalar], ...] = ()
    stored_dtype: str = MODEL

    @classmethod
    def full(cls, stored_dtype: str = MODEL) -> Compression:
        return cls(FULL, keep=1.0, stored_dtype=check_stored_dtype(stored_dtype))

    @classmethod
    def of(
        cls,
        method: str,
        *,
        keep: float | None = None,
        budget: int | None = None,
        settings: Mapping[str, Scalar] | None = None,
        stored_dtype: str = MODEL,
    ) -> Compression:
        """Checked constructor.

        Raises:
            InvalidSetting: both or neither of keep and budget, one of them out of range, or an unknown stored_dtype.

        """
        check_budget(keep, budget)
        keep = None if keep is None else float(keep)
        return cls(method, keep, budget, tuple(sorted((settings or {}).items())), check_stored_dtype(stored_dtype))

    @property
    def is_full(self) -> bool:
        return self.method == FULL

    def __str__(self) -> str:
        stored = "" if self.stored_dtype == MODEL else f" {self.stored_dtype}"
        if self.is_full:
            return FULL + stored
        size = f"keep={self.keep:g}" if self.keep is not None else f"budget={self.budget}"
        extra = "".join(f" {name}={value}" for name, value in self.settings)
        return f"{self.method} {size}{extra}{stored}"


def check_stored_dtype(stored_dtype: str) -> str:
    """Gives ``stored_dtype`` back. Raises InvalidSetting unless it is one of ``STORED_DTYPES``."""
    if stored_dtype not in STORED_DTYPES:
        raise InvalidSetting(f"stored_dtype must be one of {', '.join(STORED_DTYPES)}, got {stored_dtype!r}")
    return stored_dtype


def check_budget(keep: float | None, budget: int | None) -> None:
    """Raises InvalidSetting unless exactly one of ``keep`` and ``budget`` is given and in range."""
    if (keep is None) == (budget is None):
        raise InvalidSetting(
            f"give either keep (a fraction in (0, 1]) or budget (pairs per head, >= 1), got keep={keep}, budget={budget}"
        )
    if keep is not None:
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            way_out = ""
            if isinstance(keep, (int, float)) and not isinstance(keep, bool) and keep > 1:
                way_out = f"; for a number of pairs use budget={int(keep)}, for {keep:g} percent keep={keep / 100:g}"
            raise InvalidSetting(f"keep must be a fraction in (0, 1], got {keep!r}{way_out}")
    elif isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise InvalidSetting(f"budget must be a number of pairs per head, at least 1, got {budget!r}")


@dataclass(frozen=True)
class LayerPairs:
    """The pairs of one layer, flat per head: head 0's pairs, then head 1's, each in order of position.

    Flat because heads may keep different numbers of pairs, and padding would not free memory.

    Attributes:
        keys: ``[pairs, head_dim]``, WITHOUT rotary position, in the model's dtype.
        values: ``[pairs, head_dim]``.
        positions: ``[pairs]`` int32, each pair's original position in the document, 0 to tokens - 1.
        lengths: pairs in each KV head; they sum to ``pairs``.

    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values, self.positions))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_uniform(self) -> bool:
        return min(self.lengths) == max(self.lengths)


@dataclass(frozen=True)
class DocumentCache:
    """One document's KV state: what attention needs of it, for any question and at any offset.

    Attributes:
        document_id: the document's digest.
        token_ids: ``[tokens]`` int64, the document tokenised on its own, without special tokens.
        layers: one LayerPairs a layer.
        compression: how the pairs were chosen.

    """

    document_id: str
    token_ids: Tensor
    layers: tuple[LayerPairs, ...] = field(repr=False)
    compression: Compression

    @property
    def tokens(self) -> int:
        """Original length in tokens: what later positions are counted from, whatever was dropped."""
        return int(self.token_ids.numel())

    @property
    def is_full(self) -> bool:
        return self.compression.is_full

    @property
    def pairs(self) -> int:
        """Pairs kept over all layers and heads."""
        return sum(sum(layer.lengths) for layer in self.layers)

    @property
    def full_pairs(self) -> int:
        """Pairs there were before compression."""
        return sum(len(layer.lengths) * self.tokens for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what the state takes in memory, whatever ``stored_dtype`` makes of it on disk."""
        return sum(layer.nbytes for layer in self.layers) + self.token_ids.numel() * self.token_ids.element_size()

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].keys.dtype
