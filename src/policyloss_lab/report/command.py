"""`policyloss report RUN [RUN…]`: writes the page, or serves it while the runs train (--serve).

The server is read-only and answers only this machine. It returns one page, to a GET or HEAD of `/`
that names this machine as its host; requests with another site's host name are refused.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any

from policyloss.commands import read_options
from policyloss.errors import InputError, PolicyLossError, visible
from policyloss_lab import limits
from policyloss_lab.commands import Report
from policyloss_lab.report.data import collect
from policyloss_lab.report.page import render, write_report
from policyloss_lab.report.sections import shared_notes
from policyloss_lab.report.sources import split_run
from policyloss_lab.runs.lock import is_held


def report_command(arguments: Sequence[str]) -> int:
    """Write or serve a report; returns the exit code."""
    options = read_options("report", Report, arguments)
    if options.serve:
        if options.out != Report.out or options.json is not None:
            raise InputError("--serve writes no file; leave out --out and --json, or --serve.")
        serve(options.runs, options.port)
        return 0
    if options.port != Report.port:
        raise InputError(f"--port {options.port} goes with --serve alone.")
    data = write_report(options.runs, options.out, options.json)
    runs = f"{count} runs" if (count := len(data["runs"])) > 1 else "1 run"
    print(f"{options.out}: {runs}; open it in a browser.", flush=True)
    notes = [f"{names}: {note}" for note, (names, _) in shared_notes(data["runs"]).items()]
    for note in notes[: limits.PRINTED_NOTES]:
        print(visible(note), file=sys.stderr)
    if len(notes) > limits.PRINTED_NOTES:
        print(f"{len(notes) - limits.PRINTED_NOTES} more notes are on the page.", file=sys.stderr)
    return 0


ADDRESS = "127.0.0.1"
PORT = Report.port
EVERY = 2000  # milliseconds between two requests of a page
_HOSTS = {"127.0.0.1", "localhost"}
_PATIENCE = 10  # seconds for a client to send a request and to receive the answer
_SHARE = 4  # a page is rendered again after this many times its rendering time, at the earliest


def _state_of(paths: Sequence[Path]) -> object:
    """The size and time of every file of the runs, and whether a process holds their locks."""
    files = chain.from_iterable(map(_files, paths))
    return [is_held(path) for path in paths], list(islice(files, limits.WATCHED))


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for name in inside if path.is_dir() else (str(path),):
        try:
            entry = os.lstat(name)
        except OSError:  # the file was renamed or removed meanwhile
            continue
        yield name, entry.st_size, entry.st_mtime_ns


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _PATIENCE
    server_version, sys_version = "policyloss", ""

    def parse_request(self) -> bool:
        """Whether the request is valid. Other methods, hosts and paths are refused first."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "This server is read-only.")
        elif not self._is_for_here():
            self._refuse(HTTPStatus.FORBIDDEN, "This server answers this machine alone.")
        elif self.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "There is one page here, /.")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Send the page, or 304 if the client has it."""
        try:
            page, tag = self.server.refresh()
        except PolicyLossError as error:
            return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
        kind = {"Content-Type": "text/html; charset=utf-8"}
        return self._answer(HTTPStatus.OK, page, {**kind, "ETag": tag})

    do_HEAD = do_GET  # noqa: N815  # `_answer` leaves out the body

    def _is_for_here(self) -> bool:
        """Whether the request names this machine; a tunnel may change the port."""
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and hosts[0].strip().lower().rsplit(":", 1)[0] in _HOSTS

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a request every two seconds would fill the terminal."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page of the runs in `paths` on this machine. port: 0 takes any free port."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere, two servers could share a port

    def __init__(self, paths: Sequence[str | Path], port: int = PORT) -> None:
        self._paths, self._lock = [Path(path) for path in paths], Lock()
        self._state: object = None
        self._next, self._page, self._tag = 0.0, b"", ""
        self.refresh()  # wrong paths raise an error before the first request
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = str(error).rstrip(".")
            raise InputError(f"port={port} cannot be used: {reason}; 0 takes any.") from error

    def refresh(self) -> tuple[bytes, str]:
        """(the page, its tag); rendered again if a file of a run has changed."""
        with self._lock:
            began = time.monotonic()
            state = _state_of([split_run(path)[0] for path in self._paths])
            if state != self._state and began >= self._next:
                self._page = render(collect(self._paths), live=EVERY).encode()
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()}"'
                self._state = state
                now = time.monotonic()
                self._next = now + _SHARE * (now - began)
            return self._page, self._tag

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closed the connection early."""


def serve(paths: Sequence[str | Path], port: int = PORT) -> None:
    """Serve the page until Ctrl-C."""
    with LiveServer(paths, port) as server:
        try:
            print(f"{server.url} shows the report, and follows the runs. Stop: Ctrl-C", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nclosed", flush=True)
