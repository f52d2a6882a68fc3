"""The page of the engines: their plug points and adapters, and the recorded comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.conformance_page import CALLED
from docs.markdown import GENERATED, join, table

# Of each engine: its page, its plug point, the adapter, and where its denominators come from.
PLUGS: dict[str, tuple[str, str, str, str]] = {
    "skyrl": (
        "engines/skyrl.md",
        "registry of policy losses",
        "`compat.skyrl.register()`",
        "in the advantages",
    ),
    "nemo_rl": (
        "engines/nemo_rl.md",
        "`grpo_train(…, loss_fn=…)`",
        "`compat.nemo_rl.NemoLoss(spec)`",
        "`global_valid_toks`, `global_valid_seqs`",
    ),
    "prime_rl": (
        "engines/prime_rl.md",
        "`[trainer.loss] import_path`",
        "`compat.prime_rl.loss`",
        "the trained tokens of the step",
    ),
    "slime": (
        "engines/slime.md",
        "`--custom-loss-function-path`",
        "`compat.slime.loss_of(spec)`",
        "the weights of `sum_of_sample_mean`",
    ),
    "miles": (
        "engines/miles.md",
        "`--custom-loss-function-path`",
        "`compat.miles.loss_of(spec)`",
        "the weights of `sum_of_sample_mean`",
    ),
    "torchtitan": (
        "engines/torchtitan.md",
        "`PolicyTrainer.Config(loss=…)`",
        "`compat.torchtitan.PolicyLoss`",
        "`global_valid_tokens`",
    ),
    "areal": (
        "engines/areal.md",
        "`train_batch(input_, loss_fn, loss_weight_fn)`",
        "`compat.areal.WithOurLoss`",
        "the weights of micro-batches",
    ),
    "trl_async": (
        "frameworks.md#trl",
        "`AsyncGRPOTrainer.compute_loss`",
        "`compat.trl.AsyncGRPOTrainer`",
        "`global_n_tokens`",
    ),
    "swift": (
        "engines/swift.md",
        "`TrainerFactory.TRAINER_MAPPING`",
        "`compat.engines.swift_trainer(spec)`",
        "`num_items_in_batch`",
    ),
    "xtuner": (
        "engines/xtuner.md",
        '`policy_loss_cfg["loss_type"]`',
        "`compat.engines.xtuner_loss(spec)`",
        "in `loss_weights`",
    ),
    "rlinf": (
        "engines/rlinf.md",
        "`register_policy_loss(name)`",
        "`compat.engines.rlinf_loss(spec)`",
        "each micro-batch alone",
    ),
    "trinity": (
        "engines/trinity.md",
        "`algorithm.policy_loss_fn`",
        "`compat.engines.trinity_loss(spec)`",
        "each micro-batch alone",
    ),
    "twinkle": (
        "engines/twinkle.md",
        "`model.set_loss(…)`",
        "`compat.engines.twinkle_loss(spec)`",
        "`num_tokens` of all ranks",
    ),
    "axolotl": (
        "engines/axolotl.md",
        "`trainer_cls`",
        "`compat.trl.GRPOTrainer`",
        "those of TRL",
    ),
    "rllm": (
        "engines/rllm.md",
        "`rllm.algorithm.loss_fn`",
        "`compat.verl.hook`",
        "those of verl",
    ),
}
# Engines that another adapter serves: the version, and how far the hook was tried.
SERVED = {
    "axolotl": (
        "0.21.0",
        "tried for real: training of its trainer without its mixins, on TRL 1.16.0 "
        "(`conformance.axolotl_run`)",
    ),
    "rllm": ("9beb6e0f (2026-08-15)", "read, not run: `rllm.algorithm.loss_fn`"),
}
# The frameworks with drop-ins, and how far they were run with them.
RUN = {
    "verl": "called as the engine calls it: `ppo_loss` of its workers",
    "trl": "tried for real: training runs",
    "openrlhf": "called as the engine calls it: its `PolicyLoss`",
    "tinker": "tried for real: SkyRL's server",
}


def engines_page(engines: Path, steps: Path, frameworks: Path) -> str:
    """The page, from the results of `conformance.engines`, of the real steps, and of the
    frameworks.
    """
    names = CALLED | {"axolotl": "axolotl", "rllm": "rllm"}
    plugs = [[f"[{names[name]}]({page})", *rest] for name, (page, *rest) in PLUGS.items()]
    return join(
        "# In other engines",
        GENERATED,
        "An *adapter* runs a loss of this library in an engine that lets you name a loss: the "
        "engine keeps its data, its parallelism and its counts, and the spec decides the loss. No "
        "engine is patched.",
        table(["engine", "plug point", "adapter", "denominators"], plugs),
        "A loss that an engine cannot run raises an error when it is built: it reads a tensor that "
        "the engine does not pass, divides by a number that the engine does not count, or needs "
        "numbers of the whole step. A setting that contradicts the spec raises one at the first "
        "call. Of the metrics, means are reported as `policyloss/…`; counts and extremes are not, "
        "because engines average or add all numbers.",
        "## How far each was tried",
        "*worst difference*: of a value or a gradient from the engine's own function, over random "
        "ragged batches in float64, or in float32 where the engine computes in float32 alone. "
        "*two ranks*: "
        "of a gradient from that of the whole batch, over presets that ran in two processes with "
        "two micro-batches each, divided by the engine's own denominators.",
        _results(engines, steps, frameworks, names),
        "The last rows are the frameworks with [drop-ins](frameworks.md). [Conformance]"
        "(conformance.md#engines) shows every function, and decisions [56]"
        "(decisions/0056-adapters-for-engines.md) and [59](decisions/0059-thin-adapters.md) the "
        "reasons for this design.",
    )


def _results(engines: Path, steps: Path, frameworks: Path, names: dict[str, str]) -> str:
    if not all(path.is_file() for path in (engines, steps, frameworks)):
        return "No run has been recorded yet."
    real = json.loads(steps.read_text())
    rows = []
    for result in json.loads(engines.read_text())["results"]:
        two = result["partition"]
        ranks = f"{two['worst']:.1e}" if two["presets"] else "–"
        tried = f"{result['tried']}: {result['hook']}" + _weights(real, result["peer"])
        rows.append([names[result["peer"]], result["release"], *_numbers(result), ranks, tried])
    for name, (release, tried) in SERVED.items():
        rows.append([names[name], release, "–", "–", "–", tried + _weights(real, name)])
    for result in json.loads(frameworks.read_text())["results"]:
        if result["pinned"] and result["peer"] in RUN:
            tried = RUN[result["peer"]]
            start = [names[result["peer"]], result["release"]]
            rows.append([*start, *_numbers(result), "–", tried])
    return table(["engine", "version", "cases", "worst difference", "two ranks", "hook"], rows)


def _weights(real: dict[str, Any], name: str) -> str:
    """The difference of the weights after real steps, if there were any."""
    return f", weights within {real[name]['worst']:.1e}" if name in real else ""


def _numbers(result: dict[str, Any]) -> list[str]:
    """The number of cases, and the worst difference; in float32 if no case is in float64."""
    worst = {
        dtype: [x for f in result["functions"] for x in f["worst"][dtype].values()]
        for dtype in ("float64", "float32")
    }
    dtype = "float64" if worst["float64"] else "float32"
    cases = sum(f["cases"] for f in result["functions"])
    note = "" if dtype == "float64" else " (float32)"
    return [str(cases), f"{max(worst[dtype]):.1e}{note}"]
