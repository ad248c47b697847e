"""Checksums: CRC-32 against accidents, keyed digests against forgery.

Without a key every tensor carries its CRC-32, which a first question hardly notices, and the header a BLAKE2b-160. With a
key the header carries an HMAC-SHA256 and every tensor a BLAKE2b-128 keyed from the same secret: who does not hold the key
cannot write a state that is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.store.identity import length_prefixed_digest, tensor_bytes

CRC32, HMAC = "crc32", "hmac"
KEY_NAME = "hmac key"  # in fingerprints
SHORTEST_KEY = 16  # bytes
_PARALLEL_FROM = 4 << 20  # bytes; starting threads costs as much as checking this
_MOST_THREADS = 4  # memory gives no more


@dataclass(frozen=True)
class Seal:
    """What is written beside bytes and compared when they are read.

    Attributes:
        kind: ``CRC32`` or ``HMAC``, as headers name it.
        key_id: tells keys apart without telling them; None without a key.

    """

    kind: str
    key_id: str | None = None
    _header_key: bytes = field(default=b"", repr=False)
    _tensor_key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, key: bytes | str | None) -> Seal:
        """From a secret of 16 bytes or more; None for checksums that anybody can write.

        Raises:
            InvalidSetting: the secret is too short.

        """
        if key is None:
            return cls(CRC32)
        secret = key.encode() if isinstance(key, str) else key
        if not isinstance(secret, bytes) or len(secret) < SHORTEST_KEY:
            raise InvalidSetting(
                f"an HMAC key has at least {SHORTEST_KEY} bytes; make one with python -c 'import secrets; "
                "print(secrets.token_hex(32))' and keep it secret"
            )
        return cls(
            HMAC, hmac.digest(secret, b"kv_rag key id", "sha256").hex()[:16],
            hmac.digest(secret, b"kv_rag headers", "sha256"), hmac.digest(secret, b"kv_rag tensors", "sha512"),
        )  # fmt: skip

    def header(self, content: bytes) -> str:
        """Digest of a header's content, in hex digits."""
        if self.kind == HMAC:
            return hmac.digest(self._header_key, content, "sha256").hex()
        return length_prefixed_digest(content)

    def fits_header(self, content: bytes, digest: str) -> bool:
        return hmac.compare_digest(self.header(content).encode(), digest.encode("utf-8", "surrogatepass"))

    def tensor(self, content: memoryview) -> str:
        """Checksum of a tensor's bytes, in hex digits."""
        if self.kind == HMAC:
            return hashlib.blake2b(content, digest_size=16, key=self._tensor_key).hexdigest()
        return f"{zlib.crc32(content):08x}"

    def tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Checksums of many tensors, in several threads when they are large (hashing lets go of Python's lock)."""
        blocks = [tensor_bytes(tensor) for tensor in tensors.values()]
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        if threads == 1 or sum(map(len, blocks)) < _PARALLEL_FROM:
            return dict(zip(tensors, map(self.tensor, blocks), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(tensors, pool.map(self.tensor, blocks), strict=True))


NO_KEY = Seal.of(None)
