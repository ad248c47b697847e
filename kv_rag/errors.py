"""Every error this library raises, under one base.

Each class is also the built-in error a caller would expect (ValueError, KeyError or OSError), so that code which
knows nothing of kv_rag still catches it. A message names the value, the limit and the way out.
"""


class KVRagError(Exception):
    """Base of all errors raised by kv_rag."""

    def __str__(self) -> str:
        # KeyError prints repr(message); a sentence for people should not be quoted and escaped.
        return str(self.args[0]) if self.args else ""


class InvalidSetting(KVRagError, ValueError):
    """A setting is outside what it may be: keep, budget, mode, repair, retain, a generation setting."""


class UnknownMethod(KVRagError, ValueError):
    """No compression method of that name, or a method that may not compress (it needs to see a question)."""


class UnsupportedModel(KVRagError, ValueError):
    """The model has a part whose state cannot be composed or pruned exactly (sliding window, recurrence, ...)."""


class ModelNotFound(KVRagError, OSError):
    """The model cannot be loaded from where it was asked for."""


class MissingExtra(KVRagError, ImportError):
    """A part of kv_rag needs packages that an extra installs."""


class EmptyInput(KVRagError, ValueError):
    """A document or question without text."""


class ContextOverflow(KVRagError, ValueError):
    """More tokens than the model's context holds."""


class RepeatedDocument(KVRagError, ValueError):
    """The same document was given twice for one question."""


class UnknownDocument(KVRagError, KeyError):
    """No document of that id, name or text in the store."""


class AmbiguousDocument(KVRagError, KeyError):
    """An id prefix or a name that fits several documents."""


class StateMissing(KVRagError, KeyError):
    """The document is known, but the state that the mode needs was not retained."""


class StoreError(KVRagError, OSError):
    """The store's folder cannot be read or written."""


class StoreUnreachable(StoreError):
    """The store cannot be used now: a remote one does not answer, a folder may not be read or written, a disk is full.

    Attributes:
        logged: the store has warned of it already.

    """

    logged = False


class StoreMismatch(StoreError):
    """The store was written by another model, tokenizer, chat template, dtype or format version."""


class DamagedState(StoreError):
    """A state file does not hold what its header promises."""
