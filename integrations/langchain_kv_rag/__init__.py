"""kv_rag in LangChain: a chat model that answers from stored document states, and the mode as a retriever setting."""

from langchain_kv_rag.chat import ChatKVRag
from langchain_kv_rag.compressor import KVModeCompressor
from langchain_kv_rag.documents import strip_references
from langchain_kv_rag.retriever import KVRagRetriever

__all__ = ["ChatKVRag", "KVModeCompressor", "KVRagRetriever", "strip_references"]
