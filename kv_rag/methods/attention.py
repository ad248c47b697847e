"""What methods that watch attention share: the weights that the document's own pairs received.

Dimension letters: H KV heads, G query heads of a KV head, B queries of a block, T document tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kv_rag.methods.base import Reading
from kv_rag.observation import LayerStep
from kv_rag.scoring import attention_blocks


def document_attention(step: LayerStep, before: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of attention from the step's tokens to the document's pairs.

    Args:
        step: of a state whose first slots are P's ``before`` and then the document's.
        before: slots of P.
        tokens: the document's length; less than that may have been read so far.

    Yields:
        ``visible`` ``[B]``, how many slots each query sees (P's included), and weights ``[H, G, B, t]`` float32 to the
        document tokens read so far. Weights to P and to text after the document are left out, so rows need not sum to 1.

    """
    visible = step.slots.index + 1
    keys = step.state.keys[:, : step.slots.end]
    for block, weights in attention_blocks(step.queries, keys, visible, step.scaling):
        yield visible[block], weights[..., before : before + tokens]


class LayerScores:
    """One ``[H, T]`` float32 for each layer of a document, zeros until it is written to."""

    def __init__(self, reading: Reading) -> None:
        self._shape = (reading.kv_heads, reading.tokens)
        self._layers: dict[int, Tensor] = {}

    def of(self, step: LayerStep) -> Tensor:
        """Those of the step's layer, on its device; to be changed in place."""
        if step.layer not in self._layers:
            self._layers[step.layer] = torch.zeros(self._shape, device=step.queries.device)
        return self._layers[step.layer]

    def __getitem__(self, layer: int) -> Tensor:
        return self._layers[layer]
