"""The site: every page is reached, links have targets, formulas are typeset as they are printed,
curves show the loss, and every public name has an example that runs.
"""

from __future__ import annotations

import doctest
import inspect
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import needs_browser
from docs.site import assemble, check, curves, loss_page, mathml, reference
from docs.site.structure import SECTIONS
from sphinx.cmd.build import build_main
from walk import walked

import policyloss as pl
from policyloss.cli import all_commands
from policyloss.explanations.algebra.expression import parse

ROOT = Path(__file__).resolve().parents[2]

# Assembling -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assembly() -> assemble.Assembly:
    return assemble.Assembly(run=False)


def test_every_page_of_the_repository_is_on_the_site_once(assembly: assemble.Assembly) -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    pages |= {
        f"docs/{folder}/{path.name}"
        for folder in ("presets", "decisions", "tutorials")
        for path in (ROOT / "docs" / folder).glob("*.md")
    }
    assert pages <= set(assembly.places)
    assert len(set(assembly.places.values())) == len(assembly.places)


def test_every_page_is_in_a_table_of_contents(assembly: assemble.Assembly) -> None:
    listed = {"index.md"}
    for path, page in assembly.pages.items():
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.source, re.DOTALL | re.M):
            for line in tree.split("\n\n", 1)[1].splitlines():
                name = re.sub(r"^.*<(.*)>$", r"\1", line)
                listed.add(os.path.normpath(os.path.join(os.path.dirname(path), f"{name}.md")))
    assert listed == set(assembly.pages)


def test_links_of_the_twins_lead_to_twins_or_files(assembly: assemble.Assembly) -> None:
    """The same text is what Sphinx reads, apart from formulas, curves and results."""
    there = set(assembly.pages) | set(assembly.files)
    checked = 0
    for page in assembly.pages.values():
        text = re.sub(r"^(`{3,}).*?^\1$", "", page.plain, flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target = link.partition("#")[0]
            if target and not target.startswith("https://"):
                found_at = os.path.normpath(os.path.join(os.path.dirname(page.path), target))
                assert found_at in there, f"{page.path}: {link}"
                checked += 1
    assert checked > 500


def test_a_link_is_changed_to_where_its_target_stands() -> None:
    places = {"docs/kl.md": "guides/kl.md", "docs/presets/ppo.md": "losses/ppo.md"}
    text = (
        "[a](kl.md#x) ![b](figures/b.svg) [`c`](presets/ppo.md) [d](https://d.org) [e](#here) "
        "[lost](../src/)\n```\n[f](kl.md)\n```\n"
    )
    changed = assemble.relinked(
        text,
        "docs/a.md",
        "start/a.md",
        lambda path: places.get(path, "figures/b.svg") if path != "src" else None,
    )
    assert changed == (
        "[a](../guides/kl.md#x) ![b](../figures/b.svg) [`c`](../losses/ppo.md) [d](https://d.org) "
        "[e](#here) lost\n```\n[f](kl.md)\n```\n"
    )


def test_llms_txt_lists_every_page(assembly: assemble.Assembly) -> None:
    text = assembly.llms()
    assert text.startswith("# policyloss\n\n> The loss functions of LLM reinforcement learning")
    listed = set(re.findall(r"^- \[.+\]\((\S+\.md)\): ", text, re.MULTILINE))
    assert listed == set(assembly.pages) - {"index.md"}


def test_the_page_of_a_loss_shows_its_evidence(assembly: assemble.Assembly) -> None:
    page = assembly.pages["losses/dapo.md"].plain
    cells = page.split("## What it learned")[1].split("\n## ")[0].strip().split("\n")[-1].split("|")
    evidence = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    (row,) = [line for line in evidence.split("\n") if line.startswith("| [`dapo`]")]
    assert [cell.strip() for cell in row.split("|")[3:6]] == [c.strip() for c in cells[3:6]]


def test_every_loss_stands_in_a_family() -> None:
    assert loss_page.family("gkd") == loss_page.family("iw_opd") == "With a teacher"
    assert loss_page.family("icepop") == "For another engine or stale data"
    assert (loss_page.family("gspo"), loss_page.family("dapo")) == (
        "A ratio per sequence",
        "A ratio per token",
    )


# Formulas ---------------------------------------------------------------------------------------

SIGNS = {"·": "*", "−": "-", "≤": "<=", "≥": ">=", "≠": "!=", "=": "==", "∧": "&", "∨": "|"}


def linear(element: ET.Element) -> str:
    """MathML back to the text that `explain` prints; brackets as the eye sees them."""
    if "data-name" in element.attrib:
        return element.attrib["data-name"]
    if "data-number" in element.attrib:
        return element.attrib["data-number"]
    children = list(element)
    call = element.attrib.get("data-call")
    if call == "where":
        (yes, condition), (no, _) = (list(row) for row in children)
        holds = "".join(linear(child) for child in list(condition)[1:])
        return f"where({holds}, {linear(yes)}, {linear(no)})"
    if call == "exp":
        return f"exp({linear(children[1])})"
    if call is not None:
        arguments = [linear(child) for child in children if child.tag == "mrow"]
        if call == "sum" and not [child for child in children if child.text == "("]:
            arguments = ["".join(linear(child) for child in children[1:])]
        return f"{call}({', '.join(arguments)})"
    if element.tag == "mfrac":
        return f"(({linear(children[0])}) / ({linear(children[1])}))"
    if element.tag == "msup":
        return f"{linear(children[0])} ** ({linear(children[1])})"
    if element.tag == "mo":
        text = element.text or ""
        return "~" if text == "¬" else f" {SIGNS.get(text, text)} " if text not in "()" else text
    text = (element.text or "") + "".join(linear(child) for child in children)
    compares = any(child.tag == "mo" and (child.text or "") in "<>≤≥=≠" for child in children)
    return f"({text})" if compares else text


def typeset(text: str) -> str:
    return linear(ET.fromstring(f"<mrow>{mathml.expression(parse(text))}</mrow>")).strip()


@walked("name", pl.presets())
def test_a_typeset_formula_reads_back_as_the_printed_one(name: str) -> None:
    for line in pl.explain(name).formula.lines:
        assert parse(typeset(line.expression)) == line.tree, line


@pytest.mark.parametrize(
    "text",
    [
        "a - (b - c)",
        "-(a + b) * c",
        "(a + b) ** 2",
        "(-a) ** 2",
        "a * (b / c)",
        "(a | b) & ~(c & d)",
        "(a < b) & (c > 1e-08)",
        "sum(a + b) / (N * L)",
        "a * -b",
    ],
)
def test_brackets_are_typeset_where_they_are_needed(text: str) -> None:
    assert parse(typeset(text)) == parse(text)


def test_how_a_formula_is_typeset() -> None:
    assert mathml.expression(parse("exp(a) / 2")) == (
        '<mfrac><mrow><msup data-call="exp"><mi>e</mi><mrow><mrow data-name="a"><mi>a</mi></mrow>'
        "</mrow></msup></mrow><mrow><mn>2</mn></mrow></mfrac>"
    )
    assert "<mi>π</mi><mrow><mi>old</mi></mrow>" in mathml.expression(parse("old_logp"))
    ET.fromstring(mathml.formula(pl.explain("kl_cov").formula.lines))  # well-formed


# Curves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "push"),
    [
        ("ppo", 1.1, 1.0, -1.1, 1.1),  # inside the band: -A·r, whose slope in logp is itself
        ("ppo", 1.5, 1.0, -1.2, 0.0),  # held from above
        ("ppo", 0.5, -1.0, 0.8, 0.0),  # held from below
        ("ppo_dual_clip", 4.0, -1.0, 3.0, 0.0),  # the outer bound
        ("cispo", 6.0, 1.0, -5.0 * (math.log(6.0) - 2.0), 5.0),  # -sg[5]·logp
    ],
)
def test_a_curve_is_the_loss_of_one_token(
    name: str, ratio: float, advantage: float, loss: float, push: float
) -> None:
    assert curves.token_loss(pl.preset(name), ratio, advantage) == pytest.approx((loss, push))


def test_the_bounds_of_a_loss_are_inside_its_drawing() -> None:
    assert curves.shown_range([("trust.eps_low", 0.2), ("trust.dual", 3.0)]) == (0.02, 3.75)
    low, high = curves.shown_range([("trust.eps_low", 0.0003), ("trust.eps_high", 0.0004)])
    assert (low, high) == pytest.approx((1 - 0.0016, 1 + 0.0016))
    assert curves.shown_range([("trust.eps_low", math.inf), ("kl.coef", 5.0)]) == (0.02, 2.5)


def test_a_loss_page_shows_formula_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "POINTS", 5)
    page, figures = loss_page.loss_page("up_grpo", loss_page.plain_page("up_grpo"))
    assert page.index("<math") < page.index(":::{dropdown}") < page.index("figures/up_grpo.svg")
    assert '<a href="../explorer.html#loss=up_grpo">' in page
    assert "```{index} ! up grpo\n```" in page, "a search for it finds the page first"
    drawing = ET.fromstring(figures["losses/figures/up_grpo.svg"])
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 5, 5, 5]
    page, figures = loss_page.loss_page("gkd", loss_page.plain_page("gkd"))
    assert figures == {}
    assert "## Curves" not in page


# Reference --------------------------------------------------------------------------------------


def test_every_public_name_has_an_example() -> None:
    assert reference.without_example() == [], "write one in docs/examples"


def test_an_example_of_nothing_public_is_noticed() -> None:
    names = {entry.name for entry in reference.entries()}
    doubles = {"advantage.gae", "advantage.group_advantages", "advantage.whiten"}
    assert set(reference.examples()) - names - doubles == set()


def test_a_name_without_an_example_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "examples", lambda: {"Clip": "pl.TwoSidedClip(4.0)"})
    with pytest.raises(SystemExit, match=r"need an example in .*: Accumulation, .*, Clip,"):
        reference.reference_pages()


def example_cases() -> list[Any]:
    """Each session with its names; to import transformers takes seconds."""
    names: dict[str, list[str]] = {}
    for name, session in reference.examples().items():
        names.setdefault(session, []).append(name)
    return [
        pytest.param(
            session,
            id="+".join(of_session),
            marks=[pytest.mark.slow] if "transformers" in session else [],
        )
        for session, of_session in names.items()
    ]


@pytest.mark.parametrize("session", example_cases())
def test_an_example_prints_the_shown_output(session: str) -> None:
    torch.manual_seed(0)
    session = reference.batch().strip("`").removeprefix("pycon\n") + session + "\n"
    test = doctest.DocTestParser().get_doctest(session, {}, "example", None, 0)
    messages: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=messages.append)
    assert not messages, "".join(messages)
    assert runner.summarize(verbose=False).attempted > 6


def test_the_reference_has_the_drop_ins_too() -> None:
    plain, marked = reference.reference_pages()["compat_openrlhf.md"]
    assert "## compat.openrlhf.PolicyLoss\n\n```python\npl.compat.openrlhf.PolicyLoss(" in plain
    assert "::::{py:class} compat.openrlhf.PolicyLoss(" in marked


def test_every_page_of_the_reference_has_a_summary_of_its_own(
    assembly: assemble.Assembly,
) -> None:
    """It appears in the list of pages, in llms.txt and in a search."""
    pages = [page for path, page in assembly.pages.items() if path.startswith("reference/")]
    sentences = [page.first_sentence for page in pages]
    assert len(set(sentences)) == len(sentences) > 20
    assert [text for text in sentences if len(text) < 20 or text[-1] != "."] == []


def test_a_page_of_the_reference_begins_with_its_main_function() -> None:
    pages = reference.reference_pages()
    wrong = {}
    for topic in reference.TOPICS:
        plain, marked = pages[f"{topic.address}.md"]
        names = re.findall(r"^## (.+)$", plain, re.MULTILINE)
        if topic.first and names[0] != topic.first:
            wrong[topic.address] = names[0]
        shown = [name.removeprefix("lab.") for name in names]
        assert re.findall(r"^::::\{py:\w+\} ([\w.]+)", marked, re.MULTILINE) == shown
    assert wrong == {}
    assert re.findall(r"^## (.+)$", pages["loss.md"][0], re.MULTILINE)[0] == "policy_loss"
    listed = re.findall(r"^## (.+)$", pages["report.md"][0], re.MULTILINE)
    assert listed[0] == "lab.Recorder"
    assert set(listed) >= {"lab.report.show", "lab.report.write_report"}


def test_every_argument_in_the_reference_has_its_type() -> None:
    untyped = []
    for entry in reference.entries():
        for thing in (entry.value, *(member for _, member in reference.members(entry.value))):
            if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
                continue
            shown = reference.signature(thing)
            for name, parameter in inspect.signature(thing).parameters.items():
                typed = parameter.annotation is not inspect.Parameter.empty
                if typed and name != "self" and f"{name}: " not in shown:
                    untyped.append(f"{entry.name}: {name}")
    assert untyped == []
    shown = reference.signature(pl.policy_loss)
    assert "logp: Tensor, " in shown
    assert ", rollout_logp: Tensor | None = None, " in shown
    assert shown.endswith(") -> LossOutput")


def test_the_first_loss_prints_the_output_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger compares both, letter by letter."""
    page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (first, program), (second, printed) = blocks[:2]
    assert (first, second) == ("python", "text")
    exec(program, {})
    assert capsys.readouterr().out == printed


def test_docstrings_survive_markdown() -> None:
    def described() -> None:
        """Multiply `a*b` by *c*, of shape [B, T] where 1 < 2.

        indented:

            x * y
        """

    assert reference.prose(described) == (
        "Multiply `a*b` by \\*c\\*, of shape \\[B, T\\] where 1 \\< 2.\n\nindented:\n\n    x * y"
    )


# The built site ---------------------------------------------------------------------------------


def test_the_check_of_the_built_site_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/b.html#there">1</a><a href="a/b.html#gone">2</a><a href="nowhere.html">3</a>'
        '<script src="https://cdn.org/x.js"></script><a href="https://arxiv.org">4</a>'
    )
    (tmp_path / "a/b.html").write_text('<h2 id="there">b</h2><img src="//cdn.org/y.png">')
    (tmp_path / "a/b.md").write_text("# b")
    (tmp_path / "x.css").write_text("@import 'https://fonts.org/z.css'; a { b: url(local.png) }")

    def search(site: Path, queries: Sequence[str]) -> dict[str, list[str]]:
        pages = {query: [check.WORDS.get(query, "guides/commands")] for query in queries}
        late = ["guides/a", "guides/b", "guides/c", "losses/tis"]
        history = ["project/changelog", "guides/commands"]
        return {**pages, "TIS": late, "export": history, "--lr": ["guides/train"]}

    monkeypatch.setattr(check, "search", search)
    monkeypatch.setattr(check, "CHROMIUM", "a browser")
    assert check.problems(tmp_path) == [
        "a/b.html: loads //cdn.org/y.png",
        "index.html: loads https://cdn.org/x.js",
        "index.html: a/b.html#gone names a heading that does not exist",
        "index.html: the link nowhere.html leads nowhere",
        "index.html: has no Markdown twin",
        "x.css: loads https://fonts.org/z.css",
        "a search for 'TIS' does not show losses/tis among the first 3",
        "a search for 'export' shows project/changelog before guides",
        "a search for '--lr' does not find the option",
    ]


@needs_browser
def test_a_search_shows_guides_first_and_history_last(tmp_path: Path) -> None:
    """With the scorer of the site. By itself, Sphinx sorts these pages by their titles, and counts
    one word of several in a heading like all of them.
    """
    texts = {
        "decisions/a": "# A decision\n\nThe rate of learning.",
        "project/changelog": "# A changelog\n\nThe rate of learning.",
        "losses/b": "# Rate\n\nOf learning.",
        "guides/z": "# Z\n\nThe learning rate.",
        "index": "# Index\n\n```{toctree}\n:glob:\n:hidden:\n\n*/*\n```",
    }
    for name, text in texts.items():
        path = tmp_path / "source" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    scorer = Path(check.__file__).with_name("scorer.js")
    conf = f"extensions = ['myst_parser']\nhtml_search_scorer = {str(scorer)!r}\n"
    (tmp_path / "source/conf.py").write_text(conf)
    folders = [str(tmp_path / name) for name in ("source", "site")]
    assert build_main(["-b", "html", "-q", "-E", *folders]) == 0
    found = check.search(tmp_path / "site", ["learning rate", "rate"])
    assert found["learning rate"] == ["guides/z", "losses/b", "decisions/a", "project/changelog"]
    assert found["rate"] == ["losses/b", "guides/z", "decisions/a", "project/changelog"]


def test_the_page_of_commands_has_every_argument(assembly: assemble.Assembly) -> None:
    page = assembly.pages["guides/commands.md"]
    assert re.findall(r"^## (.+)$", page.plain, re.MULTILINE) == list(all_commands())
    marked = [block.partition("\n")[0] for block in page.source.split(":::{option} ")[1:]]
    assert len(marked) == sum(len(command.arguments) for command in all_commands().values())
    assert "--lr NUMBER" in marked
    for command in all_commands().values():
        for argument in command.arguments:
            for text in (page.plain, page.source):
                assert argument.meaning in re.sub(r"[`\\]", "", text), argument.name
    assert "--" not in re.sub(r"`[^`\n]*`|<!--.*-->|\| ---.*|```.*?```", "", page.plain), "a dash"


def test_the_sections_of_the_site() -> None:
    titles = [section.title for section in SECTIONS]
    assert titles == ["Start", "Guides", "Losses", "Reference", "Decisions", "Project"]
