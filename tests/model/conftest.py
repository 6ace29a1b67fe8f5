"""What all tests of loading share."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a test that reaches for the network, at once and through every `except Exception`."""

    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail(f"the network was asked: {arguments[0]}")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
