"""Keys and values in fewer bits: pure tensor functions, from a layer's pairs to what is written and back.

Keys are stored without rotary position, so that a channel holds much the same number in every token (often far from
zero): they are quantised per channel. Values have no such channels: they are quantised per token.

===========  ==========================================  ==========================================
dtype        keys                                        values
===========  ==========================================  ==========================================
bfloat16     rounded                                     rounded
int8         8 bits, a range per head and channel        8 bits, a range per token
int4         8 bits, a range per head and channel        4 bits, a range per token and 64 channels
fp8          e4m3 around each channel's middle           e4m3, a scale per token
===========  ==========================================  ==========================================

A number x of a range becomes ``round((x - low) / scale)``, so that it comes back within half a ``scale`` (plus the
rounding of the dtype it is given back in). Ranges are rounded outward to what they are stored in, never inward.

Dimension letters: N pairs of all heads, G heads that keep a pair, D head_dim, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.document import BFLOAT16, FP8, INT4, INT8, MODEL, LayerPairs
from kv_rag.errors import InvalidSetting

VALUE_GROUP = 64  # channels that share a range in int4; the largest divisor of head_dim up to it
HEAD_DIM_STEP = 8  # so that every tensor of the file begins at a multiple of its element size, whatever is packed
_LARGEST = 1e38  # so that no range of float32 numbers overflows
_E4M3_LARGEST = 448.0

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Scheme:
    """How one stored dtype is written, read back, and what its tensors look like."""

    pack: Callable[[LayerPairs], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor], tuple[int, ...], torch.dtype], tuple[Tensor, Tensor]]
    shapes: Callable[[tuple[int, ...], int], dict[str, tuple[Shape, torch.dtype]]]


def pack(layer: LayerPairs, stored_dtype: str) -> dict[str, Tensor]:
    """The tensors that hold a layer's keys and values on disk, those of large elements first.

    Raises:
        InvalidSetting: numbers that are not finite, or a head_dim that is no multiple of 8.

    """
    if stored_dtype == MODEL:
        return {"keys": layer.keys, "values": layer.values}
    if layer.keys.shape[-1] % HEAD_DIM_STEP:
        raise InvalidSetting(
            f"stored_dtype={stored_dtype!r} needs a head_dim that is a multiple of {HEAD_DIM_STEP}, this model's is "
            f"{layer.keys.shape[-1]}; use stored_dtype={MODEL!r}"
        )
    if not (_within_range(layer.keys) and _within_range(layer.values)):
        raise InvalidSetting(
            f"the state holds numbers that are not finite or beyond {_LARGEST:g}, which stored_dtype={stored_dtype!r} has "
            f"no code for; use stored_dtype={MODEL!r}, or a model dtype with a larger range"
        )
    return _SCHEMES[stored_dtype].pack(layer)


def unpack(
    parts: Mapping[str, Tensor], stored_dtype: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[N, D]`` in ``dtype``, from what ``pack`` made of heads that keep ``lengths`` pairs."""
    if stored_dtype == MODEL:
        return parts["keys"], parts["values"]
    return _SCHEMES[stored_dtype].unpack(parts, lengths, dtype)


def shapes(
    stored_dtype: str, lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype
) -> dict[str, tuple[Shape, torch.dtype]]:
    """Shape and dtype of every tensor that ``pack`` makes: what a file must hold, and how many bytes it takes."""
    if stored_dtype == MODEL:
        return {name: ((sum(lengths), head_dim), dtype) for name in ("keys", "values")}
    return _SCHEMES[stored_dtype].shapes(lengths, head_dim)


def _within_range(numbers: Tensor) -> bool:
    return not numbers.numel() or bool(numbers.float().abs().amax() <= _LARGEST)  # False for NaN too


# --- ranges ---


def channel_ranges(rows: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Least and largest number of every channel of every head that keeps a pair: two float32 ``[G, D]``."""
    heads = torch.split(rows.float(), list(lengths))
    kept = [head for head in heads if head.shape[0]]
    if not kept:
        empty = torch.empty(0, rows.shape[-1])
        return empty, empty.clone()
    return torch.stack([head.amin(0) for head in kept]), torch.stack([head.amax(0) for head in kept])


def per_row(ranges: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``[G, D]``, one a head, as ``[N, D]``, one a pair."""
    counts = torch.tensor([length for length in lengths if length], dtype=torch.int64, device=ranges.device)
    return ranges.repeat_interleave(counts, dim=0)


def to_codes(numbers: Tensor, low: Tensor, scale: Tensor, levels: int) -> Tensor:
    """``round((numbers - low) / scale)`` as uint8, at most ``levels``; all arguments float32."""
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))  # a range of one number: every code is 0
    return ((numbers - low) / safe).round_().clamp_(0, levels).to(torch.uint8)


def step(low: Tensor, high: Tensor, levels: int) -> Tensor:
    """The bfloat16 scale with which ``levels`` steps from ``low`` reach ``high`` or beyond."""
    return rounded_up((high - low) / levels)


def rounded_up(numbers: Tensor) -> Tensor:
    """float32, not negative, as the nearest bfloat16 that is not smaller: its upper 16 bits, plus one if any are lost."""
    bits = numbers.float().contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def rounded_down(numbers: Tensor) -> Tensor:
    """float32 as the nearest bfloat16 that is not larger."""
    bits = numbers.float().contiguous().view(torch.int32)
    # The upper bits alone round toward zero; a negative number that loses bits has to go one further from it.
    further = ((bits & 0xFFFF) != 0) & (bits < 0)
    return ((bits >> 16) + further).to(torch.int16).view(torch.bfloat16)


def value_group(head_dim: int) -> int:
    """Channels that share a range in int4."""
    return max(size for size in range(1, min(head_dim, VALUE_GROUP) + 1) if head_dim % size == 0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 ``[N, D]`` under 16, D even, as ``[N, D / 2]``: even channels in the lower four bits."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Reverses ``pack_nibbles``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


# --- bfloat16 ---


def _pack_bfloat16(layer: LayerPairs) -> dict[str, Tensor]:
    return {"keys": layer.keys.to(torch.bfloat16), "values": layer.values.to(torch.bfloat16)}


def _unpack_bfloat16(parts: Mapping[str, Tensor], lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return parts["keys"].to(dtype), parts["values"].to(dtype)


def _shapes_bfloat16(lengths: tuple[int, ...], head_dim: int) -> dict[str, tuple[Shape, torch.dtype]]:
    return {name: ((sum(lengths), head_dim), torch.bfloat16) for name in ("keys", "values")}


# --- int8 and int4 ---


def _pack_integers(layer: LayerPairs, value_bits: int) -> dict[str, Tensor]:
    low, high = channel_ranges(layer.keys, layer.lengths)
    scale = step(low, high, 255)
    codes = to_codes(layer.keys.float(), per_row(low, layer.lengths), per_row(scale.float(), layer.lengths), 255)
    head_dim, levels = layer.values.shape[-1], 2**value_bits - 1
    group = head_dim if value_bits == 8 else value_group(head_dim)
    grouped = layer.values.float().reshape(-1, head_dim // group, group)
    value_low = rounded_down(grouped.amin(-1))
    value_scale = step(value_low.float(), grouped.amax(-1), levels)
    value_codes = to_codes(grouped, value_low.float()[..., None], value_scale.float()[..., None], levels).flatten(-2)
    return {
        "keys.low": low,  # float32: channels far from zero have ranges finer than a bfloat16 of their distance
        "keys.scale": scale,
        "values.low": value_low,
        "values.scale": value_scale,
        "keys": codes,
        "values": value_codes if value_bits == 8 else pack_nibbles(value_codes),
    }


def _unpack_integers(
    parts: Mapping[str, Tensor], lengths: tuple[int, ...], dtype: torch.dtype, value_bits: int
) -> tuple[Tensor, Tensor]:
    keys = parts["keys"].float() * per_row(parts["keys.scale"].float(), lengths) + per_row(parts["keys.low"], lengths)
    codes = parts["values"] if value_bits == 8 else unpack_nibbles(parts["values"])
    low, scale = parts["values.low"].float(), parts["values.scale"].float()
    grouped = codes.float().reshape(-1, low.shape[-1], codes.shape[-1] // low.shape[-1])
    return keys.to(dtype), (grouped * scale[..., None] + low[..., None]).flatten(-2).to(dtype)


def _shapes_integers(lengths: tuple[int, ...], head_dim: int, value_bits: int) -> dict[str, tuple[Shape, torch.dtype]]:
    pairs, heads = sum(lengths), sum(length > 0 for length in lengths)
    groups = 1 if value_bits == 8 else head_dim // value_group(head_dim)
    return {
        "keys.low": ((heads, head_dim), torch.float32),
        "keys.scale": ((heads, head_dim), torch.bfloat16),
        "values.low": ((pairs, groups), torch.bfloat16),
        "values.scale": ((pairs, groups), torch.bfloat16),
        "keys": ((pairs, head_dim), torch.uint8),
        "values": ((pairs, head_dim * value_bits // 8), torch.uint8),
    }


# --- fp8 ---


def _pack_fp8(layer: LayerPairs) -> dict[str, Tensor]:
    low, high = channel_ranges(layer.keys, layer.lengths)
    middle = low + (high - low) / 2  # e4m3 is fine near zero only: a channel far from it would lose all but its sign
    around = layer.keys.float() - per_row(middle, layer.lengths)
    scale = rounded_up(channel_ranges(around.abs(), layer.lengths)[1] / _E4M3_LARGEST)
    value_scale = rounded_up(layer.values.float().abs().amax(-1, keepdim=True) / _E4M3_LARGEST)
    return {
        "keys.middle": middle,
        "keys.scale": scale,
        "values.scale": value_scale,
        "keys": _to_e4m3(around, per_row(scale.float(), layer.lengths)),
        "values": _to_e4m3(layer.values.float(), value_scale.float()),
    }


def _to_e4m3(numbers: Tensor, scale: Tensor) -> Tensor:
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (numbers / safe).clamp_(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _unpack_fp8(parts: Mapping[str, Tensor], lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale, middle = per_row(parts["keys.scale"].float(), lengths), per_row(parts["keys.middle"], lengths)
    keys = parts["keys"].float() * scale + middle
    return keys.to(dtype), (parts["values"].float() * parts["values.scale"].float()).to(dtype)


def _shapes_fp8(lengths: tuple[int, ...], head_dim: int) -> dict[str, tuple[Shape, torch.dtype]]:
    pairs, heads = sum(lengths), sum(length > 0 for length in lengths)
    return {
        "keys.middle": ((heads, head_dim), torch.float32),
        "keys.scale": ((heads, head_dim), torch.bfloat16),
        "values.scale": ((pairs, 1), torch.bfloat16),
        "keys": ((pairs, head_dim), torch.float8_e4m3fn),
        "values": ((pairs, head_dim), torch.float8_e4m3fn),
    }


def _integers(value_bits: int) -> _Scheme:
    return _Scheme(
        lambda layer: _pack_integers(layer, value_bits),
        lambda parts, lengths, dtype: _unpack_integers(parts, lengths, dtype, value_bits),
        lambda lengths, head_dim: _shapes_integers(lengths, head_dim, value_bits),
    )


_SCHEMES = {
    BFLOAT16: _Scheme(_pack_bfloat16, _unpack_bfloat16, _shapes_bfloat16),
    INT8: _integers(8),
    INT4: _integers(4),
    FP8: _Scheme(_pack_fp8, _unpack_fp8, _shapes_fp8),
}
