"""Writes docs/what_if.md: the command, its numbers, and whether they come true, from
`what_if_cpu.json` and `what_if_chart.json` in benchmarks/results.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.what_if_chart import NUMBERS

from docs.markdown import GENERATED, fenced, join, table
from policyloss_lab.whatif.outcome import FACTORS, PARTS, Limits
from policyloss_lab.whatif.result import COLUMNS
from policyloss_lab.whatif.tokens import NAMES
from policyloss_lab.whatif.weights import GRADIENT_NUMBERS

GOOD = 0.9
COMMANDS = """policyloss what-if runs/mine                              # every preset, as a table
policyloss what-if runs/mine --out page.html              # and as a page, side by side
policyloss what-if tokens.jsonl --loss dapo --presets gspo cispo --json"""
EXAMPLE = """import policyloss_lab as lab

tokens = {"logp": logp, "old_logp": old_logp, "advantages": advantages, "mask": mask}
result = lab.what_if(tokens, ["ppo", "gspo", "cispo"], spec="dapo")
print(result)  # a row for each loss
result["gspo"].gradient  # [N]: of the loss by each log-probability
result.by_token.cosine  # [L, L]: how alike the gradients are"""


def what_if_pages(results: Path) -> dict[str, str]:
    """The page by its path."""
    files = [results / f"what_if_{name}.json" for name in ("cpu", "chart")]
    if not all(path.is_file() for path in files):
        return {}
    return {"docs/what_if.md": _page(*(json.loads(x.read_text(encoding="utf-8")) for x in files))}


def _page(measured: Any, on_chart: Any) -> str:
    return join(
        "# What if: every loss on your own tokens",
        GENERATED,
        fenced(COMMANDS, "bash"),
        "A run stores some of its completions token by token. `policyloss what-if` computes what "
        "each named loss would have done with exactly these tokens: the weight of every "
        "token, which tokens are clipped or rejected, the effective sample size, where the "
        "gradient goes, how alike two losses are, and how a small step would change each sequence. "
        "For the loss of the run, it names problems and the smallest change that cures each. "
        "In Python:",
        fenced(EXAMPLE, "python"),
        "There is no second formula: a weight is the derivative of `policy_loss` by "
        "the log-probability of the token, by autograd, in float64. The page is one file that "
        "opens offline, with a content policy that forbids every request.",
        "## Input",
        "- **A run directory** of `policyloss train` or of a recorder: the completions of the last "
        "stored step with an advantage that is not 0 (`--step 40` takes another one, `--step all` "
        "takes all), the loss from `config.json`, and the last checkpoint, if there is one, "
        "to compare gradients through the model. `--through tokens` leaves the model out.\n"
        "- **A .jsonl file**, one completion on each line, or **a .safetensors file** of `[B, T]` "
        "tensors, under these names. For a model (`--model FOLDER`), a line also needs `ids` and "
        "`prompt_ids`.",
        table(
            ["tensor", "accepted names"],
            [[f"`{ours}`", ", ".join(f"`{n}`" for n in names)] for ours, names in NAMES.items()],
        ),
        "Without `logp`, the policy is assumed to be the old one. Without advantages, GRPO's are "
        "computed from the rewards of each prompt. A completion that lacks a number is left out "
        "with a note. A preset that needs a tensor that was not stored (`ref_logp`, "
        "`rollout_logp`, a divergence) is not tried, and the result gives the reason.",
        "## The numbers",
        table(
            ["column", "on the page", "meaning"],
            [[f"`{column.name}`", column.title, column.meaning] for column in COLUMNS],
        ),
        _definitions(),
        "## Problems, and the smallest cure",
        _cures(),
        "## Does it come true?",
        _proof(measured),
        _chart(on_chart),
    )


def _definitions() -> str:
    return (
        "With `g_t = ∂loss/∂logp_t` and `p_t` the same derivative on policy (current, old and "
        "rollout policy equal, so that every ratio and every weight is 1; both without the KL and "
        "entropy terms):\n\n"
        "- The **importance** of a token is `u_t = g_t / p_t`: the joint effect of the ratio, the "
        "trust region and the correction. It does not depend on advantages or on the average.\n"
        "- The **effective sample size** is `(Σu)² / (M·Σu²)` over the M tokens with `p_t ≠ 0`.\n"
        "- **Cut off** is `Σ|p_t|` over tokens with `g_t = 0`, divided by `Σ|p_t|`.\n"
        "- The **cosine** of two losses is the cosine of their gradients: by token, where every "
        "log-probability counts as a weight of its own, and by model, with `∇_θ loss = Σ_t "
        "g_t·∇_θ logp_t`. All parameters are used as long as the gradients of all losses fit into "
        f"{GRADIENT_NUMBERS // 2**20} million numbers, and the weight of the head otherwise.\n"
        "- The **change** of a sequence is `−⟨∇_θ logp_s, ∇_θ loss⟩ / ‖∇_θ loss‖`, the first-order "
        "change of its log-probability for a step of length 1."
    )


def _cures() -> str:
    limits = Limits()
    parts = " and ".join(
        f"the {slot} of {', '.join(f'`{name}`' for name in names)}" for slot, names in PARTS.items()
    )
    return (
        f"Something is wrong if more than {limits.lost:.0%} of the gradient is cut off, if the "
        f"effective sample size is below {limits.effective:g}, if engine and trainer are more "
        f"than {limits.mismatch:g} nats per token apart (`kl_rollout_k3`) and the loss does not "
        "read `rollout_logp`, or if every advantage is 0. "
        "`lab.what_if(…, limits=policyloss_lab.whatif.Limits(lost=0.4))` takes "
        "other limits. The search changes one "
        "number of the ratio, the trust region or the corrections at a time, up and down, by "
        f"factors from {FACTORS[0]:g} to {FACTORS[-1]:g}, and stops at the first factor at which a "
        "change cures the problem without causing another one. If no number does, it tries "
        f"{parts}. A change that lets more of the gradient through is not a better loss: a trust "
        "region cuts off on purpose. The sentence states the cost of the limit on these tokens."
    )


def _proof(data: Any) -> str:
    studies = data["studies"]
    kinds = list(studies[0]["losses"][0]["r_squared"])
    rows = []
    for kind in kinds:
        values = [row["r_squared"][kind] for study in studies for row in study["losses"]]
        name, size = kind.split()
        step = "gradient descent" if name == "sgd" else "AdamW"
        good = f"{sum(x >= GOOD for x in values)} of {len(values)}"
        numbers = (f"{median(values):.4f}", f"{min(values):.4f}", good)
        rows.append([step, f"{size} nats", *numbers])
    count = sum(len(study["losses"]) for study in studies)
    correlations = table(
        ["seed", "losses", *(f"by {kind}" for kind in studies[0]["rank_correlation"])],
        [
            [
                str(study["seed"]),
                str(len(study["losses"])),
                *(f"{x:+.2f}" for x in study["rank_correlation"].values()),
            ]
            for study in studies
        ],
    )
    every = [study["rank_correlation"]["parameters"] for study in studies]
    return join(
        "`python -m benchmarks.what_if` trains a small transformer to sort digits with DAPO, ten "
        "updates for each batch of samples by a copy in bf16, stops in the middle of a batch, and "
        "tests two predictions for every preset whose gradient differs from the earlier ones.",
        "**One small step: yes.** The predicted change of each sequence's log-probability against "
        f"the real one after one step, R² over the sequences of a batch, {count} losses on "
        f"{len(studies)} seed{'s' if len(studies) > 1 else ''}. The size of a step is the root "
        "mean square of the predicted changes. AdamW has the moments of the run, and its step is "
        "shortened to that size.",
        table(["step", "size", "median R²", "least R²", f"R² ≥ {GOOD:g}"], rows),
        "How far first order reaches depends on the loss and on the optimizer: with AdamW, a step "
        "of the same size is predicted better.",
        f"**{data['steps']} steps: {_verdict(every)}** The predicted gain of a loss is the sum of "
        "the changes, each times the advantage of its sequence. Its rank correlation (Spearman) "
        f"with the held-out reward after {data['steps']} updates from the same weights and "
        "moments, AdamW, ten updates for each batch:",
        correlations,
        _best_and_worst(studies),
    ).rstrip("\n")


def _verdict(correlations: list[float]) -> str:
    if min(correlations) > 0.5:
        return "the ranking agrees."
    return "no." if max(correlations) < 0.5 else "it depends on the seed."


def _best_and_worst(studies: Any) -> str:
    """The results of the losses with the largest predicted gain."""
    sentences = []
    for study in studies:
        rows = sorted(study["losses"], key=lambda row: -row["predicted"]["parameters"])
        best = max(rows, key=lambda row: row["reward"])
        sentences.append(
            f"On seed {study['seed']}, `{rows[0]['name']}` had the largest predicted gain and came "
            f"from {study['reward_before']:.2f} to {rows[0]['reward']:.2f}; the best was "
            f"`{best['name']}` with {best['reward']:.2f}."
        )
    return (
        " ".join(sentences)
        + " The gain does not show the use of a trust region: a loss without one moves furthest "
        "along the advantages in a single step, and continues when the same batch is used again. "
        "Therefore what-if shows no gain, and ranks nothing."
    )


def _chart(data: Any) -> str:
    """The rank correlations with the stress chart."""
    conditions = dict.fromkeys(row["condition"] for row in data["correlations"])
    rows = [
        [f"`{condition}`", *(_range(data, condition, name) for name in NUMBERS)]
        for condition in conditions
    ]
    seeds = len({row["seed"] for row in data["correlations"]})
    return join(
        "**A whole run under difficulties: no.** `python -m benchmarks.what_if_chart` stores the "
        f"completions of `{data['base']}` after {data['steps']} steps under conditions of the "
        "[stress chart](stress.md), and compares the numbers of what-if for every loss with the "
        "accuracy that the loss reached on the chart. Rank correlations over the losses, the "
        f"range of {seeds} seeds:",
        table(["condition", *NUMBERS.values()], rows),
        "With old completions, the order is the reverse of a naive reading: a loss that takes "
        "every token at full weight has the largest effective sample size and cuts off nothing, "
        "because it ignores how old the tokens are, and it ends lowest. Under other conditions "
        "the numbers say little, and the signs differ. So read them as a description of a loss "
        "on your tokens, and [the stress chart](stress.md) for the results of training.",
    ).rstrip("\n")


def _range(data: Any, condition: str, name: str) -> str:
    values = [
        row[name] for row in data["correlations"] if row["condition"] == condition and name in row
    ]
    return f"{min(values):+.2f} to {max(values):+.2f}" if values else ""
