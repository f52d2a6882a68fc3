"""Broken or hostile servers: every answer is used correctly, or refused in time, in bounded memory,
and with a message that cannot move the cursor of a terminal.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import RawServer
from json_places import assert_all_handled, changed, leaves

from policyloss.errors import PolicyLossError
from policyloss_train.rollout import servers as server_module
from policyloss_train.rollout.protocol import Prompt, Sampling
from policyloss_train.rollout.servers import Server
from policyloss_train.rollout.vllm_engine import TopLogprobs

PROMPT = Prompt([20, 30], number=2, place=0)
SAMPLING = Sampling(2, 1.0, 1.0, 2, (1,), seed=3, draw=5, support=True)
NAME, VERSION = "run-4", 4
LOGP = {20: -0.5, 1: -0.25}


def content(token: int) -> dict[str, Any]:
    """The log-probabilities of a token: its own, and three others of which two were left out."""
    top = {token: LOGP[token], 9: -9999.0, 8: -9999.0}
    likeliest = [{"token_id": key, "logprob": logp} for key, logp in top.items()]
    return {"logprob": LOGP[token], "top_logprobs": likeliest}


def choice(*ids: int) -> dict[str, Any]:
    return {
        "token_ids": list(ids),
        "logprobs": {"content": [content(token) for token in ids]},
        "finish_reason": "stop" if ids[-1] == 1 else "length",
        "weight_versions": [{"version": NAME}],
    }


GOOD = {"choices": [choice(20, 1), choice(20, 20)]}
INFO = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e"


def http(data: Any, status: str = "200 OK", headers: str = "") -> list[bytes]:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return [f"HTTP/1.1 {status}\r\n{headers}\r\n".encode(), body]


def generate(server: Server) -> Any:
    return server.generate(PROMPT, SAMPLING, NAME, VERSION)


def called(address: str, call: Callable[[Server], Any], seconds: float = 30.0) -> Any:
    return call(Server(address, seconds, TopLogprobs(3, 99)))


def fault(address: str, call: Callable[[Server], Any], seconds: float = 30.0) -> str:
    """ "" if a call is refused in time and in words; else how it ended."""
    began = time.monotonic()
    try:
        return f"accepted: {called(address, call, seconds)!r:.300}"
    except PolicyLossError as error:
        took, text = time.monotonic() - began, str(error)
    except BaseException:
        return traceback.format_exc()
    if took > seconds + 3:
        return f"took {took:.1f} s"
    if len(text) > 1500 or not text.isprintable():
        return f"an error of {len(text)} characters: {text!r:.300}"
    return "" if address in text else f"does not name the server: {text!r:.300}"


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "20", "-0.5", ESCAPE, "y" * 5000, [], [[]], {}, [None], {"a": 1}),
    *(1.5, -1, 5.0, 2**31, 2**63, 10**400, -(10**400), 1e308, -1e30),
    *(float("nan"), float("inf"), float("-inf"), "missing"),
)
# Of a token that was left out, these change nothing that is used.
HARMLESS = (-1, 2**31, 2**63, -1e30, float("-inf"))


def test_completions_of_another_form_are_refused(server: RawServer) -> None:
    """Every value at every place of an answer."""
    server.pieces = http(GOOD)
    first, second = called(server.address, generate)
    assert (first.ids, list(first.logp), first.finished) == ([20, 1], [-0.5, -0.25], True)
    assert (second.ids, second.version) == ([20, 20], VERSION)
    noise = changed(GOOD, ("choices", 0, "logprobs", "content", 0, "logprob"), 1e-6)
    server.pieces = http(noise)
    assert called(server.address, generate)[0].logp[0] == 1e-6
    results = {}
    places = [("choices",), *leaves(GOOD["choices"][0], ("choices", 0))]
    for place in places:
        for value in VALUES:
            left_out = "top_logprobs" in place[:-1] and place[6] > 0
            if (left_out and value in HARMLESS) or (place[-1] == "logprob" and value == -1):
                continue
            server.pieces = http(changed(GOOD, place, value))
            name = f"{'/'.join(map(str, place))} = {str(value)[:20]!r}"
            results[name] = fault(server.address, generate)
    more = {
        "too many": [choice(20, 1)] * 3,
        "too few": [choice(20, 1)],
        "too long": [choice(20, 1), choice(20, 20, 1)],
        "another end": [choice(20, 1), {**choice(20, 20), "finish_reason": "stop"}],
        "two versions": [choice(20, 1), {**choice(20), "weight_versions": [{"version": NAME}] * 2}],
    }
    for name, choices in more.items():
        server.pieces = http({"choices": choices})
        results[name] = fault(server.address, generate)
    assert_all_handled(results, least=800)


def drip(text: bytes) -> Iterator[bytes]:
    """A byte at a time, for four seconds."""
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for i in range(len(text)):
            yield text[i : i + 1]
            time.sleep(0.05)


def after(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def flood(text: bytes = b"[" * 65536) -> Iterator[bytes]:
    """256 MiB, which is far more than any answer here may have."""
    return (text for _ in range((256 << 20) // len(text)))


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DEEP = b"[" * 100_000 + b"]" * 100_000
STREAMS: dict[str, Callable[[], Iterable[bytes]]] = {
    "nothing": list,
    "silence": lambda: drip(b""),
    "a dripping status": lambda: drip(OK),
    "dripping headers": lambda: after(OK, drip(b"a: b\r\n")),
    "a dripping body": lambda: after(OK + b"\r\n", drip(b" ")),
    "a dripping body of known length": lambda: after(
        OK + b"Content-Length: 9999\r\n\r\n", drip(b" ")
    ),
    "dripping chunks": lambda: after(CHUNKED, drip(b"1\r\n \r\n")),
    "a dripping error": lambda: after(b"HTTP/1.1 500 no\r\n\r\n", drip(b"x")),
    "dripping 100": lambda: drip(b"HTTP/1.1 100 go on\r\n\r\n"),
    "a flood": lambda: after(OK + b"\r\n", flood()),
    "a flood of known length": lambda: after(OK + b"Content-Length: 999999999999\r\n\r\n", flood()),
    "a flood in chunks": lambda: after(CHUNKED, flood(b"10000\r\n" + b" " * 65536 + b"\r\n")),
    "a flood in one chunk": lambda: after(CHUNKED + b"ffffffffff\r\n", flood()),
    "a flood of headers": lambda: after(OK, flood(b"a: b\r\n" * 9999)),
    "a flood of 100": lambda: flood(b"HTTP/1.1 100 go on\r\n\r\n" * 3000),
    "a flood as an error": lambda: after(b"HTTP/1.1 500 no\r\n\r\n", flood()),
    "a flood in the first line": lambda: flood(b"x" * 65536),
    "no HTTP": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n", ESCAPE.encode()],
    "another protocol": lambda: [b"HTTP/9.9 200 OK\r\n\r\n{}"],
    "a status that is no number": lambda: [b"HTTP/1.1 \x1b[2J OK\r\n\r\n{}"],
    "half": lambda: [OK + b"Content-Length: 99\r\n\r\n", b'{"choices": ['],
    "no chunk": lambda: [CHUNKED, b"zz\r\n"],
    "a negative chunk": lambda: [CHUNKED, b"-5\r\nxxxxx"],
    "deep": lambda: http(DEEP),
    "deep choices": lambda: http(b'{"choices": ' + DEEP + b"}"),
    "a long number": lambda: http(b"1" * 5000),
    "bytes": lambda: http(bytes(range(256))),
    "null": lambda: http(None),
    "empty": lambda: http(b""),
    "a text": lambda: http(ESCAPE),
    "HTML": lambda: http(b"<html>" + ESCAPE.encode()),
    **{
        f"{status} with escapes": lambda status=status: http(ESCAPE.encode(), f"{status} {ESCAPE}")
        for status in (204, 400, 401, 404, 429, 500, 503)
    },
}


def test_streams_that_never_end_and_answers_that_are_no_json(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, seconds and depth are bounded, for every call."""
    monkeypatch.setattr(server_module, "LOOK_S", 0.3)
    calls: dict[str, Callable[[Server], Any]] = {"generate": generate, "check": Server.check}
    results = {}
    for name, pieces in STREAMS.items():
        for kind, call in calls.items():
            if kind != "generate" and "drip" in name:
                continue  # the reader is the same, and each takes 0.3 s
            server.pieces, server.sent = pieces(), 0
            result = fault(server.address, call, seconds=0.3)
            if server.sent > 64 << 20:
                result = f"{server.sent:,} bytes were read"
            results[f"{name}, {kind}"] = result
    assert_all_handled(results, least=65)


def test_a_redirection_is_not_followed(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would carry the key to a host that the user did not name."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with RawServer() as other:
        other.pieces = http(INFO)
        results = {}
        for status in (301, 302, 303, 307, 308):
            target = f"Location: {other.address}/server_info\r\n"
            server.pieces = http(b"", f"{status} elsewhere", target)
            results[f"{status}"] = fault(server.address, Server.check)
        assert other.requests == []
    assert_all_handled(results, least=5)


def test_words_of_a_server_are_shown_by_number(server: RawServer) -> None:
    model = ("vllm_config", "model_config")
    results = {}
    for value in (ESCAPE, "y" * 5000, [ESCAPE], {ESCAPE: 1}, 10**400, None):
        server.pieces = http(changed(INFO, (*model, "logprobs_mode"), value))
        results[f"mode {value!r:.20}"] = fault(server.address, Server.check)
    assert_all_handled(results, least=6)


def test_weights_that_never_arrive_are_refused(server: RawServer, tmp_path: Path) -> None:
    """A server that confirms every call, and continues with other weights."""

    def load(to: Server) -> None:
        to.load(tmp_path, NAME)

    results = {}
    for version in ("default", "run-3", "run-44", None, 4, [NAME], ESCAPE, "y" * 5000):
        server.pieces = http({**INFO, "weight_version": version})
        results[f"{version!r:.20}"] = fault(server.address, load)
    assert_all_handled(results, least=8)
    server.pieces = http({"weight_version": NAME})
    called(server.address, load)
