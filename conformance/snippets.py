"""Tests the code on the pages: each fenced block marked for a framework runs in a fresh process of
that framework's environment.

A block is marked by a second word behind its language: "```python trl" is run, "```sh verl" has its
settings checked. Names that a block uses and does not define (`model`, `dataset`, …) are made here.
Blocks without a mark need no framework; the tests run those. The options that docs/names.md
ascribes to a framework are checked along with them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
import tempfile
import types
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from conformance import standins
from conformance.environments import PEERS, ROOT, Peer, child_environment, ensure, interpreter
from conformance.options import COMPARED

PAGES = ("README.md", "docs/*.md", "docs/upstream/*.md")
_FENCE = re.compile(
    r"^```(?P<language>python|sh) (?P<peer>\S+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


class Snippet(NamedTuple):
    """A marked block: its place ("README.md:120"), its framework,
    its language ("options": the table) and its text.
    """

    where: str
    peer: str
    language: str
    code: str


class Result(NamedTuple):
    """The result of a snippet: its place, and the end of its output if it failed."""

    where: str
    error: str | None


def snippets(root: Path = ROOT) -> list[Snippet]:
    """Every marked block of the pages."""
    found = []
    for page in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            where = f"{page.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
            if match["peer"] not in PEERS:
                raise ValueError(
                    f"{where}: a block for {match['peer']!r}; there are {', '.join(PEERS)}."
                )
            found.append(Snippet(where, match["peer"], match["language"], match["code"]))
    return found


def run_snippets(peer: Peer) -> list[Result]:
    """Run every snippet of a framework, each in a process of its own."""
    ensure(peer)
    found = [one for one in snippets() if one.peer == peer.name]
    if peer.name in COMPARED:
        found.append(Snippet("docs/names.md, options", peer.name, "options", ""))
    return [run(one, peer) for one in found]


def run(snippet: Snippet, peer: Peer) -> Result:
    """Run one snippet."""
    with tempfile.TemporaryDirectory() as scratch:
        child = subprocess.run(
            [str(interpreter(peer)), "-m", "conformance.snippets", "--run", json.dumps(snippet)],
            cwd=scratch,
            env=child_environment(None),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    return Result(
        snippet.where, None if child.returncode == 0 else (child.stdout + child.stderr)[-3000:]
    )


def execute(snippet: Snippet) -> None:
    """In the framework's process: define the names that the block needs, then run it."""
    standins.install(snippet.peer, PEERS[snippet.peer].release)
    if snippet.language == "options":
        wrong = import_module("conformance.options").wrong_options(snippet.peer)
        if wrong:
            sys.exit("\n".join(wrong))
        return
    if snippet.language == "sh":
        _CHECKS[snippet.peer](snippet.code)
        return
    names = _NAMES.get(snippet.peer, dict)()
    exec(compile(snippet.code, snippet.where, "exec"), names)


def _names_for_trl() -> dict[str, Any]:
    """A model, its tokenizer, reward and data, small enough for a CPU,
    and a config that trains it.
    """
    run = import_module("conformance.trl_run")
    path = Path("tiny").resolve()
    with run.tiny_model() as model:
        model.rename(path)
    prompts = import_module("datasets").Dataset.from_dict(
        {"prompt": [f"w{i} w{i + 1}" for i in range(8)]}
    )
    sizes = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
    }
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    args = import_module("trl").GRPOConfig(output_dir="out", **sizes, **quiet)
    tokenizer = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(path)
    return {
        "model": str(path),
        "tokenizer": tokenizer,
        "reward": run.reward,
        "dataset": prompts,
        "args": args,
    }


def _names_for_colossalai() -> dict[str, Any]:
    """A `coati` to install into: its package is on no index,
    so one with the two classes' arguments stands in.
    """
    ours = import_module("policyloss.compat.colossalai")
    for name, classes in (
        ("distributed", [ours.PolicyLoss]),
        ("models", [ours.models.PolicyLoss, ours.models.ValueLoss]),
    ):
        module = types.ModuleType(f"coati.{name}.loss")
        for one in classes:
            setattr(module, one.__name__, _like(one, module.__name__))
        for parent in ("coati", f"coati.{name}"):
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[module.__name__] = module
    return {}


def _like(cls: Any, module: str) -> Any:
    """A class with the same name and arguments, less those that only ours has."""
    methods: dict[str, Any] = {}
    for name in ("__init__", "forward"):
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        methods[name] = method = types.FunctionType(compile("None", module, "eval"), {})
        kept = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        method.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return type(cls.__name__, (), {**methods, "__module__": module})


def _check_verl_command(command: str) -> None:
    """The settings exist in verl's configuration, and importing the module they name registers the
    loss mode they name.
    """
    config = import_module("omegaconf").OmegaConf
    folder = Path(import_module("verl").__file__ or "").parent / "trainer" / "config"
    settings = config.load(folder / "_generated_ppo_trainer.yaml")
    config.set_struct(settings, True)
    settings.merge_with_dotlist([word for word in shlex.split(command) if "=" in word])
    import_module("verl.utils.import_utils").import_external_libs(
        settings.actor_rollout_ref.model.external_lib
    )
    mode = settings.actor_rollout_ref.actor.policy_loss.loss_mode
    import_module("verl.trainer.ppo.core_algos").get_policy_loss_fn(mode)


def _check_openrlhf_command(command: str) -> None:
    """The runtime environment is JSON, and the function it names runs."""
    words = shlex.split(command)
    environment = json.loads(
        next(word for word in words if word.startswith("--runtime-env-json=")).partition("=")[2]
    )
    module, _, function = environment["worker_process_setup_hook"].rpartition(".")
    getattr(import_module(module), function)()


def _names_for_tinker() -> dict[str, Any]:
    """A client without a server, and data."""
    names: dict[str, Any] = import_module("conformance.peers.tinker").names_on_the_page()
    return names


_NAMES = {
    "trl": _names_for_trl,
    "colossalai": _names_for_colossalai,
    "tinker": _names_for_tinker,
}
_CHECKS = {"verl": _check_verl_command, "openrlhf": _check_openrlhf_command}


def main(words: list[str] | None = None) -> int:
    """Run the snippets of every framework, or of those given; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m conformance.snippets", description=__doc__)
    parser.add_argument(
        "--peer", action="append", choices=PEERS, help="only this framework (may be repeated)"
    )
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.run:
        execute(Snippet(*arguments.run))
        return 0
    results = [result for name in arguments.peer or PEERS for result in run_snippets(PEERS[name])]
    for result in results:
        print(f"{result.where}: {'ok' if result.error is None else 'FAILED'}")
        print(result.error or "", end="")
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
