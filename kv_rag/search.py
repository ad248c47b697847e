"""Which documents a question is about, by their words alone (BM25): no model, no index to keep."""

from __future__ import annotations

from collections.abc import Mapping

WORD = r"(?u)\b\w+\b"  # one digit or letter is a word too: "channel 6"


def rank(question: str, texts: Mapping[str, str]) -> list[str]:
    """Keys of ``texts`` that share a word with ``question``, best first; of equally good ones the earlier first.

    Common English words do not count. Empty when no text has a word of the question.

    Args:
        question: what is asked.
        texts: documents by id.

    """
    import bm25s

    words = _words(question)
    corpus = [_words(text) for text in texts.values()]
    if not words or not any(corpus):  # bm25s cannot index texts that have no word at all
        return []
    ranking = bm25s.BM25()
    ranking.index(corpus, show_progress=False)
    scores = dict(zip(texts, ranking.get_scores(words).tolist(), strict=True))
    return sorted((key for key in texts if scores[key] > 0), key=lambda key: -scores[key])  # sorted() keeps ties in order


def _words(text: str) -> list[str]:
    import bm25s

    tokens = bm25s.tokenize([text], token_pattern=WORD, stopwords="en", return_ids=False, show_progress=False)
    return [str(word) for word in tokens[0]]
