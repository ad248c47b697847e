"""Whether the model hub can be reached. Its own client tries for half a minute before it says no."""

from __future__ import annotations

import os
import socket
import urllib.request
from urllib.parse import urlsplit

SECONDS = 3.0  # for one connection; a hub that needs longer for that would take hours for weights


def host() -> str:
    """Host and, where it is not the usual one, port of the hub."""
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc


def reachable(seconds: float = SECONDS) -> bool:
    """Whether a connection to the hub can be opened. Behind a proxy that cannot be told, and the answer is yes."""
    if urllib.request.getproxies():
        return True
    address = urlsplit(f"//{host()}")
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=seconds):
            return True
    except OSError:
        return False
