"""The launch files of examples/launch: their scripts run, with stand-ins for the commands that need
a cluster, and the arguments of torchrun and of the trainer are read by the real parsers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser
from walk import walked

from policyloss_train.arguments import named_options, read_arguments

FOLDER = Path(__file__).resolve().parents[2] / "examples/launch"
# Each stand-in writes its arguments to $CALLS/NAME.json. srun runs the rest of its command line;
# while somebody sleeps, the server starts and the run ends.
STAND_IN = f"""#!{sys.executable} -SE
import json, os, sys
name, words, calls = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ["CALLS"]
with open(os.path.join(calls, str(os.getpid())), "w") as file:
    json.dump(words, file)
os.rename(file.name, os.path.join(calls, name + ".json"))
if name == "sleep":
    while not os.path.exists(os.path.join(calls, "vllm.json")):
        pass
    open(os.path.join(os.environ["RUN"], "finished"), "w").close()
if name == "scontrol":
    print(*("n1", "n2", "n3", "n4"), sep="\\n")
if name == "srun":
    while words[0].startswith("--"):
        del words[0]
    os.execvp(words[0], words)
"""


def run_script(script: str, folder: Path, **variables: str) -> dict[str, list[str]]:
    """The arguments of every command that a script calls, by its name."""
    commands, calls = folder / "bin", folder / "calls"
    commands.mkdir(exist_ok=True)
    calls.mkdir(exist_ok=True)
    for name in ("scontrol", "srun", "torchrun", "vllm", "sleep"):
        (commands / name).write_text(STAND_IN)
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ceu", f"trap wait EXIT\n{script}"],
        env={**os.environ, "PATH": path, "CALLS": str(calls), **variables},
        check=True,
        timeout=60,
    )
    return {file.stem: json.loads(file.read_text()) for file in calls.glob("*.json")}


def slurm(folder: Path) -> dict[str, list[str]]:
    script = (FOLDER / "slurm.sbatch").read_text()
    job = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "7"}
    return run_script(script, folder, **job, RUN=f"{folder}/run", MODEL="org/m", TASK="t.jsonl")


def kubernetes(folder: Path) -> dict[str, list[str]]:
    kinds = {
        (x["kind"], x["metadata"]["name"]): x["spec"]
        for x in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    }
    job, servers = kinds["Job", "policyloss"], kinds["StatefulSet", "vllm"]
    assert ("Service", servers["serviceName"]) in kinds
    assert ("Service", job["template"]["spec"]["subdomain"]) in kinds
    assert job["completions"] == job["parallelism"] == 2
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-ceu"]
    (script,) = container["args"]
    calls = run_script(script, folder, RUN=f"{folder}/run")
    (server,) = servers["template"]["spec"]["containers"]
    calls["vllm"] = [*server["command"], *server["args"]][1:]
    return calls


def skypilot(folder: Path) -> dict[str, list[str]]:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    job = {**task["envs"], "RUN": f"{folder}/run", "SKYPILOT_NODE_IPS": "n1\nn2\nn3"}
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run/finished").unlink(missing_ok=True)
    calls = {}
    for rank in reversed(range(task["num_nodes"])):  # the last node serves
        job |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": "7"}
        calls |= run_script(task["run"], folder, **job)
    return calls


LAUNCHES = {"slurm.sbatch": slurm, "kubernetes.yaml": kubernetes, "skypilot.yaml": skypilot}
ROLLOUTS = {
    "slurm.sbatch": "http://n3:8000,http://n4:8000",
    "kubernetes.yaml": "http://vllm-0.vllm:8000,http://vllm-1.vllm:8000",
    "skypilot.yaml": "http://n3:8000",
}
RENDEZVOUS = {
    "slurm.sbatch": "n1:29500",
    "kubernetes.yaml": "policyloss-0.policyloss:29500",
    "skypilot.yaml": "n1:29500",
}


@walked("name", LAUNCHES)
def test_a_launch_file_starts_a_run_and_resumes_it(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("launch")
    calls = LAUNCHES[name](folder)
    launch: Any = get_args_parser().parse_args(calls["torchrun"])
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_backend) == ("2", "8", "c10d")
    assert launch.rdzv_endpoint == RENDEZVOUS[name]
    assert launch.rdzv_id != "none"
    assert (launch.module, launch.training_script) == (True, "policyloss")
    command, *words = launch.training_script_args
    assert command == "train"
    start = read_arguments(words)
    assert start.config.rollout == ROLLOUTS[name]
    assert start.config.parallel == "fsdp"
    assert start.config.out == folder / "run"
    assert not start.config.resume
    assert calls["vllm"][:2] == ["serve", start.config.model]

    (folder / "run/checkpoints/step_000010").mkdir(parents=True)
    again = get_args_parser().parse_args(LAUNCHES[name](folder)["torchrun"])
    named, _ = named_options(again.training_script_args[1:])
    assert named.pop("resume")
    assert named.keys() == start.named


def directives() -> dict[str, str]:
    """The options of sbatch: Slurm reads them up to the first command."""
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    named = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    return dict(line.partition("=")[::2] for line in named)


def test_the_directives_of_slurm_come_before_its_first_command() -> None:
    options = directives()
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        "4",
        "1",
        "8",
    )
    assert "requeue" in options
    assert options["signal"] == "B:USR1@600"


def test_sbatch_knows_the_directives() -> None:
    """Needs `pip install simple-slurm`, which lists the options of sbatch."""
    simple_slurm = pytest.importorskip("simple_slurm")
    listed = (Path(simple_slurm.__file__).parent / "arguments.txt").read_text().split()
    known = {names.split(",")[0].replace("_", "-") for names in listed}
    assert directives().keys() <= known


def test_kubernetes_accepts_the_file() -> None:
    """Needs `pip install kubernetes-validate`, which holds the schemas of Kubernetes."""
    validator = pytest.importorskip("kubernetes_validate")
    for resource in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()):
        validator.validate(resource, validator.latest_version(), strict=True)


def test_skypilot_accepts_the_file() -> None:
    """Needs `pip install skypilot`."""
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert task.num_nodes == 3


def test_vllm_takes_the_commands_of_the_servers(tmp_path: Path) -> None:
    """Needs vLLM (`make engines` builds an environment with it)."""
    arguments = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parsers = pytest.importorskip("vllm.utils.argparse_utils")
    for name, launch in LAUNCHES.items():
        folder = tmp_path / name
        folder.mkdir()
        parser = arguments.make_arg_parser(parsers.FlexibleArgumentParser())
        parsed = parser.parse_args(launch(folder)["vllm"][1:])
        assert parsed.enable_scale_out
        assert parsed.logprobs_mode == "processed_logprobs"
        assert parsed.weight_transfer_config.backend == "nccl"
