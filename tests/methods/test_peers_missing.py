"""Where the package kvpress is not installed, as in most places."""

from __future__ import annotations

import sys

import pytest

from kv_rag import methods
from kv_rag.errors import MissingExtra


def test_press_without_kvpress_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)  # as if it were not there, wherever the tests run
    with pytest.raises(MissingExtra, match=r"environment of its own and install 'kv_rag\[kvpress\]'"):
        methods.create("kvpress:KnormPress")
