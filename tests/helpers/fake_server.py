"""A server with the endpoints of vLLM that the trainer uses, a tiny model, and faults on request.

It has its own model, which it loads from the folders in requests, as vLLM does.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_vllm import WIRE, likeliest
from safetensors.torch import load_file

from policyloss_train.drawing import Rule
from policyloss_train.sampler import Completed, complete, uniforms


class FakeServer:
    """`with FakeServer(folder) as server: … server.address`.

    faults: what to do to the next calls of a path, one after the other: "500", "400", "time out",
    "half" (of an answer), "close" (the connection), "old weights", "abort". calls: the requested
    paths. most: the number of log-probabilities that it reports for a token. workers: the ranks
    that it adds to a transfer over NCCL; 0 if it was started without. joined: how it joined the
    transfer.
    """

    def __init__(self, folder: str, logprobs_mode: str = "processed_logprobs") -> None:
        self.folder, self.mode, self.most = folder, logprobs_mode, 20
        self.faults: dict[str, list[str]] = {}
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self.lock = threading.Lock()
        self.port = 0
        self.workers = 0
        self.joined: dict[str, Any] | None = None

    def start(self) -> FakeServer:
        """Serve, with the weights of the folder."""
        if not hasattr(self, "model"):
            from transformers import AutoModelForCausalLM

            self.model: Any = AutoModelForCausalLM.from_pretrained(self.folder)
        self.forget()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self, None)

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                outer.answer(self, json.loads(self.rfile.read(size)))

            def log_message(self, *words: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_port
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def forget(self) -> None:
        """Have the weights of the start again, as after a restart: never under their old name."""
        with self.lock:
            self.load(self.folder)
            self.version = "default"
            self.joined = None

    def stop(self) -> None:
        """From here on, connections to its port are refused."""
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def answer(self, handler: Any, body: Any) -> None:
        path = handler.path.partition("?")[0]
        self.before(path)
        with self.lock:
            self.calls.append(path)
            fault = self.faults.get(path, [])
            kind = fault.pop(0) if fault else ""
        if kind == "close":
            handler.close_connection = True
            handler.connection.close()
            return
        if kind == "time out":
            time.sleep(1.0)
        code = int(kind) if kind.isdecimal() else 200
        data = self.result(path, body) if code == 200 else {"error": f"told to fail: {kind}"}
        if kind == "old weights":
            data["choices"][0]["weight_versions"][0]["version"] = "default"
        if kind == "abort":
            data["choices"][0]["finish_reason"] = "abort"
        text = json.dumps(data).encode()
        try:
            handler.send_response(code)
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text[: len(text) // 2] if kind == "half" else text)
        except OSError:  # who asked has gone
            pass
        if kind == "half":
            handler.close_connection = True

    def result(self, path: str, body: Any) -> Any:
        with self.lock:
            if path == "/server_info":
                model = {"logprobs_mode": self.mode, "max_logprobs": self.most}
                transfer = {"backend": "nccl"} if self.workers else None
                return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer}}
            if path == "/get_world_size":
                return {"world_size": self.workers}
            if path == "/weight_info":
                return {"weight_version": self.version}
            if path == "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.load(body["kwargs"]["weights_path"])
            elif path == "/update_weight_version":
                self.version = body["new_version"]
            elif path == "/init_weight_transfer_engine":
                self.joined = body["init_info"]
            elif path == "/update_weights":
                assert self.joined
                tensors = {name: WIRE[name] for name in body["update_info"]["names"]}
                self.model.load_state_dict(tensors)
            elif path == "/finish_weight_update":
                self.version = body["weight_version"]
            elif path == "/inference/v1/generate":
                return {"choices": self.choices(body["token_ids"], body["sampling_params"])}
            else:
                assert path in ("/pause", "/resume", "/start_weight_update"), path
            return {}

    def load(self, folder: str) -> None:
        """Read weights. (Two threads must not make models by transformers at one time.)"""
        for file in Path(folder).glob("*.safetensors"):
            self.model.load_state_dict(load_file(file), strict=False)

    def choices(self, prompt: list[int], p: dict[str, Any]) -> list[dict[str, Any]]:
        rule = Rule(p["temperature"], p["top_p"], p["top_k"], processed=True)
        drawn = uniforms(p["seed"], 0, p["n"], p["max_tokens"])
        ends, count = p["stop_token_ids"], p["logprobs"]
        completed = complete(
            self.model, [prompt] * p["n"], drawn, ends, rule, batch_tokens=4096, supports=count > 0
        )
        return [
            {
                "token_ids": one.tokens,
                "logprobs": {"content": self.content(one, count)},
                "finish_reason": "stop" if one.tokens[-1] in ends else "length",
                "weight_versions": [{"version": self.version, "start": 0, "end": len(one.tokens)}],
            }
            for one in completed
        ]

    def content(self, one: Completed, count: int) -> list[dict[str, Any]]:
        """The log-probabilities of each token; JSON has no −inf, so vLLM writes −9999."""
        rows = likeliest(one, count, self.model.config.vocab_size)
        return [
            {
                "logprob": x,
                "top_logprobs": [{"token_id": v, "logprob": max(y, -9999.0)} for v, y in row],
            }
            for x, row in zip(one.logp.tolist(), rows, strict=True)
        ]


class RawServer:
    """`with RawServer() as server: server.pieces = […]`: answers every request with these bytes,
    whatever they are, and then closes the connection. sent: how many it could send. requests: the
    first line and the headers of each.
    """

    def __init__(self) -> None:
        self.pieces: Iterable[bytes] = ()
        self.sent = 0
        self.requests: list[str] = []

    def __enter__(self) -> RawServer:
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                head = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
                outer.requests.append(head)
                self.rfile.read(int(re.search(r"Content-Length: (\d+)|$", head)[1] or 0))
                try:
                    for piece in outer.pieces:
                        self.wfile.write(piece)
                        outer.sent += len(piece)
                except OSError:  # who asked has gone
                    pass

        self._tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._tcp.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._tcp.server_address[1]}"
        threading.Thread(target=self._tcp.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._tcp.shutdown()
        self._tcp.socket.close()
