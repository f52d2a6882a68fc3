"""Writes docs/performance.md and its figure from the runs in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.markdown import GENERATED, fenced, join, table
from docs.performance_figure import head_figure
from docs.performance_misses import misses_section, targets_of, title_of
from docs.performance_sparse import learning_section, sparse_section

Run = dict[str, Any]
FIGURE = "docs/figures/head.svg"
WHERE = {"cuda": "on a GPU", "cpu": "on a CPU"}
OURS = "pl.hf.policy_loss"


def performance_pages(results: Path) -> dict[str, str]:
    """The page, and the figure if there is a run of the head on a GPU to draw."""
    runs = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(results.glob("*.json"))
    }
    pages = {"docs/performance.md": performance_page(runs)}
    if "head_cuda" in runs:
        pages[FIGURE] = head_figure(runs["head_cuda"])
    return pages


def performance_page(runs: dict[str, Run]) -> str:
    """The page; `runs` by the name of their file: head_cuda, head_cpu, loss_cuda, …"""
    about = (
        "Figures are ratios within one run; absolute times depend on the machine as much as on the"
        " code. "
        "Every provider is checked against float64 before it is timed; a wrong one is not timed. "
        "They are interleaved, each round in another order, and the figure is the "
        "median. The runs behind this page are in `benchmarks/results`. `make peers` fetches the "
        "other implementations, `make bench` runs everything on a CPU, and `python -m "
        "benchmarks.head --device cuda` (also `.divergence`, `.loss`, `.gae`) on a GPU."
    )
    sections = [head_section(runs[f"head_{d}"], d) for d in WHERE if f"head_{d}" in runs]
    sections += [
        sparse_section(runs[f"sparse_{d}"], WHERE[d], machine(runs[f"sparse_{d}"]))
        for d in WHERE
        if f"sparse_{d}" in runs
    ]
    sections += [learning_section(runs["sparse_learning"])] if "sparse_learning" in runs else []
    sections += [step_section(runs[f"step_{d}"], d) for d in WHERE if f"step_{d}" in runs]
    sections += [trl_step_section(runs["trl_step_cpu"])] if "trl_step_cpu" in runs else []
    divergences = [d for d in WHERE if f"divergence_{d}" in runs]
    sections += [divergence_section(runs[f"divergence_{d}"], d) for d in divergences]
    sections += [loss_section(runs[f"loss_{d}"], d) for d in WHERE if f"loss_{d}" in runs]
    sections += [training_section(runs[f"train_{d}"], d) for d in WHERE if f"train_{d}" in runs]
    sections += [gae_section(runs[f"gae_{d}"], d) for d in WHERE if f"gae_{d}" in runs]
    sections += [bits_section(runs[f"bits_{d}"], d) for d in WHERE if f"bits_{d}" in runs]
    return join(
        "# Performance",
        GENERATED,
        about,
        targets_section(runs),
        misses_section(runs),
        *(sections or ["No run has been recorded yet."]),
    )


def step_section(run: Run, device: str) -> str:
    """A whole training step with each head: time, times the body's, and peak memory."""
    heads = list(dict.fromkeys(row["head"] for row in run["rows"]))
    cells = {(row["model"], row["tokens"], row["head"]): row for row in run["rows"]}
    sizes = list(dict.fromkeys((row["model"], row["tokens"]) for row in run["rows"]))
    rows, most = [], []
    for model, tokens in sizes:
        body = cells[model, tokens, "body alone"]
        shown = [_step_cell(cells.get((model, tokens, head)), body) for head in heads]
        rows.append([f"{model}, {tokens:,}", *shown])
    counts = {(row["model"], row["head"]): row["tokens"] for row in run["largest"]}
    for model in dict.fromkeys(row["model"] for row in run["largest"]):
        limits = [counts.get((model, head)) for head in heads]
        most.append([model, *("not measured" if n is None else f"{n:,}" for n in limits)])
    return join(
        f"## A whole training step {WHERE[device]}",
        f"{machine(run)}. Forward and backward of random-weight Qwen3 models, sequences of "
        f"{run['length']} tokens, half of them prompt, with recomputed activations: median time, "
        f"and how much longer that is than the body alone{_step_notes(run)}",
        table(["model, tokens", *heads], rows),
        *_savings(run),
        *(
            ["The largest batch that fits, in tokens:", table(["model", *heads], most)]
            if run["largest"]
            else []
        ),
        *(f"Not measured: {who} ({why})." for who, why in run["absent"].items()),
    )


def _savings(run: Run) -> list[str]:
    """The share of a step that our head saves, from the least to the most over the sizes."""
    times = {
        (row["head"], row["model"], row["tokens"]): row.get("median_ms") for row in run["rows"]
    }
    shares: dict[str, list[float]] = {}
    for (head, *size), time in times.items():
        ours = times.get((OURS, *size))
        if head not in (OURS, "body alone") and time and ours:
            shares.setdefault(head, []).append(100 * (1 - ours / time))
    if not shares:
        return []
    saved = "; ".join(f"{head} {min(x):.1f} to {max(x):.1f} %" for head, x in shares.items())
    return [
        f"The share of a whole step's time that `{OURS}` saves over these sizes (negative: it "
        f"takes longer), against: {saved}."
    ]


def _step_notes(run: Run) -> str:
    """The end of the sentence: other measurements, and the target of these models."""
    memory = any(row.get("peak_bytes") for row in run["rows"])
    text = (
        ", and the most memory that tensors took, weights and gradients included." * memory or "."
    )
    if any(row["model"] == "1.7B" for row in run["rows"]):
        text += " Target T16 is that head and loss add at most 4 % at 1.7B."
    return text


def trl_step_section(run: Run) -> str:
    """A step of TRL's trainer with its own head and with ours: time and memory."""
    arms = list(next(iter(run["sizes"].values()))["median_s"])
    rows = []
    for name, row in run["sizes"].items():
        *_, completions, length = row["size"]
        cells = [
            f"{row['median_s'][arm]:.3g} s, {row['peak_bytes'][arm] / 2**30:.1f} GiB"
            for arm in arms
        ]
        ratios = [f"{row['faster']:.2f}", f"{row['of_memory']:.2f}"]
        rows.append([f"{name}, {completions * length:,} tokens", *cells, *ratios])
    return join(
        "## A step of TRL's trainer on a CPU",
        f"{machine(run)}. Forward and backward of a step of TRL's GRPOTrainer with its own head "
        'and with `head="fused"` (`python -m benchmarks.trl_step`): a random Qwen2 of two layers, '
        "so that the head is most of it. Both take steps in turns, and loss and gradient agree "
        "first. Time is processor time, and the ratio is the median within a turn; memory is the "
        "growth of the process since its first step.",
        table(["vocabulary, batch", *arms, "times faster", "of the memory"], rows),
    )


def training_section(run: Run, device: str) -> str:
    """The reference trainer: its learning phase and a dense mask, or its steps and TRL's."""
    title, where = f"## Training {WHERE[device]}", machine(run)
    if "learning" in run:
        phases = {"without --compile": run["learning"], "with --compile": run["compiled"]}
        size, best = run["learning"]["size"], max(p["of_before"] for p in phases.values())
        rows = [
            [name, way, f"{rate:,.0f}", f"{p['of_before']:.2f}"]
            if way == p["attention"]
            else [name, way, f"{rate:,.0f}", ""]
            for name, p in phases.items()
            for way, rate in p["tokens_per_s"].items()
        ]
        return join(
            title,
            f"{where}. The learning phase of `policyloss train` (`python -m benchmarks.train "
            f"--device {device}`): a model of {run['learning']['weights'] / 1e6:.0f} million "
            f"weights, about {size['micro_tokens']} tokens at a time in sequences of about "
            f"{size['new_tokens']}. Target T13 is 5 times the 47,639 tokens per second of the time "
            f"when every pack had a dense mask; {best:.2f} times were measured, so that it is "
            f"{'met' if best >= 5 else 'missed'}.",
            table(["", "attention", "completion tokens per second", "times before"], rows),
        )
    rows = [
        [
            name,
            f"{row['median_s']['ours']:.3g} s",
            f"{row['median_s']['trl']:.3g} s",
            f"{row['faster']:.2f}",
        ]
        for name, row in run["trl"].items()
    ]
    return join(
        title,
        f"{where}. Whole steps of `policyloss train` and of TRL's GRPOTrainer on the same model, "
        "prompts and batch (`python -m benchmarks.train`); they take turns, and loss and gradient "
        "of one batch agree first. Target C4 is 1.3 times TRL's steps per second.",
        table(["model", "policyloss", "TRL", "times faster"], rows),
    )


def _step_cell(row: Run | None, body: Run) -> str:
    if row is None:
        return "not measured"
    if "median_ms" not in row:
        return "does not fit"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
    # A row from a separate run uses the body's time of that run.
    alone = row.get("body_ms", body["median_ms"])
    more = "" if row is body else f" ({row['median_ms'] / alone - 1:+.1%})"
    return f"{row['median_ms']:.0f} ms{more}{peak}"


def machine(run: Run) -> str:
    """Where it was measured."""
    e = run["environment"]
    gpu = (
        f"{e['gpu']}, CUDA {e.get('cuda')}, driver {e.get('driver')}, Triton {e.get('triton')}"
        if e["gpu"]
        else ""
    )
    return (
        f"{gpu}, torch {e['torch']}"
        if gpu
        else f"{e['threads']} threads of a CPU, torch {e['torch']}"
    )


def targets_section(runs: dict[str, Run]) -> str:
    """Targets and results in one table over all runs, after the names of the missed targets."""
    found = [(title_of(name), t) for name, t in targets_of(runs)]
    if not found:
        return ""
    missed = [t for _, t in found if t["met"] is False]
    ids = ", ".join(dict.fromkeys(t["id"] for t in missed))
    said = f"{sum(t['met'] is True for _, t in found)} of {len(found)} are met"
    said += f"; {len(missed)} are not, all of them under {ids}." if missed else "."
    if any(run.endswith("GPU") for run, _ in found):
        said += " " + LATENCY
    columns = ["run", "target", "quantity", "reach", "stretch", "measured", "met"]
    return join("## Targets", said, table(columns, [[run, *_target(t)] for run, t in found]))


LATENCY = (
    "On a GPU each call is timed alone, from an idle device: its time includes the Python before "
    "its first kernel starts, for the head some milliseconds on the machine of these runs. That "
    "is part of T1 and T6, and weighs most where a call is short: T7's shares of the copy's "
    "bandwidth and T8's times are those of whole calls; times of kernels are listed separately "
    "where they were measured. T6's floor is a product that is rounded to bfloat16; logits in "
    "float32 are twice the bytes to write, and are read once more for their statistics."
)


def _target(t: Run) -> list[str]:
    stretch = "" if t.get("stretch") is None else f"{_sign(t)} {t['stretch']:g}"
    met = {True: "yes", False: "**no**", None: "not measured"}[t["met"]]
    measured = (
        ""
        if t["measured"] is None
        else f"{t['measured']:.0f}"
        if t["measured"] >= 1000
        else f"{t['measured']:.3g}"
    )
    return [t["id"], t["what"], f"{_sign(t)} {t['reach']:g}", stretch, measured, met]


def _sign(t: Run) -> str:
    return {"<=": "≤", ">=": "≥"}.get(t.get("sense", ""), "")


# The head -----------------------------------------------------------------------------------------


def head_section(run: Run, device: str) -> str:
    """All groups of one run of `benchmarks.head`."""
    shape, inputs = run["shape"], run["inputs"]
    sizes = (
        f"{shape['sequences'] * shape['length']} tokens × vocabulary {shape['vocabulary']} × "
        f"hidden size {shape['hidden']}"
    )
    clipped = inputs["below_clip"] + inputs["above_clip"]
    about = (
        f"{sizes}, {run['dtype']}, {machine(run)}. The inputs are like training's: tokens drawn "
        f"from distributions of {inputs['mean_entropy']:.2f} nats, {clipped:.0%} of the ratios "
        "beyond the clip range, advantages of both signs. The floor is the three matrix products "
        "that a forward and backward cannot do without (logits, d hidden, d weight), run bare in "
        "the same loop. Extra memory is the peak beyond inputs and gradients. Errors are against "
        "float64: log-probs by root mean square, gradients relative."
    )
    figure = "![Time and memory of the head](figures/head.svg)" if device == "cuda" else ""
    groups = run["groups"]
    return join(
        f"## The head {WHERE[device]}",
        about,
        figure,
        _group(
            groups,
            "dense",
            "three bare matmuls",
            "### PPO with dual clip, every token trained on",
            DENSE_NOTE,
        ),
        _group(groups, "masked", "three bare matmuls", "### Masked tokens", MASKED_NOTE),
        _group(groups, "tree", "policyloss, unrolled", "### A tree of trajectories", TREE_NOTE),
        _group(
            groups,
            "forward only",
            "one bare matmul",
            "### Forward only: log-probs and entropy",
            FORWARD_NOTE,
        ),
        _group(
            groups,
            "forward only, in turns with its floor",
            "one bare matmul",
            "### Forward only, without peers",
            IN_TURNS_NOTE,
        ),
        _logits_group(groups),
        _not_timed(run),
        _plans(groups) if device == "cuda" else "",
    )


DENSE_NOTE = (
    "Liger's loss has no dual bound; it computes, and is checked against, PPO's clip without one. "
    "The TRL-style row loop and eager PyTorch hold all logits. cut-cross-entropy's default leaves "
    "out gradients of small probabilities."
)
FORWARD_NOTE = (
    "Logits rounded to half precision, which take half the bytes, have a log-prob error of some "
    "1e-3."
)
IN_TURNS_NOTE = (
    "A product runs at a higher clock after a call that left the device cool, as some peers do; "
    "the floor above is the median of such and of others. Here it is timed in turns with our call "
    "alone; T6 is this ratio."
)
MASKED_NOTE = (
    "We drop tokens that do not count before the first product; tokens at zero advantage get a "
    "forward for the metrics and no backward, or neither (`skip_zero_advantage=True`). The others "
    "are given their rows gathered before the clock starts."
)

TREE_NOTE = (
    "Eight sequences share the first half of their tokens: unrolled, and as 4.5/8 of the hidden "
    "states with `index=`."
)


def divergence_section(run: Run, device: str) -> str:
    """One run of `benchmarks.divergence`: a table for each kind."""
    shape = run["shape"]
    about = (
        f"{shape['sequences'] * shape['length']} tokens × vocabulary {shape['vocabulary']} × "
        f"hidden size {shape['hidden']} of both models, {run['dtype']}, {machine(run)}. Every "
        "provider gives the mean divergence of student and teacher and its gradients, from the "
        "hidden states of both. The floor is four matrix products: the logits of either model, d "
        "hidden and d weight."
    )
    words = {"forward": "KL(teacher, student)", "reverse": "KL(student, teacher)", "jsd": "JSD"}
    tables = []
    for kind, providers in run["groups"].items():
        base = providers.get("four bare matmuls", {}).get("median_ms")
        rows = [_divergence_row(name, p, base) for name, p in providers.items()]
        columns = ["", "time / floor", "ms (p20 to p80)", "extra memory", "d hidden", "d weight"]
        tables += [f"### {words[kind]}", table(columns, rows)]
    return join(f"## A teacher's distributions {WHERE[device]}", about, *tables, _not_timed(run))


def _divergence_row(name: str, p: Run, base: float | None) -> list[str]:
    *measured, _, d_hidden, d_weight = _row(name, p, base)
    return [*measured, d_hidden, d_weight]


def _group(groups: Run, name: str, floor: str, heading: str, note: str) -> str:
    providers = groups.get(name)
    if not providers:
        return ""
    base = providers.get(floor, {}).get("median_ms")
    alone = any("kernel_ms" in p for p in providers.values())
    rows = [_row(provider, p, base, alone) for provider, p in providers.items()]
    columns = [
        "",
        f"time / {floor}",
        "ms (p20 to p80)",
        *(["kernels alone, ms"] if alone else []),
        "extra memory",
        "log-prob error",
        "d hidden",
        "d weight",
    ]
    return join(heading, table(columns, rows), note)


def _row(name: str, p: Run, base: float | None, alone: bool = False) -> list[str]:
    errors = [
        f"{p['errors'][k]:.1e}" if k in p["errors"] else ""
        for k in ("logp", "d_hidden", "d_weight")
    ]
    ratio = f"{p['median_ms'] / base:.2f}" if base else ""
    memory = _bytes(p["extra_bytes"]) if "extra_bytes" in p and p["kind"] != "floor" else ""
    shown = f"**{name}**" if p["kind"] == "ours" else name
    kernels = [f"{p['kernel_ms']:.1f}" if "kernel_ms" in p else ""] if alone else []
    return [shown, ratio, _milliseconds(p), *kernels, memory, *errors]


def _milliseconds(p: Run) -> str:
    digits = 1 if p["median_ms"] >= 10 else 3
    return f"{p['median_ms']:.{digits}f} ({p['p20_ms']:.{digits}f} to {p['p80_ms']:.{digits}f})"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= 0.1 * size:
            return f"{count / size:.1f} {unit}"
    return "< 0.1 MiB"


def _logits_group(groups: Run) -> str:
    providers = groups.get("from logits")
    if not providers:
        return ""
    rows = []
    for name, p in providers.items():
        share = f"{p['share_of_copy_bandwidth']:.0%}" if "share_of_copy_bandwidth" in p else ""
        errors = [
            f"{p['errors'][k]:.1e}" if k in p["errors"] else ""
            for k in ("logp", "entropy", "d_logits")
        ]
        alone = f"{p['kernel_ms']:.3f}" if "kernel_ms" in p else ""
        title = f"**{name}**" if p["kind"] == "ours" else name
        rows.append([title, _milliseconds(p), alone, share, *errors])
    columns = [
        "",
        "ms (p20 to p80)",
        "kernels alone, ms",
        "share of the copy's bandwidth",
        "log-prob error",
        "entropy",
        "d logits",
    ]
    note = (
        "A forward reads the logits once; a copy and a backward in place read and write them. "
        "TRL's pair is `selective_log_softmax` and `entropy_from_logits`: on a GPU each takes a "
        "Triton kernel of TRL's where there is Triton, plain torch where there is not."
    )
    return join("### From existing logits: log-probs and entropy", table(columns, rows), note)


def _not_timed(run: Run) -> str:
    rows = [[f["group"], f["provider"], " ".join(f["reason"].split())] for f in run["failures"]]
    return join("### Not timed", table(["group", "provider", "reason"], rows)) if rows else ""


def _plans(groups: Run) -> str:
    """The output of `explain_plan` for each of our runs."""
    told = {
        name: p["plan"] for group in groups.values() for name, p in group.items() if p.get("plan")
    }
    text = "\n\n".join(
        f"{name}\n  {plan.replace(chr(10), chr(10) + '  ')}" for name, plan in told.items()
    )
    return join("### The plans, from `explain_plan`", fenced(text, "text")) if told else ""


# The loss -----------------------------------------------------------------------------------------


def loss_section(run: Run, device: str) -> str:
    """Elementwise loss: speed against verl's eager function, memory, cost per token."""
    times, memory = run["times"], run["peak_extra_bytes"]
    base = times.get("verl", times["policyloss"])["median_ms"]
    against = "verl" if "verl" in times else "policyloss"
    rows = [
        [
            name,
            f"{base / t['median_ms']:.2f}x",
            _milliseconds(t),
            f"{memory[name] / 1e6:.1f} MB" if name in memory else "",
        ]
        for name, t in times.items()
    ]
    height, width = run["shape"]
    about = (
        "`policy_loss(ppo_dual_clip)` with all its metrics, against the functions of verl 0.9.1 "
        f"and OpenRLHF 0.11.2 that compute the same loss: {height} × {width} tokens, float32, "
        f"{machine(run)}. Peak extra memory is the memory of tensors beyond the inputs. The mask "
        "is "
        "float32, as frameworks pass it: torch's CPU compiler reads a bool mask slowly, for "
        "every provider. verl returns three metrics; under torch.compile, the figure that "
        "compares like with like is ours with the same few metrics."
    )
    heading = ["provider", f"speed against {against} eager", "ms (p20 to p80)", "peak extra"]
    title = f"## The loss {WHERE[device]}, forward and backward"
    return join(
        title,
        about,
        _loss_notes(times),
        table(heading, rows),
        _standing(times),
        _scaling(run.get("scaling"), device),
    )


def _loss_notes(times: Run) -> str:
    """Explanations of the rows that need one, if they are present."""
    notes = {
        "policyloss, compiled_loss": (
            "`compiled_loss` is `pl.compiled_loss(spec)`, `torch.compile` over loss, all metrics "
            "and gradient as one node, then `backward()`. `value_and_gradient` is its method "
            "without autograd."
        ),
        "policyloss, basic": (
            '`basic` and `no metrics` are `metrics="basic"`, about the metrics of verl, '
            'and `metrics="none"`.'
        ),
        "policyloss, operation by operation": (
            "On a GPU `policy_loss` takes two Triton kernels that are written from its own traced "
            "graph; `operation by operation` is the same call under `pl.unfused()`."
        ),
        "coati's form": (
            "coati's form is ColossalChat's formula, written out because its package and this one "
            "cannot be installed together: another, smaller loss (no dual bound, each row's own "
            "mean, one metric), compared with its own float64 formula."
        ),
    }
    return " ".join(text for name, text in notes.items() if name in times)


def _standing(times: Run) -> str:
    """Ours against the fastest function that computes the same loss, eager and compiled."""
    said = []
    for ours, kind in (("policyloss", ""), ("policyloss, compiled_loss", ", torch.compile")):
        peers = [name for name in (f"verl{kind}", f"openrlhf{kind}") if name in times]
        if ours in times and peers:
            fastest = min(peers, key=lambda name: times[name]["median_ms"])
            ratio = times[ours]["median_ms"] / times[fastest]["median_ms"]
            said.append(f"{ours} takes {ratio:.2f} times as long as {fastest}")
    return f"Against the fastest that computes the same loss: {'; '.join(said)}." if said else ""


def _scaling(found: list[Run] | None, device: str) -> str:
    if not found:
        return ""
    names = [name for name in found[0] if name != "tokens"]
    rows = [[f"{r['tokens']:.0e}", *(f"{r[name]:.3g}" for name in names)] for r in found]
    note = (
        "In small batches the fixed cost of some hundred operations shows; in large ones the "
        "tensors no longer fit any cache."
    )
    if device == "cuda":
        first, last = (
            f"{r['policyloss'] * r['tokens'] / 1e6:.1f} ms for {r['tokens']:.0e} tokens"
            for r in (found[0], found[-1])
        )
        note = (
            f"A call of ours took {first} and {last}: here the number of operations counts, not "
            "the number of tokens."
        )
    return join("Cost per token, eager, nanoseconds:", table(["tokens", *names], rows), note)


# GAE ----------------------------------------------------------------------------------------------


def gae_section(run: Run, device: str) -> str:
    """The scan against the loop over time."""
    height, width = run["shape"]
    about = (
        f"`pl.gae` against the loop over time steps that frameworks use: {height} × {width}, "
        f"{machine(run)}. Padded, with masked spans in the middle, and packed (there the loop's "
        "figure holds the padding it needs)."
    )
    if device == "cuda":
        about += " On a GPU ours is one Triton kernel; the loop launches some for every time step."
    rows = []
    for case, found in run["cases"].items():
        for name, t in found["times"].items():
            rows.append(
                [
                    case,
                    name,
                    _milliseconds(t),
                    f"{found['ratio']:.0f}x" if name == "policyloss" else "",
                ]
            )
    title = f"## GAE {WHERE[device]}, no loop over time"
    return join(title, about, table(["case", "provider", "ms (p20 to p80)", "times faster"], rows))


def bits_section(run: Run, device: str) -> str:
    """The cost of the same bits."""
    sequences, length, vocabulary, hidden = run["shape"]
    about = (
        f"{sequences * length} tokens × vocabulary {vocabulary} × hidden size {hidden}, "
        f"{machine(run)}. Within `pl.exact()` rows are multiplied {run['tile']} at a time (fewer "
        f"if their logits would not fit), by {run['parts']} parts of the vocabulary "
        "([bits](bits.md)). The bits of every row were compared first: in another order, among "
        "others, alone, in other windows."
    )
    rows = [
        [
            what,
            *(_milliseconds(case["times"][mode]) for mode in ("default", "exact")),
            f"{case['ratio']:.3f}",
            str(max(case["bits"]["default"].values())),
        ]
        for what, case in run["cases"].items()
        if "times" in case
    ]
    columns = ["call", "default ms", "exact ms", "ratio", "rows with other bits by default"]
    return join(f"## The same bits {WHERE[device]}", about, table(columns, rows))
