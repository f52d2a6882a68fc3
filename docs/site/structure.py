"""The structure of the site: sections by the reader's need, and the pages of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Pages below one caption, by their paths from the root of the repository."""

    caption: str
    pages: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One entry of the bar at the top. folder: its address. about: one sentence."""

    folder: str
    title: str
    about: str
    groups: tuple[Group, ...] = ()


LOSSES, REFERENCE, DECISIONS, MORE = "losses", "reference", "decisions", "More"

START = Section(
    "start",
    "Start",
    "Install the library, compute a first loss, and look at it in a notebook.",
    (
        Group("Begin", ("docs/start.md", "README.md")),
        Group(
            "Notebooks",
            (
                "docs/tutorials/quickstart.md",
                "docs/tutorials/first_loss.md",
                "docs/tutorials/denominators.md",
                "docs/tutorials/mismatch.md",
                "docs/tutorials/distil.md",
            ),
        ),
    ),
)
GUIDES = Section(
    "guides",
    "Guides",
    "One question each: which loss, which denominator, which correction, which framework.",
    (
        Group(
            "Choose", ("docs/choose.md", "docs/explorer.md", "docs/evidence.md", "docs/stress.md")
        ),
        Group(
            "Accumulate and parallel",
            ("docs/denominators.md", "docs/partition_check.md", "docs/recipes.md", "docs/bits.md"),
        ),
        Group("Rollout engines", ("docs/mismatch.md", "docs/rollout.md")),
        Group("KL and teachers", ("docs/kl.md", "docs/distillation.md", "docs/teachers.md")),
        Group("Mixtures and preferences", ("docs/mixtures.md", "docs/preference.md")),
        Group("Memory and speed", ("docs/head.md", "docs/models.md", "docs/performance.md")),
        Group("Your own loss", ("docs/custom.md",)),
        Group(
            "TRL, verl, OpenRLHF, ColossalChat",
            (
                "docs/frameworks.md",
                "docs/port.md",
                "docs/names.md",
                "docs/conformance.md",
                "docs/catalogue.md",
            ),
        ),
        Group(
            "Reports",
            (
                "docs/upstream.md",
                "docs/upstream/verl.md",
                "docs/upstream/openrlhf.md",
                "docs/upstream/trl.md",
            ),
        ),
        Group(
            "Other engines",
            (
                "docs/engines.md",
                "docs/engines/skyrl.md",
                "docs/engines/nemo_rl.md",
                "docs/engines/prime_rl.md",
                "docs/engines/slime.md",
                "docs/engines/miles.md",
                "docs/engines/torchtitan.md",
                "docs/engines/areal.md",
                "docs/engines/swift.md",
                "docs/engines/xtuner.md",
                "docs/engines/rlinf.md",
                "docs/engines/trinity.md",
                "docs/engines/twinkle.md",
                "docs/engines/axolotl.md",
                "docs/engines/rllm.md",
            ),
        ),
        Group(
            "Train",
            (
                "docs/train.md",
                "docs/commands.md",
                "docs/turns.md",
                "docs/bench.md",
                "docs/scale.md",
                "docs/report.md",
            ),
        ),
        Group(
            "Diagnose",
            (
                "docs/attach.md",
                "docs/doctor.md",
                "docs/what_if.md",
                "docs/doctor_matrix.md",
                "docs/doctor_logs.md",
            ),
        ),
    ),
)
LOSS_PAGES = Section(
    LOSSES,
    "Losses",
    "One page for each named loss: formula, curves, sources, names elsewhere, traps, evidence.",
)
REFERENCE_PAGES = Section(
    REFERENCE,
    "Reference",
    "Every public name with its docstring and an example that a test runs.",
    (Group("Tables", ("docs/metrics.md",)),),
)
PROJECT = Section(
    "project",
    "Project",
    "How the code is built, its dependencies, and how to change it.",
    (
        Group(
            "The code",
            (
                "docs/architecture.md",
                "CONTRIBUTING.md",
                "CODE_OF_CONDUCT.md",
                "SECURITY.md",
                "docs/dependencies.md",
            ),
        ),
        Group("History", ("docs/versions.md", "CHANGELOG.md")),
    ),
)
DECISION_PAGES = Section(
    DECISIONS,
    "Decisions",
    "Choices that someone may question, each with its reason.",
)
SECTIONS = (START, GUIDES, LOSS_PAGES, REFERENCE_PAGES, DECISION_PAGES, PROJECT)


def site_path(page: str, section: Section) -> str:
    """The place of a page of the repository on the site: `docs/kl.md` → `guides/kl.md`."""
    name = page.rpartition("/")[2].lower()
    return f"{section.folder}/{'overview.md' if name == 'readme.md' else name}"
