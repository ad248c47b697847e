"""One state in one safetensors file: writing it, and reading it without trusting it.

Tensors, in the file's order (layer after layer, so that the first layers can be used while later ones are read):
    ``token_ids``                   [tokens] int64
    ``layers.{i:03d}.positions``    [pairs] int32
    ``layers.{i:03d}.keys``         [pairs, head_dim] float32, float16 or bfloat16
    ``layers.{i:03d}.values``       as keys
    ``text``                        [bytes] uint8, UTF-8
A compression with a ``stored_dtype`` has keys and values as ``kv_rag.store.quantise`` packs them, with the ranges
(``layers.{i:03d}.keys.low`` and so on) before them.

Metadata, all strings: ``format``, ``integrity`` (``crc32`` or ``hmac``, see ``kv_rag.store.seal``), ``fingerprint`` (JSON:
what the state depends on, by name), ``document_id``, ``name`` (JSON), ``compression`` (JSON), ``dtype`` (of the numbers
when read: float32, float16 or bfloat16), ``tokens``, ``characters``, ``lengths`` (JSON: pairs in every head of every
layer), ``created``, ``checksums`` (JSON: of every tensor's bytes) and ``header_checksum`` over all of these and every
tensor's dtype and shape. Spaces may follow the header's last brace, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from kv_rag.errors import DamagedState, InvalidSetting, StoreUnreachable
from kv_rag.store import quantise
from kv_rag.store.identity import (
    compression_json,
    fingerprint_digest,
    parse_compression,
    state_key,
    tensor_bytes,
)
from kv_rag.store.seal import HMAC, NO_KEY, Seal

FORMAT = "kv_rag state 2"
LARGEST_HEADER = 4 << 20  # bytes; 100 layers of 128 heads need 0.2 MB. Bounds what a hostile file makes us parse.

_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip
PAIR_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What a file that is not as written can make the readers raise.
_GARBLED = (
    SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError
)  # fmt: skip
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Header:
    """What a state file says about itself."""

    settings: Mapping[str, str]  # what it depends on, by name: model, tokenizer, template, rotary, dtype, ...
    document_id: str
    name: str | None
    compression: Compression
    tokens: int
    characters: int
    lengths: tuple[tuple[int, ...], ...]  # [layers][kv_heads]
    created: str
    dtype: str  # of keys and values once read, whatever they are stored in
    checksums: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        return fingerprint_digest(self.settings)

    @property
    def pairs(self) -> int:
        return sum(sum(lengths) for lengths in self.lengths)

    @property
    def full_pairs(self) -> int:
        return sum(len(lengths) * self.tokens for lengths in self.lengths)


@dataclass(frozen=True)
class StateFile:
    """A state file whose header has been checked. Its tensors are mapped: bytes are read when they are used."""

    path: Path
    file_bytes: int
    identity: tuple[int, ...]  # changes when the file is replaced or written to
    header: Header
    tensors: Mapping[str, Tensor]
    seal: Seal

    def cache(self) -> DocumentCache:
        """The state in the model's dtype: mapped when it is stored so, else computed here and held in memory."""
        layers = tuple(self._layer(i, lengths) for i, lengths in enumerate(self.header.lengths))
        return DocumentCache(self.header.document_id, self.tensors["token_ids"], layers, self.header.compression)

    def _layer(self, index: int, lengths: tuple[int, ...]) -> LayerPairs:
        prefix, stored_dtype = f"layers.{index:03d}.", self.header.compression.stored_dtype
        parts = {name.removeprefix(prefix): part for name, part in self.tensors.items() if name.startswith(prefix)}
        keys, values = quantise.unpack(parts, stored_dtype, lengths, PAIR_DTYPES[self.header.dtype])
        return LayerPairs(keys, values, parts["positions"], lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and positions once read, as ``LayerPairs`` counts them."""
        element = PAIR_DTYPES[self.header.dtype].itemsize
        return sum(
            sum(lengths) * (2 * self.tensors[f"layers.{i:03d}.keys"].shape[-1] * element + torch.int32.itemsize)
            for i, lengths in enumerate(self.header.lengths)
        )

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
        _read_ahead(self.path)
        for name, found in self.seal.tensors(self.tensors).items():
            if found != self.header.checksums[name]:
                raise damaged(self.path, f"the bytes of {name} are not those that were written")
        tokens = self.header.tokens
        for name, tensor in self.tensors.items():
            # A file can carry matching checksums and still be made up.
            if name.endswith(".positions") and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < tokens:
                raise damaged(self.path, f"{name} points outside the document's {tokens} tokens")
        self.text()


def damaged(path: Path, what: str) -> DamagedState:
    """The error for a state that must not be used."""
    return DamagedState(f"{path} is damaged: {what}; remove this state (or the file) and ingest the document again")


# --- writing ---


def new_state(
    document: Document, cache: DocumentCache, settings: Mapping[str, str], seal: Seal = NO_KEY
) -> tuple[Header, dict[str, Tensor]]:
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
        for part, tensor in quantise.pack(layer, cache.compression.stored_dtype).items():
            tensors[f"layers.{i:03d}.{part}"] = tensor
    tensors["text"] = torch.frombuffer(text, dtype=torch.uint8)
    header = Header(
        settings, document.id, document.name, cache.compression, cache.tokens, len(document.text),
        tuple(tuple(layer.lengths) for layer in cache.layers), datetime.now(timezone.utc).isoformat(),
        str(cache.dtype).removeprefix("torch."), seal.tensors(tensors),
    )  # fmt: skip
    try:
        _check_structure(header, tensors)
    except ValueError as error:
        raise InvalidSetting(f"the state of document {document.id} cannot be stored: {error}") from error
    return header, tensors


def file_blocks(header: Header, tensors: Mapping[str, Tensor], seal: Seal = NO_KEY) -> Iterator[bytes | memoryview]:
    """The file's bytes, block by block.

    Not ``safetensors.torch.save_file``: that refuses tensors that share memory (a document may be shorter than its
    mapped file, keys may equal values), sorts them by size instead of by layer, and writes to a temporary file under a
    name of its own, which nobody would find and remove after a crash.
    """
    metadata = _metadata(header, seal)
    checksum = seal.header(_header_content(metadata, tensors))
    entries: dict[str, Any] = {"__metadata__": metadata | {"header_checksum": checksum}}
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


def _metadata(header: Header, seal: Seal) -> dict[str, str]:
    return {
        "format": FORMAT,
        "integrity": seal.kind,
        "fingerprint": json.dumps(dict(header.settings), sort_keys=True, separators=(",", ":")),
        "document_id": header.document_id,
        "name": json.dumps(header.name),  # as JSON: None is not "", and lone surrogates are escaped
        "compression": compression_json(header.compression),
        "tokens": str(header.tokens),
        "characters": str(header.characters),
        "lengths": json.dumps(header.lengths, separators=(",", ":")),
        "created": header.created,
        "dtype": header.dtype,
        "checksums": json.dumps(header.checksums, separators=(",", ":")),
    }


def _header_content(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """All that the header's checksum is made of."""
    shapes = [[name, _DTYPES.get(tensor.dtype, "other"), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    return json.dumps([sorted(metadata.items()), shapes]).encode()


# --- reading ---


def read_state(path: Path, seal: Seal = NO_KEY) -> StateFile:
    """Opens a state file and checks all but the tensors' bytes.

    Raises:
        FileNotFoundError: there is no such file.
        StoreUnreachable: there are no rights to read it.
        DamagedState: it is no state file of this format, not the one its name says, or not written by a holder of the key.

    """
    try:
        status = _regular_file(path)
        metadata, tensors = _map(path)
        header = _parse(metadata, tensors, seal)
        _check_structure(header, tensors)
        key = state_key(header.fingerprint, header.document_id, tensors["token_ids"], header.compression)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise StoreUnreachable(f"{path} may not be read; ask for its rights or ingest into another folder") from error
    except KeyError as error:
        raise damaged(path, f"{error} is missing") from error
    except _GARBLED as error:
        raise damaged(path, f"{error}") from error
    if key != path.stem:
        raise damaged(path, "its content belongs under another file name")
    identity = (status[0], status[1], status[2])
    return StateFile(path, status[0], identity, header, tensors, seal)


def _regular_file(path: Path) -> tuple[int, int, int]:
    """Size, inode and time of change of a file that is one, with no link on the way and a header of sane length."""
    if path.parent.is_symlink():
        raise ValueError("its folder is a symbolic link")
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        end = 8 + header_bytes(file.read(8), status.st_size)
        file.seek(max(8, end - 8))
        if not file.read(end - file.tell()).rstrip(b" ").endswith(b"}"):
            raise ValueError("a header with something else behind it")
    return status.st_size, status.st_ino, status.st_mtime_ns


def _map(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        # Views of the mapped file: nothing is read yet, and a file removed meanwhile stays until they are gone.
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}


def _read_ahead(path: Path) -> None:
    """Asks the system to fetch the file, so that its last layers arrive while the first are looked at."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_beginning(
    name: str, content: bytes, file_bytes: int, seal: Seal = NO_KEY
) -> tuple[StateFile, tuple[int, int]]:
    """A state from its file's first bytes (all of the header at least), and where in the file its text begins and ends.

    For files that are far away. The tensors have shapes and no bytes, which are to be checked when the file is here.

    Raises:
        DamagedState: it is not a state file.

    """
    try:
        beginning = 8 + header_bytes(content[:8], file_bytes)
        entries = json.loads(content[8:beginning])
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__").items()}
        by_code = {code: dtype for dtype, code in _DTYPES.items()}
        tensors = {
            part: torch.empty(entry["shape"], dtype=by_code[entry["dtype"]], device="meta")
            for part, entry in entries.items()
        }
        header = _parse(metadata, tensors, seal)
        _check_structure(header, tensors)
        begin, end = (beginning + int(offset) for offset in entries["text"]["data_offsets"])
        if not beginning <= begin <= end <= file_bytes or end - begin != tensors["text"].numel():
            raise ValueError(f"a text at {begin} to {end} in a file of {file_bytes} bytes")
    except KeyError as error:
        raise damaged(Path(name), f"{error} is missing") from error
    except (*_GARBLED, RecursionError) as error:
        raise damaged(Path(name), f"{error}") from error
    return StateFile(Path(name), file_bytes, (), header, tensors, seal), (begin, end)


def header_bytes(beginning: bytes, file_bytes: int) -> int:
    """Length of the header, from a file's first 8 bytes. Raises ValueError when it is not one that may be read."""
    if len(beginning) < 8:
        raise ValueError("too short")
    length = int(struct.unpack("<Q", beginning)[0])
    if length > min(LARGEST_HEADER, file_bytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    return length


def _parse(metadata: dict[str, str], tensors: Mapping[str, Tensor], seal: Seal) -> Header:
    expected = metadata.pop("header_checksum")
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format'][:40]!r}, this version reads {FORMAT!r}")
    if metadata["integrity"] != seal.kind:
        raise ValueError("it was not written by a holder of the HMAC key" if seal.kind == HMAC
                         else "it can only be checked with the HMAC key it was written with")  # fmt: skip
    if not seal.fits_header(_header_content(metadata, tensors), expected):
        raise ValueError("the header is not the one that was written"
                         + (", or not by a holder of the HMAC key" if seal.kind == HMAC else ""))  # fmt: skip
    settings = json.loads(metadata["fingerprint"])
    if not all(isinstance(value, str) for value in settings.values()):
        raise ValueError("a fingerprint that holds more than strings")
    lengths = json.loads(metadata["lengths"])
    if not all(type(length) is int for layer in lengths for length in layer):
        raise ValueError("lengths that are no numbers")
    name = json.loads(metadata["name"])
    if name is not None and not isinstance(name, str):
        raise ValueError("a name that is no string")
    datetime.fromisoformat(metadata["created"])
    return Header(
        settings, metadata["document_id"], name, parse_compression(metadata["compression"]),
        int(metadata["tokens"]), int(metadata["characters"]), tuple(tuple(layer) for layer in lengths),
        metadata["created"], metadata["dtype"], dict(json.loads(metadata["checksums"])),
    )  # fmt: skip


def _check_structure(header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless every tensor is there, and has the dtype and shape that the header implies."""
    if header.dtype not in PAIR_DTYPES:
        raise ValueError(f"keys of {header.dtype[:40]}; {', '.join(PAIR_DTYPES)} can be stored")
    expected = _expected_pairs(header, tensors)
    if not header.lengths or {"token_ids", "text", *expected} != set(tensors) or set(header.checksums) != set(tensors):
        raise ValueError(f"{len(tensors)} tensors and {len(header.checksums)} checksums for {len(header.lengths)} layers")
    if not _DIGEST.fullmatch(header.document_id):
        raise ValueError(f"document id {header.document_id[:40]!r} is not 32 hex digits")
    _expect(tensors, "token_ids", (header.tokens,), torch.int64)
    _expect(tensors, "text", (tensors["text"].numel(),), torch.uint8)
    for name, (shape, dtype) in expected.items():
        _expect(tensors, name, shape, dtype)


def _expected_pairs(header: Header, tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every layer's tensors. Raises ValueError or KeyError when they cannot be told."""
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for i, lengths in enumerate(header.lengths):
        if not lengths or min(lengths) < 0 or max(lengths) > header.tokens:
            raise ValueError(f"layer {i} keeps {lengths[:8]} pairs per head of {header.tokens} tokens")
        keys = tensors[f"layers.{i:03d}.keys"]
        if keys.dim() != 2:
            raise ValueError(f"layer {i} has keys of shape {list(keys.shape)}")
        stored = quantise.shapes(
            header.compression.stored_dtype, lengths, keys.shape[-1], PAIR_DTYPES[header.dtype]
        )
        expected |= {f"layers.{i:03d}.{part}": shape for part, shape in stored.items()}
        expected[f"layers.{i:03d}.positions"] = ((sum(lengths),), torch.int32)
    return expected


def _expect(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
