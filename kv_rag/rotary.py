"""Rotary positions (RoPE, Su et al. 2021, arXiv 2104.09864) applied to keys and queries by this library itself.

The model is run with every position zero, so that its own rotation is the identity, and hands over keys without
position. They are stored like that and rotated here, in float32, to wherever the document stands in a prompt.

Dimension letters: H heads, T tokens, D head_dim, R rotary_dim (R <= D: some models rotate only the first part).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """Cosines and sines for some positions, each ``[T, R/2]`` float32."""

    cos: Tensor
    sin: Tensor

    def at(self, index: Tensor) -> Angles:
        """The rows ``index`` (int, any shape): ``[..., R/2]``."""
        index = index.to(torch.int64)
        return Angles(self.cos[index], self.sin[index])


def angles(positions: Tensor, inverse_frequencies: Tensor) -> Angles:
    """Angles of ``positions`` ``[T]`` (any integer dtype) for the model's ``inverse_frequencies`` ``[R/2]`` float32.

    YaRN also scales cos and sin. That factor already sits in the model's keys and queries (cos(0) times the factor),
    so the angles here are unscaled: scaling them again would count it twice.
    """
    theta = positions.to(torch.float32)[:, None] * inverse_frequencies[None, :]
    return Angles(theta.cos(), theta.sin())


def rotate(states: Tensor, at: Angles) -> Tensor:
    """Keys or queries ``[..., T, D]`` rotated to the positions of ``at``; computed in float32, dtype kept."""
    half = at.cos.shape[-1]
    wide = states.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = (first * at.cos - second * at.sin, second * at.cos + first * at.sin, rest)
    return torch.cat(rotated, dim=-1).to(states.dtype)


def rotate_into(out: Tensor, states: Tensor, at: Angles) -> None:
    """As ``rotate``, written to ``out`` ``[..., T, D]``: no temporary of the whole size in float32 models."""
    if states.dtype != torch.float32:
        out.copy_(rotate(states, at))
        return
    half = at.cos.shape[-1]
    first, second = states[..., :half], states[..., half : 2 * half]
    torch.mul(first, at.cos, out=out[..., :half]).addcmul_(second, at.sin, value=-1)
    torch.mul(second, at.cos, out=out[..., half : 2 * half]).addcmul_(first, at.sin)
    out[..., 2 * half :] = states[..., 2 * half :]
