"""One state file: safetensors, everything about the state in it.

Tensors: for layer i (three digits) ``layers.i.keys`` and ``layers.i.values`` ``[pairs, head_dim]`` in the model's dtype,
``layers.i.positions`` ``[pairs]`` int32, flat per head as in ``LayerPairs``; ``token_ids`` ``[tokens]`` int64; ``text``
``[bytes]`` uint8, the document in UTF-8. Header metadata (all strings): ``format``, ``document``, ``name``,
``compression`` (JSON), ``lengths`` (JSON: pairs of each head of each layer), ``fingerprint``, ``created``, ``checksums``
(JSON: tensor name -> BLAKE2b of its bytes), and ``header_checksum`` over all of the above.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kv_rag.document import Compression, Document, DocumentCache, LayerPairs, text_digest
from kv_rag.errors import DamagedState

FORMAT = "1"
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Header:
    """What a state file says of itself, checked against its own checksum."""

    document_id: str
    name: str | None
    compression: Compression
    lengths: tuple[tuple[int, ...], ...]
    tokens: int
    characters: int
    fingerprint: str
    created: str
    checksums: Mapping[str, str]

    @property
    def pairs(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def full_pairs(self) -> int:
        return self.tokens * sum(len(heads) for heads in self.lengths)


def state_key(fingerprint: str, document_id: str, token_ids: Tensor, compression: Compression) -> str:
    """Content address of a state: 40 hex digits over length-prefixed fields, so that no two inputs run together."""
    digest = hashlib.blake2b(digest_size=20)
    ids = token_ids.to(torch.int64).contiguous().numpy().tobytes()
    for field in (fingerprint.encode(), document_id.encode(), ids, compression_json(compression).encode()):
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.hexdigest()


def compression_json(compression: Compression) -> str:
    return json.dumps([compression.method, compression.keep, compression.budget, list(compression.settings)])


def compression_from_json(text: str) -> Compression:
    method, keep, budget, settings = json.loads(text)
    if not isinstance(method, str):
        raise ValueError(f"method {method!r}")
    return Compression(method, keep, budget, tuple((str(name), value) for name, value in settings))


def write_state(path: Path, document: Document, cache: DocumentCache, fingerprint: str, created: str) -> None:
    """Writes ``path`` in one step: a temporary file, synced, renamed. A reader sees all of it or nothing.

    Raises:
        OSError: the file system refuses; nothing is left behind.
    """
    tensors = _tensors(document, cache)
    metadata = {
        "format": FORMAT,
        "document": document.id,
        "name": json.dumps(document.name),
        "compression": compression_json(cache.compression),
        "lengths": json.dumps([layer.lengths for layer in cache.layers]),
        "tokens": str(cache.tokens),
        "characters": str(len(document.text)),
        "fingerprint": fingerprint,
        "created": created,
        "checksums": json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}),
    }
    metadata["header_checksum"] = _header_checksum(metadata)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, suffix=".safetensors", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o600)
        _sync(Path(temporary))
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        raise
    _sync(path.parent)


def _tensors(document: Document, cache: DocumentCache) -> dict[str, Tensor]:
    tensors = {}
    for index, layer in enumerate(cache.layers):
        for part in ("keys", "values", "positions"):
            # safetensors refuses tensors that share memory, as all layers' positions of a full state do.
            tensor = getattr(layer, part).detach().to("cpu")
            tensors[f"layers.{index:03d}.{part}"] = tensor.clone() if part == "positions" else tensor.contiguous()
    tensors["token_ids"] = cache.token_ids.to("cpu", torch.int64).contiguous()
    text = document.text.encode("utf-8", "surrogatepass")
    tensors["text"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def checksum(tensor: Tensor) -> str:
    """BLAKE2b, 128 bits, of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def _header_checksum(metadata: Mapping[str, str]) -> str:
    fields = [[name, metadata[name]] for name in sorted(metadata) if name != "header_checksum"]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


def read_header(path: Path) -> Header:
    """The header of a state file, without its tensors.

    Raises:
        FileNotFoundError: no such file.
        DamagedState: not a state file, or its header was changed.
    """
    with _opened(path) as file:
        return _header(path, file)


def read_state(path: Path, *, check: bool) -> tuple[Header, DocumentCache]:
    """A state, its tensors mapped from the file.

    Args:
        path: the file.
        check: compare every tensor with its checksum, which reads them all.

    Raises:
        FileNotFoundError: no such file.
        DamagedState: see ``read_header``; also shapes that do not fit together or a checksum that differs.
    """
    with _opened(path) as file:
        header = _header(path, file)
        names = set(file.keys())
        if names != set(header.checksums):
            raise damaged(path, "its tensors are not those its header lists")
        tensors = {name: file.get_tensor(name) for name in sorted(names)}
    if check:
        for name, tensor in tensors.items():
            if checksum(tensor) != header.checksums[name]:
                raise damaged(path, f"the bytes of {name} changed since they were written")
    layers = []
    for index, lengths in enumerate(header.lengths):
        parts = [tensors.get(f"layers.{index:03d}.{part}") for part in ("keys", "values", "positions")]
        layers.append(_layer(path, index, parts, lengths))
    token_ids = tensors.get("token_ids")
    if token_ids is None or token_ids.dtype != torch.int64 or tuple(token_ids.shape) != (header.tokens,):
        raise damaged(path, f"token_ids is not [{header.tokens}] int64")
    return header, DocumentCache(header.document_id, token_ids, tuple(layers), header.compression)


def _layer(path: Path, index: int, parts: list[Tensor | None], lengths: tuple[int, ...]) -> LayerPairs:
    keys, values, positions = parts
    pairs = sum(lengths)
    fits = (
        keys is not None and values is not None and positions is not None
        and keys.dim() == 2 and keys.shape[0] == pairs and values.shape == keys.shape and values.dtype == keys.dtype
        and keys.is_floating_point() and tuple(positions.shape) == (pairs,) and positions.dtype == torch.int32
    )  # fmt: skip
    if not fits:
        raise damaged(path, f"the tensors of layer {index} do not fit {pairs} pairs")
    assert keys is not None and values is not None and positions is not None
    return LayerPairs(keys, values, positions, lengths)


def read_text(path: Path) -> str:
    """The document's text, alone.

    Raises:
        FileNotFoundError, DamagedState: as ``read_header``; also text that is not the document's.
    """
    with _opened(path) as file:
        header = _header(path, file)
        if "text" not in header.checksums or "text" not in set(file.keys()):
            raise damaged(path, "its text is missing")
        try:
            text = file.get_tensor("text").numpy().tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise damaged(path, "its text is not UTF-8") from None
    if text_digest(text) != header.document_id:
        raise damaged(path, "its text is not that of its document id")
    return text


def damaged(path: Path, what: str) -> DamagedState:
    return DamagedState(
        f"state file {path} is damaged: {what}; remove the document and ingest it again (kv-rag verify lists all damage)"
    )


class _opened:
    """``safe_open`` for a regular file, with DamagedState for whatever safetensors finds wrong with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def __enter__(self) -> Any:
        if self._path.is_symlink():
            raise damaged(self._path, "it is a symbolic link")
        if not self._path.exists():
            raise FileNotFoundError(self._path)
        try:
            self._file = safe_open(self._path, framework="pt", device="cpu")
            return self._file.__enter__()
        except (SafetensorError, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
            raise damaged(self._path, f"not a readable safetensors file ({error})") from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.__exit__(kind, error, trace)
        if isinstance(error, (SafetensorError, RuntimeError)):
            raise damaged(self._path, str(error)) from error


def _header(path: Path, file: Any) -> Header:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise damaged(path, f"format {metadata.get('format')!r}, this version reads {FORMAT!r}")
    if metadata.get("header_checksum") != _header_checksum(metadata):
        raise damaged(path, "its header was changed")
    try:
        return Header(
            document_id=metadata["document"],
            name=json.loads(metadata["name"]),
            compression=compression_from_json(metadata["compression"]),
            lengths=tuple(tuple(int(count) for count in heads) for heads in json.loads(metadata["lengths"])),
            tokens=int(metadata["tokens"]),
            characters=int(metadata["characters"]),
            fingerprint=metadata["fingerprint"],
            created=metadata["created"],
            checksums=json.loads(metadata["checksums"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its header lacks or garbles a field ({error})") from error


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
