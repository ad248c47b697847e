"""Random document states, uniform and ragged: the store looks at no number in them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from kv_rag.document import Compression, Document, DocumentCache, LayerPairs
from kv_rag.store import LocalStore

FINGERPRINT = {"weights": "w" * 32, "dtype": "float32"}
HEAD_DIM = 8


def document(number: int = 0, name: str | None = None) -> Document:
    return Document(f"Document {number:06d} speaks of cranes, of harbours and of the number {number}.", name)


def state(
    of: Document,
    *,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[tuple[int, ...], ...] | None = None,
    tokens: int = 12,
) -> DocumentCache:
    """A full state of two layers and two heads, or with ``lengths`` ``[layers][kv_heads]`` a compressed one."""
    seed = torch.Generator().manual_seed(int(of.id[:8], 16))
    layers = []
    for heads in lengths or ((tokens, tokens), (tokens, tokens)):
        pairs = sum(heads)
        keys, values = (torch.randn(pairs, HEAD_DIM, generator=seed).to(dtype) for _ in range(2))
        positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in heads])
        layers.append(LayerPairs(keys, values, positions, heads))
    compression = Compression.full() if lengths is None else Compression.of("knorm", keep=0.5, settings={"sinks": 2})
    return DocumentCache(of.id, torch.randint(0, 250, (tokens,), generator=seed), tuple(layers), compression)


def same(one: DocumentCache, other: DocumentCache) -> bool:
    """Whether two states are equal to the bit, dtypes included."""
    parts = [(one.token_ids, other.token_ids)]
    for a, b in zip(one.layers, other.layers, strict=True):
        parts += [(a.keys, b.keys), (a.values, b.values), (a.positions, b.positions)]
    bits = all(
        a.dtype == b.dtype and a.shape == b.shape and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
        for a, b in parts
    )
    lengths = [layer.lengths for layer in one.layers] == [layer.lengths for layer in other.layers]
    return bits and lengths and (one.document_id, one.compression) == (other.document_id, other.compression)


def stored(folder: Path, number: int = 0) -> tuple[LocalStore, DocumentCache, Path]:
    """A store holding one state, the state, and its file."""
    store = LocalStore(folder, FINGERPRINT)
    of = document(number)
    return store, state(of), store.put(of, state(of)).path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def header_of(path: Path) -> tuple[dict, int]:
    """A safetensors file's header and where its tensors begin."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), 8 + length


def write_header(path: Path, header: dict, tensors: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)
