"""Asking the hub's port instead of waiting for its client."""

from __future__ import annotations

import socket

import pytest

from kv_rag import hub


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)


def test_a_hub_that_listens_is_reachable_and_one_that_does_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.reachable(1.0)
    assert hub.host() == f"127.0.0.1:{port}"
    assert not hub.reachable(1.0)


def test_behind_a_proxy_the_hub_is_taken_to_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    assert hub.reachable(0.1)
