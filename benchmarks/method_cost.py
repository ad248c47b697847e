"""What a method costs at ingest, and what heads of different length cost when answering. All in one run, in turn.

    python benchmarks/method_cost.py --model bundled:smollm2-135m --tokens 3000

Ingest: seconds to read a document and score it, over the seconds of plain transformers to prefill the same tokens.
Answering: a question over the same number of pairs, the same in every head or shared by heads and layers: seconds to
the first token, milliseconds for each further one, and the bytes of the prompt's buffers. The least of all rounds
counts, since the machine may do other things too.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor
from ttft import QUESTION as ASKED
from ttft import long_text

from kv_rag import methods
from kv_rag.compose import Piece, compose
from kv_rag.document import Compression, DocumentCache
from kv_rag.engine import CHUNK, JOINT, QUESTION
from kv_rag.generation import decode_step
from kv_rag.ingest import gather, prefill, score, watcher_for
from kv_rag.model import LanguageModel
from kv_rag.selection import ALLOCATIONS, Budget, select
from kv_rag.state import PromptState

METHODS = ("keydiff", "knorm", "lagkv", "streaming", "keydiff_attention", "expected", "compactor", "h2o", "scissorhands",
           "tova", "kvzip", "blend")  # fmt: skip


def least(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fewest seconds of each action, all of them once in every round."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            seconds.setdefault(name, []).append(time.perf_counter() - started)
    return {name: min(measured) for name, measured in seconds.items()}


def plain_prefill(model: LanguageModel, ids: Tensor) -> None:
    implementation = model.model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.model.get_decoder()(torch.cat([model.header[1], ids])[None], use_cache=True)
    model.model.set_attn_implementation(implementation)


def read_and_score(model: LanguageModel, ids: Tensor, name: str) -> tuple[DocumentCache, list[Tensor]]:
    method = methods.create(name)
    watcher = watcher_for(model, "d", ids, method)
    full = prefill(model, "d", ids, CHUNK, observer=watcher)
    return full, score(model, full, method, CHUNK, watcher)


def ingest_costs(model: LanguageModel, ids: Tensor, names: Sequence[str], rounds: int) -> None:
    actions: dict[str, Callable[[], object]] = {"plain transformers": lambda: plain_prefill(model, ids)}
    for name in names:
        actions[name] = lambda name=name: read_and_score(model, ids, name)  # type: ignore[misc]
    seconds = least(actions, rounds)
    for name, measured in seconds.items():
        print(f"ingest {name:24}{measured:9.2f} s {measured / seconds['plain transformers']:8.2f} x a plain prefill")


def answering_costs(model: LanguageModel, ids: Tensor, name: str, keep: float, rounds: int, decode: int) -> None:
    full, scores = read_and_score(model, ids, name)
    question = model.encode(QUESTION.format(joint=JOINT, question=ASKED))
    caches = {}
    for allocation in ALLOCATIONS:
        kept = select(scores, Budget(keep, allocation=allocation))
        layers = tuple(gather(layer, full.tokens, heads) for layer, heads in zip(full.layers, kept, strict=True))
        caches[allocation] = DocumentCache("d", ids, layers, Compression.of(name, keep=keep))

    def first_token(cache: DocumentCache) -> PromptState:
        return compose(model, [Piece(ids, cache), Piece(question)], repair=0, reserve=decode, chunk=CHUNK).state

    def further_tokens(state: PromptState) -> None:
        lengths = [layer.length for layer in state.layers]
        for _ in range(decode):
            decode_step(model, 1, state)
        for layer, length in zip(state.layers, lengths, strict=True):
            layer.length = length

    states = {allocation: first_token(cache) for allocation, cache in caches.items()}
    first = least({name: lambda cache=cache: first_token(cache) for name, cache in caches.items()}, rounds)  # type: ignore[misc]
    steps = least({name: lambda state=state: further_tokens(state) for name, state in states.items()}, rounds)  # type: ignore[misc]
    for allocation, cache in caches.items():
        bytes_of = f"stored {cache.nbytes / 1e6:.2f} MB, prompt's buffers {states[allocation].nbytes / 1e6:.2f} MB"
        print(f"answer {name} keep {keep} {allocation:9}{cache.pairs} pairs, {bytes_of}")
        for what, seconds, count in (("first token", first, 1), ("each further", steps, decode)):
            ratio = seconds[allocation] / seconds["uniform"]
            print(f"    {what:14}{1e3 * seconds[allocation] / count:9.1f} ms {ratio:6.2f} x uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    model = LanguageModel.from_pretrained(arguments.model)
    ids = model.encode(long_text(model, arguments.tokens), template=False)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, Python "
          f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{arguments.model}, document of {ids.numel()} tokens")  # fmt: skip
    answering_costs(model, ids, "blend", arguments.keep, arguments.rounds, arguments.decode)
    ingest_costs(model, ids, arguments.methods, arguments.rounds)


if __name__ == "__main__":
    main()
