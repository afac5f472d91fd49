"""Addresses for processes that train together."""

from __future__ import annotations

import socket


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
