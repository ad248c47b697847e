"""The language model: the only module that touches transformers models and tokenizers.

Dimension letters: T tokens, V vocabulary, H KV heads, D head_dim.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_rag import attention, bundled, hub
from kv_rag.attention import ForwardPass
from kv_rag.errors import ContextOverflow, InvalidSetting, ModelNotFound, UnsupportedModel
from kv_rag.observation import Observer
from kv_rag.rotary import angles
from kv_rag.state import LayerState, PromptState, Slots

# Architectures whose attention passes keyword arguments to a registered function and whose keys carry plain rotary
# positions. Each is held against plain transformers in the tests.
SUPPORTED = ("llama", "mistral", "phi3", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3", "yarn")
_SENTINEL = "\u2060kv_rag content\u2060"  # word joiners: no template strips or splits this


class LanguageModel:
    """A causal language model with its tokenizer, run over this library's own KV buffers.

    The model given is not changed: its attention is switched for the length of one forward pass and switched back.

    Raises:
        UnsupportedModel: architecture, layer type or rotary scaling whose state cannot be composed exactly.

    """

    def __init__(self, model: Any, tokenizer: Any, *, system: str | None = None) -> None:
        check_supported(model.config)
        self.model, self.tokenizer, self.system = model.eval(), tokenizer, system
        config = model.config
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.context: int = config.max_position_embeddings
        rotary = model.get_decoder().rotary_emb
        self.inverse_frequencies: Tensor = rotary.inv_freq.detach().float()
        self._embedding: Tensor = model.get_input_embeddings().weight
        self._lock = threading.Lock()
        # A fast tokenizer keeps split_special_tokens inside: a call in another thread would change it under this one.
        self._tokenizer_lock = threading.Lock()
        attention.register()
        self.header = self._header()

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", system: str | None = None
    ) -> LanguageModel:
        """Loads a model from a folder, a hub id, or ``bundled:NAME``.

        Args:
            source: where from.
            device: a torch device, or "auto" for CUDA when there is one, else CPU.
            dtype: a torch dtype or its name, or "auto": float32 on the CPU (where half precision is slower), on
                other devices as the model was saved.
            system: text of the system message that stands before every document.

        Raises:
            ModelNotFound: nothing loadable there.
            UnsupportedModel: see the class. Found out from the config, before weights are read.

        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        name = str(source)
        place = bundled.bundled_folder(name.removeprefix(bundled.PREFIX)) if name.startswith(bundled.PREFIX) else source
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = _dtype(dtype, device)
        # Without a hub only what an earlier download left is looked at: at once, where the hub's client would retry.
        local = Path(place).exists() or not hub.reachable()
        try:
            check_supported(AutoConfig.from_pretrained(place, local_files_only=local))
            model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=chosen, local_files_only=local)
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=local)
        except UnsupportedModel:
            raise
        except (OSError, ValueError) as error:
            raise ModelNotFound(
                f"cannot load a model from {name!r}: {_why_not(place, local, error)}; "
                f"give a folder with config.json, a hub id (needs the network), or bundled:smollm2-135m"
            ) from error
        return cls(model.to(device), tokenizer, system=system)

    # --- forward ---

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention, ``[hidden, heads * head_dim]``."""
        weight: Tensor = self.model.get_decoder().layers[layer].self_attn.o_proj.weight.detach()
        return weight

    def new_state(self, capacities: Sequence[int]) -> PromptState:
        """Empty buffers with ``capacities[layer]`` slots in each layer."""
        layers = [LayerState.allocate(self.kv_heads, slots, self.head_dim, self._embedding) for slots in capacities]
        return PromptState(layers, 0)

    @torch.no_grad()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        state: PromptState,
        slots: list[Slots],
        *,
        logits: int = 1,
        observer: Observer | None = None,
    ) -> Tensor | None:
        """One forward pass: new pairs are written to ``slots`` of ``state``, attention goes over them and all before.

        Args:
            token_ids: ``[T]`` int64.
            positions: ``[T]`` int64, where the tokens stand in the prompt.
            state: written to in place.
            slots: one for each layer.
            logits: of how many last tokens to compute; 0 leaves the vocabulary projection out.
            observer: sees every layer.

        Returns:
            ``[logits, V]`` in the model's dtype, or None.

        """
        tokens = token_ids.to(self.device)[None]
        at = angles(positions.to(self.device), self.inverse_frequencies.to(self.device))
        forward_pass = ForwardPass(state, at, slots, observer)
        runner = self.model if logits else self.model.get_decoder()
        arguments: dict[str, Any] = {"logits_to_keep": logits} if logits else {}
        with self._lock:
            config = self.model.config
            usual = config._attn_implementation
            config._attn_implementation = attention.NAME
            try:
                # Position zero makes the model's own rotation the identity (times YaRN's factor).
                output = runner(
                    tokens, position_ids=torch.zeros_like(tokens), use_cache=False, kv_rag_pass=forward_pass, **arguments
                )
            finally:
                config._attn_implementation = usual
        return output.logits[0] if logits else None

    @torch.no_grad()
    def run_in_chunks(
        self,
        token_ids: Tensor,
        positions: Tensor,
        state: PromptState,
        slots: list[Tensor],
        chunk: int,
        *,
        logits: int = 1,
        observer: Observer | None = None,
        on_chunk: Callable[[int], object] | None = None,
    ) -> Tensor | None:
        """``run`` over ``chunk`` tokens at a time, in order: memory for activations stays bounded.

        Args:
            slots: one ``[T]`` int64 tensor for each layer; layers may share the same tensor object.
            on_chunk: called with the number of tokens after each chunk.

        """
        result = None
        total = token_ids.numel()
        for begin in range(0, total, chunk):
            end = min(begin + chunk, total)
            shared: dict[int, Slots] = {}
            for index in slots:
                if id(index) not in shared:
                    shared[id(index)] = Slots.of(index[begin:end])
            result = self.run(
                token_ids[begin:end],
                positions[begin:end],
                state,
                [shared[id(index)] for index in slots],
                logits=logits if end == total else 0,
                observer=observer,
            )
            if on_chunk is not None:
                on_chunk(end - begin)
        return result

    # --- text ---

    def encode(self, text: str, *, template: bool = True) -> Tensor:
        """Token ids ``[T]`` int64 of ``text`` on its own, no special tokens added.

        Args:
            template: whether control tokens written in the text (``<|im_end|>``) are control tokens. For documents they
                are not: a document must not be able to end the user's turn.

        """
        if not text:
            return torch.empty(0, dtype=torch.int64)
        with self._tokenizer_lock:
            ids = self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=not template, verbose=False
            ).input_ids
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text before it; of a character made of several tokens the last one has it all."""
        texts: list[str] = []
        before: list[int] = []
        waiting: list[int] = []
        for token in token_ids:
            waiting.append(token)
            # After the token before it, because some tokenizers drop the space a text begins with.
            text = self.decode([*before, *waiting])[len(self.decode(before)) :]
            if text.endswith("\ufffd"):  # the first bytes of a character
                texts.append("")
            else:
                texts.append(text)
                before, waiting = waiting, []
        return texts

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text for chat ``messages``, ending where the model is to speak; the template applied once.

        Without a chat template (base models): the contents, one paragraph each.
        """
        turns = [dict(message) for message in messages]
        if self.system is not None and not any(turn["role"] == "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": self.system})
        if not self.has_template:
            return "\n\n".join(turn["content"] for turn in turns)
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # jinja2 raises its own classes, templates call raise_exception
            roles = ", ".join(turn["role"] for turn in turns)
            raise InvalidSetting(f"the model's chat template refuses messages of roles {roles}: {error}") from error

    def with_beginning(self, token_ids: Tensor, text: str) -> Tensor:
        """``token_ids`` after the tokenizer's beginning-of-text token, where it adds one and ``text`` has none yet."""
        with self._tokenizer_lock:
            added = self.tokenizer("a").input_ids
        bos = self.tokenizer.bos_token_id
        if bos is None or not added or added[0] != bos or text.startswith(self.tokenizer.bos_token):
            return token_ids
        return torch.cat([torch.tensor([bos], dtype=torch.int64), token_ids])

    def _header(self) -> tuple[str, Tensor]:
        """P: text and ids of what stands before the user's words, which every document is read after."""
        text, _, _ = self.render([{"role": "user", "content": _SENTINEL}]).partition(_SENTINEL)
        return text, self.with_beginning(self.encode(text), text)

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer: the generation config's list and the tokenizer's."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = set(listed if isinstance(listed, list) else [listed]) | {self.tokenizer.eos_token_id}
        return sorted(token for token in ids if token is not None)

    # --- identity ---

    def fingerprint(self) -> dict[str, str]:
        """What a stored state depends on, by name: a state is only good for a model with the same values."""
        config = {
            key: value
            for key, value in self.model.config.to_dict().items()
            if key not in ("transformers_version", "_name_or_path", "dtype", "use_cache", "_attn_implementation")
        }
        kept = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_act", "tie_word_embeddings")  # fmt: skip
        return {
            "architecture": _digest({key: config.get(key) for key in kept} | {"head_dim": self.head_dim}),
            "weights": self._weights_digest(),
            "rotary": _digest([config.get("rope_parameters"), self.inverse_frequencies.tolist()]),
            "tokenizer": _digest(self.tokenizer.get_vocab(), self.encode("Tokenisers differ: 1234 naïve  (x)").tolist()),
            "chat template": _digest(getattr(self.tokenizer, "chat_template", None)),
            "system text": _digest(self.system),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _weights_digest(self) -> str:
        """Of every parameter: name, shape, the integer sum of its bytes' words (any changed bit shows), 64 samples."""
        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.model.state_dict().items()):
            words = weight.detach().reshape(-1).view(torch.int32 if weight.element_size() == 4 else torch.int16)
            step = max(1, words.numel() // 64)
            line = [name, list(weight.shape), int(words.sum(dtype=torch.int64)), words[::step][:64].tolist()]
            digest.update(json.dumps(line).encode())
        return digest.hexdigest()


def _why_not(place: str | Path, local: bool, error: Exception) -> str:
    """One sentence on why nothing could be loaded."""
    if not Path(place).exists():
        if Path(place).is_absolute() or str(place).startswith((".", "~")):
            return "there is no such folder"
        if local:
            return f"there is no such folder, the model hub {hub.host()} cannot be reached, and no earlier download has it"
    return f"transformers says: {str(error).splitlines()[0].rstrip('.')}"


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel, with the reason, for what cannot be composed and pruned exactly."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in SUPPORTED:
        raise UnsupportedModel(f"model type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = sorted(layer_types - {"full_attention"})
    if other:
        raise UnsupportedModel(f"{kind} with layers of type {', '.join(other)}: only full attention can be pruned exactly")
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", True)
    if window is not None and uses_window and window < config.max_position_embeddings:
        raise UnsupportedModel(
            f"{kind} with a sliding window of {window} tokens: a window counts positions, a pruned cache has gaps in them"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROTARY:
        raise UnsupportedModel(
            f"{kind} with {rope_type!r} rotary scaling: its frequencies change with the prompt's length; "
            f"supported are {', '.join(ROTARY)}"
        )


def check_context(needed: int, limit: int, what: str, way_out: str) -> None:
    """Raises ContextOverflow, naming both lengths, when ``needed`` tokens do not fit the context of ``limit``."""
    if needed > limit:
        raise ContextOverflow(f"{what} needs {needed} tokens, the model's context holds {limit}; {way_out}")


def _dtype(dtype: str | torch.dtype, device: str) -> str | torch.dtype:
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise InvalidSetting(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got {dtype!r}")
    return chosen


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
