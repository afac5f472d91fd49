"""A server of a run's page on the loopback, which reads the run's files and changes none."""

from __future__ import annotations

import errno
import hashlib
import json
import mimetypes
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.metrics_file import METRICS
from mtrl_lightning.reports.record import read_run
from mtrl_lightning.reports.run_report import Status, run_page
from mtrl_lightning.runs import is_in_training

HOST = "127.0.0.1"
NAMES_OF_HOST = (HOST, "localhost")
SERVED_SUFFIXES = (".mp4", ".png")
"""Files of a run that its page shows."""
BLOCK = 1 << 20
"""Bytes of a file that are sent at once."""


class ReportServer(ThreadingHTTPServer):
    """Serve the page of one run at ``/``, and its videos.

    Args:
        folder: of the run.
        port: to listen at; 0 for a free one.
        seconds: between two questions of the page whether there is something new.

    Raises:
        ConfigurationError: if the port is taken or not permitted.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int, seconds: float) -> None:
        self.folder = folder.resolve()
        self.seconds = seconds
        self._lock = threading.Lock()
        self._made = ("", b"")
        """The last page, and the state of the files that it was made from."""
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)
            reason = "is taken by another program" if number == errno.EADDRINUSE else str(error)
            raise ConfigurationError(
                f"port {port} cannot be used ({reason}): give another --port, or --port 0 for a"
                " free one"
            ) from error

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def state(self) -> str:
        """Return a text that changes whenever the page would."""
        files = [self.folder / METRICS, *sorted(self.folder.glob("videos/**/*.mp4"))]
        known = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
        return hashlib.sha256(repr((known, self.is_running())).encode()).hexdigest()[:16]

    def is_running(self) -> bool:
        """Return whether a process trains in the folder."""
        return is_in_training(self.folder)

    def page(self) -> bytes:
        """Return the page as the files are now; it is made once for each state of them."""
        with self._lock:
            state = self.state()
            if state != self._made[0]:
                status = Status(state, self.seconds, self.is_running())
                self._made = (state, run_page(read_run(self.folder), status).encode())
            return self._made[1]


class _Handler(BaseHTTPRequestHandler):
    """Answer a browser on this machine."""

    server: ReportServer
    server_version = "mtrl-lightning"
    sys_version = ""

    def do_GET(self) -> None:  # the name that the standard library calls
        """Answer with the page, its state, or a file that it shows."""
        if not self._is_local():
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = unquote(urlsplit(self.path).path)
        try:
            if path == "/":
                self._send(self.server.page(), "text/html; charset=utf-8")
            elif path == "/state":
                answer = json.dumps({"state": self.server.state()})
                self._send(answer.encode(), "application/json")
            else:
                self._send_file(path)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the browser has closed the page
        except (ConfigurationError, OSError) as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))

    def _is_local(self) -> bool:
        """Return whether the page was asked for by an address of this machine.

        A page of another site cannot read the run by giving its own name this machine's address.
        """
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        return host in NAMES_OF_HOST

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def _send_file(self, path: str) -> None:
        file = (self.server.folder / path.lstrip("/")).resolve()
        is_inside = file.is_relative_to(self.server.folder)
        if not is_inside or file.suffix not in SERVED_SUFFIXES or not file.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        with file.open("rb") as content:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(file.stat().st_size))
            self.end_headers()
            while block := content.read(BLOCK):
                self.wfile.write(block)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each question of the browser."""
