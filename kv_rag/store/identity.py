"""What makes two states the same: digests and the one spelling of what goes into them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kv_rag.document import MODEL, Compression


def length_prefixed_digest(*fields: bytes) -> str:
    """BLAKE2b, 40 hex digits. Lengths go in, so that no two different lists of fields read the same."""
    digest = hashlib.blake2b(digest_size=20)
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.hexdigest()


def fingerprint_digest(fingerprint: Mapping[str, str]) -> str:
    """One digest for all settings that states depend on; the order of the mapping does not matter."""
    items = sorted(fingerprint.items())
    return length_prefixed_digest(*(part.encode("utf-8", "surrogatepass") for item in items for part in item))


def state_key(fingerprint: str, document_id: str, token_ids: Tensor, compression: Compression) -> str:
    """The state's file name: two states share it only when all they depend on is equal.

    Args:
        fingerprint: from ``fingerprint_digest``.
        document_id: the document's digest.
        token_ids: ``[tokens]`` int64.
        compression: how the pairs were chosen.

    """
    return length_prefixed_digest(
        fingerprint.encode(), document_id.encode(), bytes(tensor_bytes(token_ids)), compression_json(compression).encode()
    )


def compression_json(compression: Compression) -> str:
    """The one spelling of a compression, in headers, in keys and in the index."""
    fields: dict[str, Any] = {
        "method": compression.method,
        "keep": None if compression.keep is None else float(compression.keep),
        "budget": compression.budget,
        "settings": dict(compression.settings),
    }
    if compression.stored_dtype != MODEL:
        fields["stored_dtype"] = compression.stored_dtype
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def parse_compression(text: str) -> Compression:
    """Reverses ``compression_json``. Raises ValueError, KeyError or TypeError for anything else."""
    fields = json.loads(text)
    method, settings = fields["method"], fields["settings"]
    if not isinstance(method, str) or not all(isinstance(value, (str, int, float)) for value in settings.values()):
        raise ValueError("a compression's method is a string and its settings are numbers, strings or booleans")
    return Compression.of(
        method, keep=fields["keep"], budget=fields["budget"], settings=settings,
        stored_dtype=fields.get("stored_dtype", MODEL),
    )  # fmt: skip


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous and in main memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
