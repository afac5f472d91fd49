"""The environment and addresses of processes that train together."""

from __future__ import annotations

import socket


class Environment:
    """Stand for Lightning's: this process starts the others, or has been started."""

    def __init__(self, creates_processes_externally):
        self.creates_processes_externally = creates_processes_externally

    def validate_settings(self, num_devices, num_nodes):
        assert (num_devices, num_nodes) == (2, 1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
