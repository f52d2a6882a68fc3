"""The live report: its responses, its refusals, that it follows a run, and how it ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import write_run

from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_lab.report import command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [{"step": 0, "reward/mean": 0.25}])


@pytest.fixture
def server(run: Path) -> Iterator[command.LiveServer]:
    with command.LiveServer([run], port=0) as live:
        thread = threading.Thread(target=live.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield live
        live.shutdown()
        thread.join()


def ask(
    server: command.LiveServer,
    path: str = "/",
    *,
    method: str = "GET",
    host: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """(status, body, headers) of one request; the path is sent unchanged."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def rewards(page: bytes) -> list[float]:
    island = re.search(rb'id="data">(.*?)</script>', page, re.DOTALL)
    assert island is not None
    values: list[float] = json.loads(island[1])["runs"][0]["series"]["reward/mean"][1]
    return values


def test_the_page_is_given_to_this_machine(server: command.LiveServer) -> None:
    status, page, headers = ask(server)
    assert status == 200
    assert rewards(page) == [0.25]
    assert server.server_address[0] == "127.0.0.1"  # no other machine can reach it
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in headers
    # The page may send requests to its own server only.
    assert b"connect-src 'self'" in page
    assert b"default-src 'none'" in page


def test_head_has_the_headers_and_no_body(server: command.LiveServer) -> None:
    status, page, headers = ask(server, method="HEAD")
    assert (status, page) == (200, b"")
    assert headers["ETag"] == ask(server)[2]["ETag"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8321", "127.0.0.1", "localhost:1"])
def test_the_names_of_this_machine_are_known(server: command.LiveServer, host: str) -> None:
    """The port may differ, as behind a tunnel."""
    assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "", "localhost@evil"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    server: command.LiveServer, host: str
) -> None:
    status, body, _ = ask(server, host=host)
    assert (status, body) == (403, b"This server answers this machine alone.\n")


def test_two_hosts_and_no_host_are_refused(server: command.LiveServer) -> None:
    for lines in (b"Host: localhost\r\nHost: evil.example\r\n", b""):
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as s:
            s.sendall(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
            assert s.recv(100).split()[1] == b"403"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_requests_that_write_are_refused(server: command.LiveServer, method: str) -> None:
    status, body, headers = ask(server, method=method)
    assert (status, body) == (405, b"This server is read-only.\n")
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/../metrics.jsonl",
        "/config.json",
        "/?x",
        "/%2e%2e/",
        "/./",
        "http://127.0.0.1/",
        "/index.html",
        "*",
    ],
)
def test_there_is_no_path_but_one(server: command.LiveServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert (status, body) == (404, b"There is one page here, /.\n")


def test_the_page_follows_a_file_that_grows(
    server: command.LiveServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SHARE", 0)
    server._next = 0.0
    _, page, headers = ask(server)
    tag = {"If-None-Match": headers["ETag"]}
    assert ask(server, headers=tag)[:2] == (304, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')  # half a line
        file.flush()
        status, page, headers = ask(server, headers=tag)
        assert (status, rewards(page)) == (200, [0.25, 0.5])
        file.write('ard/mean": 0.75}\n')
    assert rewards(ask(server)[1]) == [0.25, 0.5, 0.75]
    assert ask(server, headers=tag)[0] == 200


def test_a_page_that_takes_long_is_not_made_for_every_question(
    server: command.LiveServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits four times as long as it took; until then the last page is given out."""
    moment = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: moment[0])
    made = []

    def slow(*args: object, **options: object) -> str:
        made.append(1)
        moment[0] += 3
        return f"page {len(made)}"

    monkeypatch.setattr(command, "render", slow)
    server._next = 0.0
    for later, number in ((0, 1), (5, 1), (11.9, 1), (12.1, 2)):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {9 + later}, "reward/mean": 0}}\n')
        moment[0] = (100 if number == 1 and later == 0 else 103) + later
        assert ask(server)[1] == f"page {number}".encode()


def test_a_vanished_run_is_named_and_may_come_back(
    server: command.LiveServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._next = 0.0
    elsewhere = run.with_name("elsewhere")
    run.rename(elsewhere)
    status, body, _ = ask(server)
    assert status == 503
    assert body.decode() == f"{run} does not exist; give the folder or the file of a run.\n"
    elsewhere.rename(run)
    assert rewards(ask(server)[1]) == [0.25]


def test_a_taken_port_is_named(server: command.LiveServer, run: Path) -> None:
    port = server.server_address[1]
    with pytest.raises(InputError, match=rf"port={port} cannot be used: .*0 takes any"):
        command.LiveServer([run], port)
    with pytest.raises(InputError, match="port=70000 cannot be used"):
        command.LiveServer([run], 70_000)


def test_the_command_names_contradicting_options(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--serve", "--out", "x.html"]) == 2
    assert "--serve writes no file" in capsys.readouterr().err
    assert main(["report", str(run), "--port", "1"]) == 2
    assert "--port 1 goes with --serve alone." in capsys.readouterr().err
    assert main(["report", str(run.parent / "nothing"), "--serve", "--port", "0"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a signal for one process")
def test_ctrl_c_closes_the_server_and_frees_its_port(run: Path) -> None:
    words = [sys.executable, "-m", "policyloss", "report", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The suite may run in the background of a shell, where a child ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.match(r"http://127\.0\.0\.1:(\d+)/ shows the report", line)
        assert address is not None, line
        port = int(address[1])
        # A client without a request does not keep the server from ending.
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            process.send_signal(signal.SIGINT)
            try:
                out, err = process.communicate(timeout=10)
            finally:
                process.kill()
        assert (process.returncode, out, err) == (0, "\nclosed\n", "")
    command.LiveServer([run], port).server_close()
