"""One state in one safetensors file: writing it, and reading it without trusting it.

Tensors, in the file's order (layer after layer, so that the first layers can be used while later ones are read):
    ``token_ids``                   [tokens] int64
    ``layers.{i:03d}.positions``    [pairs] int32
    ``layers.{i:03d}.keys``         [pairs, head_dim] float32, float16 or bfloat16
    ``layers.{i:03d}.values``       as keys
    ``text``                        [bytes] uint8, UTF-8

Metadata, all strings: ``format``, ``fingerprint`` (digest), ``document_id``, ``name`` (JSON), ``compression`` (JSON),
``tokens``, ``characters``, ``lengths`` (JSON: pairs in every head of every layer), ``created``, ``checksums`` (JSON:
BLAKE2b-128 of every tensor's bytes) and ``header_checksum`` over all of these and every tensor's dtype and shape.
"""

from __future__ import annotations

import json
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kv_rag.document import Compression, Document, DocumentCache, LayerPairs, text_digest
from kv_rag.errors import DamagedState, InvalidSetting, StoreError
from kv_rag.store.identity import (
    checksum,
    compression_json,
    length_prefixed_digest,
    parse_compression,
    state_key,
    tensor_bytes,
)

FORMAT = "kv_rag state 1"
LARGEST_HEADER = 16 << 20  # bytes; 100 layers of 128 heads need 0.2 MB. Bounds what a hostile file makes us parse.

_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip
_PAIR_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What a file that is not as written can make the readers raise.
_GARBLED = (
    SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError
)  # fmt: skip
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Header:
    """What a state file says about itself."""

    fingerprint: str
    document_id: str
    name: str | None
    compression: Compression
    tokens: int
    characters: int
    lengths: tuple[tuple[int, ...], ...]  # [layers][kv_heads]
    created: str
    checksums: Mapping[str, str]


@dataclass(frozen=True)
class StateFile:
    """A state file whose header has been checked. Its tensors are mapped: bytes are read when they are used."""

    path: Path
    file_bytes: int
    identity: tuple[int, ...]  # changes when the file is replaced or written to
    header: Header
    tensors: Mapping[str, Tensor]

    def cache(self) -> DocumentCache:
        layers = tuple(
            LayerPairs(
                keys=self.tensors[f"layers.{i:03d}.keys"],
                values=self.tensors[f"layers.{i:03d}.values"],
                positions=self.tensors[f"layers.{i:03d}.positions"],
                lengths=lengths,
            )
            for i, lengths in enumerate(self.header.lengths)
        )
        return DocumentCache(self.header.document_id, self.tensors["token_ids"], layers, self.header.compression)

    def text(self) -> str:
        """The document's text. Raises DamagedState when it is not the one the document's id was made of."""
        try:
            text = bytes(tensor_bytes(self.tensors["text"])).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise damaged(self.path, "its text is not UTF-8") from error
        if text_digest(text) != self.header.document_id or len(text) != self.header.characters:
            raise damaged(self.path, "its text is not the document's")
        return text

    def check(self) -> None:
        """Reads everything. Raises DamagedState naming the first tensor whose bytes are not those written."""
        for name, tensor in self.tensors.items():
            if checksum(tensor) != self.header.checksums[name]:
                raise damaged(self.path, f"the bytes of {name} are not those that were written")
        tokens = self.header.tokens
        for name, tensor in self.tensors.items():
            # A file can carry matching checksums and still be made up.
            if name.endswith(".positions") and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < tokens:
                raise damaged(self.path, f"{name} points outside the document's {tokens} tokens")


def damaged(path: Path, what: str) -> DamagedState:
    """The error for a state that must not be used."""
    return DamagedState(f"{path} is damaged: {what}; remove this state (or the file) and ingest the document again")


# --- writing ---


def new_state(document: Document, cache: DocumentCache, fingerprint: str) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors, in the file's order, of a state to be written.

    Raises:
        InvalidSetting: the cache is another document's, or its tensors do not fit each other.

    """
    if document.id != cache.document_id:
        raise InvalidSetting(f"this is the state of document {cache.document_id}, not of {document.id} ({document.name})")
    text = bytearray(document.text.encode("utf-8", "surrogatepass"))
    tensors = {"token_ids": cache.token_ids}
    for i, layer in enumerate(cache.layers):
        # Positions first: whatever head_dim is, every tensor then begins at a multiple of its element size.
        tensors[f"layers.{i:03d}.positions"] = layer.positions
        tensors[f"layers.{i:03d}.keys"] = layer.keys
        tensors[f"layers.{i:03d}.values"] = layer.values
    tensors["text"] = torch.frombuffer(text, dtype=torch.uint8)
    header = Header(
        fingerprint, document.id, document.name, cache.compression, cache.tokens, len(document.text),
        tuple(tuple(layer.lengths) for layer in cache.layers), datetime.now(timezone.utc).isoformat(),
        {name: checksum(tensor) for name, tensor in tensors.items()},
    )  # fmt: skip
    try:
        _check_structure(header, tensors)
    except ValueError as error:
        raise InvalidSetting(f"the state of document {document.id} cannot be stored: {error}") from error
    return header, tensors


def file_blocks(header: Header, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file's bytes, block by block.

    Not ``safetensors.torch.save_file``: that refuses tensors that share memory (a document may be shorter than its
    mapped file, keys may equal values), sorts them by size instead of by layer, and writes to a temporary file under a
    name of its own, which nobody would find and remove after a crash.
    """
    metadata = _metadata(header)
    entries: dict[str, Any] = {"__metadata__": metadata | {"header_checksum": _header_checksum(metadata, tensors)}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # tensors begin aligned
    if len(content) > LARGEST_HEADER:
        raise InvalidSetting(f"a header of {len(content)} bytes, at most {LARGEST_HEADER} are read; give a shorter name")
    yield struct.pack("<Q", len(content)) + content
    for tensor in tensors.values():
        yield tensor_bytes(tensor)


def _metadata(header: Header) -> dict[str, str]:
    return {
        "format": FORMAT,
        "fingerprint": header.fingerprint,
        "document_id": header.document_id,
        "name": json.dumps(header.name),  # as JSON: None is not "", and lone surrogates are escaped
        "compression": compression_json(header.compression),
        "tokens": str(header.tokens),
        "characters": str(header.characters),
        "lengths": json.dumps(header.lengths, separators=(",", ":")),
        "created": header.created,
        "checksums": json.dumps(header.checksums, separators=(",", ":")),
    }


def _header_checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    shapes = [[name, _DTYPES.get(tensor.dtype, "other"), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    return length_prefixed_digest(json.dumps([sorted(metadata.items()), shapes]).encode())


# --- reading ---


def read_state(path: Path) -> StateFile:
    """Opens a state file and checks all but the tensors' bytes.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: there are no rights to read it.
        DamagedState: it is not a state file, or not the one its name says.

    """
    try:
        status = _regular_file(path)
        metadata, tensors = _map(path)
        header = _parse(metadata, tensors)
        _check_structure(header, tensors)
        key = state_key(header.fingerprint, header.document_id, tensors["token_ids"], header.compression)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise StoreError(f"{path} may not be read; ask for its rights or ingest into another folder") from error
    except KeyError as error:
        raise damaged(path, f"{error} is missing") from error
    except _GARBLED as error:
        raise damaged(path, f"{error}") from error
    if key != path.stem:
        raise damaged(path, "its content belongs under another file name")
    identity = (status[0], status[1], status[2])
    return StateFile(path, status[0], identity, header, tensors)


def _regular_file(path: Path) -> tuple[int, int, int]:
    """Size, inode and time of change of a file that is one, with no link on the way and a header of sane length."""
    if path.parent.is_symlink():
        raise ValueError("its folder is a symbolic link")
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        beginning = file.read(8)
    if len(beginning) < 8:
        raise ValueError("too short")
    length = struct.unpack("<Q", beginning)[0]
    if length > min(LARGEST_HEADER, status.st_size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {status.st_size}")
    return status.st_size, status.st_ino, status.st_mtime_ns


def _map(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        # Views of the mapped file: nothing is read yet, and a file removed meanwhile stays until they are gone.
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}


def _parse(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> Header:
    expected = metadata.pop("header_checksum")
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format'][:40]!r}, this version reads {FORMAT!r}")
    if _header_checksum(metadata, tensors) != expected:
        raise ValueError("the header is not the one that was written")
    lengths = json.loads(metadata["lengths"])
    if not all(type(length) is int for layer in lengths for length in layer):
        raise ValueError("lengths that are no numbers")
    name = json.loads(metadata["name"])
    if name is not None and not isinstance(name, str):
        raise ValueError("a name that is no string")
    datetime.fromisoformat(metadata["created"])
    return Header(
        metadata["fingerprint"], metadata["document_id"], name, parse_compression(metadata["compression"]),
        int(metadata["tokens"]), int(metadata["characters"]), tuple(tuple(layer) for layer in lengths),
        metadata["created"], dict(json.loads(metadata["checksums"])),
    )  # fmt: skip


def _check_structure(header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless every tensor is there, and has the dtype and shape that the header implies."""
    names = [f"layers.{i:03d}.{part}" for i in range(len(header.lengths)) for part in ("keys", "values", "positions")]
    if not names or set(tensors) != {"token_ids", "text", *names} or set(header.checksums) != set(tensors):
        raise ValueError(f"{len(tensors)} tensors and {len(header.checksums)} checksums for {len(header.lengths)} layers")
    if not _DIGEST.fullmatch(header.document_id):
        raise ValueError(f"document id {header.document_id[:40]!r} is not 32 hex digits")
    _expect(tensors, "token_ids", (header.tokens,), torch.int64)
    _expect(tensors, "text", (tensors["text"].numel(),), torch.uint8)
    dtype = tensors["layers.000.keys"].dtype
    if dtype not in _PAIR_DTYPES:
        raise ValueError(f"keys of {dtype}; float32, float16 and bfloat16 can be stored")
    for i, lengths in enumerate(header.lengths):
        if not lengths or min(lengths) < 0 or max(lengths) > header.tokens:
            raise ValueError(f"layer {i} keeps {lengths[:8]} pairs per head of {header.tokens} tokens")
        pairs, head_dim = sum(lengths), tensors[f"layers.{i:03d}.keys"].shape[-1]
        _expect(tensors, f"layers.{i:03d}.keys", (pairs, head_dim), dtype)
        _expect(tensors, f"layers.{i:03d}.values", (pairs, head_dim), dtype)
        _expect(tensors, f"layers.{i:03d}.positions", (pairs,), torch.int32)


def _expect(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
