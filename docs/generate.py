"""Writes the generated pages: presets, their index, metrics, names, choices, architecture,
conformance, engines, catalogue, performance, evidence, stress, the doctor's matrix.

python -m docs.generate          write them
python -m docs.generate --check  exit 1 if any is out of date (a test does the same)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import policyloss as pl
from docs.architecture_page import architecture_pages
from docs.catalogue_page import catalogue_page
from docs.choose_page import choose_page
from docs.commands_page import commands_page
from docs.conformance_page import conformance_page
from docs.doctor_logs_page import doctor_logs_pages
from docs.doctor_page import doctor_pages
from docs.engines_page import engines_page
from docs.evidence_page import evidence_pages
from docs.losses_table import losses_table
from docs.markdown import GENERATED, fenced, join, linked, table
from docs.metric_formulas import FORMULAS, ROUTER_FORMULAS, VALUE_FORMULAS
from docs.names_page import names_page
from docs.performance_page import performance_pages
from docs.stress_page import stress_pages
from docs.what_if_page import what_if_pages
from policyloss.catalogue import PRESETS, Preset
from policyloss.catalogue.nearest import distance
from policyloss.explanations import Explanation, shorten_sources
from policyloss.explanations.difference import Difference, entry
from policyloss.output import write_output

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "conformance/results/conformance.json"
PUBLIC_RESULTS = "conformance/results/public.json"
ENGINE_RESULTS = "conformance/results/engines.json"
ENGINE_STEPS = "conformance/results/engine_steps.json"
BENCHMARKS = "benchmarks/results"


def pages() -> dict[str, str]:
    """Every generated file by its path from the root of the repository."""
    texts = {f"docs/presets/{name}.md": preset_page(pl.explain(name)) for name in PRESETS}
    texts["docs/presets/README.md"] = index_page()
    texts["docs/metrics.md"] = metrics_page()
    texts["docs/names.md"] = names_page()
    texts["src/policyloss/losses.json"] = losses_table()
    texts["docs/choose.md"] = choose_page()
    texts["docs/commands.md"] = commands_page()
    texts["docs/conformance.md"] = conformance_page(ROOT / RESULTS, ROOT / ENGINE_RESULTS)
    texts["docs/catalogue.md"] = catalogue_page(
        *(ROOT / path for path in (RESULTS, PUBLIC_RESULTS, ENGINE_RESULTS))
    )
    texts["docs/engines.md"] = engines_page(
        *(ROOT / path for path in (ENGINE_RESULTS, ENGINE_STEPS, RESULTS))
    )
    texts |= architecture_pages()
    texts |= performance_pages(ROOT / BENCHMARKS)
    texts |= evidence_pages(ROOT / BENCHMARKS)
    texts |= stress_pages(ROOT / BENCHMARKS)
    texts |= doctor_pages(ROOT / BENCHMARKS / "doctor_heldout.json")
    texts |= doctor_logs_pages(ROOT / BENCHMARKS / "doctor_logs.json")
    texts |= what_if_pages(ROOT / BENCHMARKS)
    return texts


def preset_table(folder: str) -> str:
    """All presets, one row each, linked to their pages in `folder`."""
    rows = [
        [f"[`{p.name}`]({folder}{p.name}.md)", p.title, linked(p.paper)] for p in PRESETS.values()
    ]
    return table(["preset", "description", "paper or source"], rows)


def index_page() -> str:
    """The list of presets."""
    about = (
        "A preset is a `LossSpec` with a source for every number. `pl.preset(name)` returns it, "
        "`pl.explain(name)` or `policyloss explain NAME` prints the contents of its page, and "
        "`pl.diff(a, b)` prints how two differ."
    )
    return join("# The named losses", GENERATED, about, preset_table(""))


def metrics_page() -> str:
    """The definition of each metric."""
    policy = [[f"`{name}`", formula] for name, formula in FORMULAS.items()]
    value = [[f"`{name}`", formula] for name, formula in VALUE_FORMULAS.items()]
    about = (
        "`out.metrics` holds records that add up: `a + b` merges micro-batches, "
        "`.all_reduce(group)` merges ranks, and nothing is divided before `.compute()`. A metric "
        "is present only if the tensors and the part that it reads are. With `rejected` other than"
        " "
        "`keep`, n counts the survivors, except for `kl_rollout_*`, `correction_*`, `rejected_*` "
        "and `effective_sample_size`, which count the batch before rejection. Keep policy and "
        "value metrics apart: they share names. A `Mixture` names the metrics of a stream "
        "`stream/metric`; its `loss` is their weighted sum, and its `tokens` are the valid tokens "
        "of the call. The `invalid_*` counts are records like the "
        "others, but `.compute()` leaves them out if they are 0, and raises an InputError if they "
        "are not."
    )
    levels = (
        '`metrics="all"` is the default. `metrics="basic"` measures `loss`, `tokens`, '
        "`clip_fraction`, `clip_fraction_dual` and `kl_old_k1`, about the metrics of a "
        'framework, and `metrics="none"` measures only the `invalid_*` counts. The loss and '
        "its gradient are the same. `linear_policy_loss`, `hf.policy_loss`, `accumulate` and "
        "`compiled_loss` take the same argument."
    )
    legend = (
        "Σ runs over the valid tokens and n is their number; lr = logp − old_logp before any "
        "clamp; r is the ratio slot's ratio before its clamp; w is the corrections' weight; A the "
        "advantage."
    )
    heading = ["metric", "formula"]
    return join(
        "# Metrics",
        GENERATED,
        about,
        levels,
        "## policy_loss",
        legend,
        table(heading, policy),
        "## value_loss",
        table(heading, value),
        "## policyloss train",
        "A run logs the metrics of `policy_loss` as `policy/…` and the metrics of `value_loss` as "
        "`value/…`, and adds",
        table(
            heading, [[f"`policy/{name}`", formula] for name, formula in ROUTER_FORMULAS.items()]
        ),
    )


def preset_page(e: Explanation) -> str:
    """The page of one preset."""
    assert e.preset is not None
    same = f"The same loss as {', '.join(f'[`{n}`]({n}.md)' for n in e.also)}." if e.also else ""
    words = "\n".join(f"- **{slot}**: {text}." for slot, text in e.words.items())
    legend = "\n".join(f"- {_legend(meaning)}" for meaning in e.formula.vocabulary.values())
    reads = f"It reads {', '.join(f'`{name}`' for name in e.reads)}."
    advantages = f"Advantages: {linked(e.advantages)}"
    rows = zip(e.numbers, shorten_sources(e.numbers), strict=True)
    numbers = [
        [f"`{n.where}`", f"`{entry(n.value, n.where)}`", linked(source)] for n, source in rows
    ]
    return join(
        f"# {e.title}",
        GENERATED,
        f'`pl.preset("{e.preset}")`, {linked(e.paper)}. {same}'.strip(),
        e.note,
        words,
        "## Formula",
        fenced(str(e.formula), "text"),
        legend,
        reads,
        advantages,
        "## Numbers",
        table(["number", "value", "where it comes from"], numbers),
        "## Tokens that get no gradient",
        zero_section(e),
        "## Elsewhere",
        elsewhere_section(e),
        "## Traps" if e.traps else "",
        "\n".join(f"- {t.text}" for t in e.traps),
        "## Use",
        fenced(usage(e), "python"),
        "## Relatives",
        relatives_section(PRESETS[e.preset]),
    )


def _legend(meaning: str) -> str:
    """`word: meaning` with the word set as code."""
    word, _, rest = meaning.partition(": ")
    return f"`{word}`: {rest}" if rest else meaning


def zero_section(e: Explanation) -> str:
    """When the policy term gives a token no gradient."""
    parts = []
    if e.zero.alone:
        parts += ["The gradient of the policy term is exactly 0 where", _conditions(e.zero.alone)]
    if e.zero.together:
        also = "also" if e.zero.alone else "exactly"
        shared = (
            f"The gradient is shared over the {e.zero.group}: it is {also} 0 where every token of "
            "it meets one of"
        )
        parts += [shared, _conditions(e.zero.together)]
    return join(*parts, e.still_moved_by)


def _conditions(conditions: tuple[tuple[str, str], ...]) -> str:
    return table(
        ["where", "because"], [[f"`{expression}`", meaning] for expression, meaning in conditions]
    )


def elsewhere_section(e: Explanation) -> str:
    """The names of its parts in frameworks."""
    rows = [
        [entry.part, framework, name]
        for entry in e.elsewhere
        for framework, name in entry.names.items()
    ]
    return table(["part", "framework", "there it is"], rows)


def usage(e: Explanation) -> str:
    """Six lines that call it."""
    old = "old_logp" if "old_logp" in e.reads else "None"
    horizon = (
        ".with_horizon(4096)  # your generation budget, in tokens" if e.spec.needs_horizon else ""
    )
    others = [
        f"{name}={name}"
        for name in e.reads
        if name not in ("logp", "old_logp", "advantages", "mask")
    ]
    call = ", ".join(["spec", "logp", old, "advantages", "mask", *others])
    return "\n".join(
        [
            "import policyloss as pl",
            "",
            f'spec = pl.preset("{e.preset}"){horizon}',
            f"out = pl.policy_loss({call})",
            "out.loss.backward()",
            "print(out.metrics.compute())",
        ]
    )


def relatives_section(preset: Preset) -> str:
    """How the presets nearest to this one differ from it."""
    different: dict[pl.LossSpec, Preset] = {}
    for other in PRESETS.values():
        if other.spec != preset.spec:
            different.setdefault(other.spec, other)
    others = sorted(different.values(), key=lambda p: distance(preset.spec, p.spec))
    return "\n\n".join(_relative(other, pl.diff(other.name, preset.name)) for other in others[:3])


def _relative(other: Preset, difference: Difference) -> str:
    lines = [f"From [`{other.name}`]({other.name}.md), {other.title}:", ""]
    for change in difference.changes:
        lines.append(f"- **{change.slot}**: `{change.a}` → `{change.b}`")
    return "\n".join([*lines, *(f"- {note}" for note in difference.notes)])


def stale() -> list[str]:
    """Generated files that are missing, out of date, or belong to a removed preset."""
    texts = pages()
    wrong = [path for path, text in texts.items() if _read(ROOT / path) != text]
    return wrong + [str(p.relative_to(ROOT)) for p in _leftovers(texts)]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def write() -> list[str]:
    """Bring every generated file up to date; returns the files that changed."""
    wrong, texts = stale(), pages()
    for leftover in _leftovers(texts):
        leftover.unlink()
    for path, text in texts.items():
        write_output(ROOT / path, text.encode(), "page")
    return wrong


def _leftovers(texts: dict[str, str]) -> list[Path]:
    return [
        p
        for p in sorted((ROOT / "docs/presets").glob("*.md"))
        if str(p.relative_to(ROOT)) not in texts
    ]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.generate", description="Write the generated pages."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is out of date"
    )
    if parser.parse_args(argv).check:
        wrong = stale()
        print(
            "\n".join(f"out of date: {path}" for path in wrong)
            or "all generated pages are up to date"
        )
        return 1 if wrong else 0
    print("\n".join(f"wrote {path}" for path in write()) or "nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
