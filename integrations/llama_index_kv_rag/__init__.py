"""kv_rag in LlamaIndex: an LLM that answers from stored document states, and the mode as a retriever setting."""

from kv_rag import strip_references
from llama_index_kv_rag.choice import KVQueryBundle, kv_mode
from llama_index_kv_rag.errors import AnswerFailed
from llama_index_kv_rag.ingestion import KVRagIngestion
from llama_index_kv_rag.llm import KVRagLLM
from llama_index_kv_rag.postprocessor import KVModePostprocessor
from llama_index_kv_rag.retriever import KVRagRetriever

__all__ = [
    "AnswerFailed",
    "KVModePostprocessor",
    "KVQueryBundle",
    "KVRagIngestion",
    "KVRagLLM",
    "KVRagRetriever",
    "kv_mode",
    "strip_references",
]
