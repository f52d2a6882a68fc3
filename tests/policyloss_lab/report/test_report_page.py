"""The page of a report: its drawing, that it needs no network, and that hostile data is inert."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, needs_browser
from report_runs import realistic_run, rollout, write_run

from policyloss_lab.completions import BRANCHES
from policyloss_lab.report import collect, render, write_report
from policyloss_lab.report.markup import duration, escape, island, number
from policyloss_lab.report.panels import PANELS, panels_for
from policyloss_lab.report.view import view

HOSTILE = [
    "<script>document.title='owned'</script>",
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "\"'><img src=x onerror=\"document.title='owned'\">",
    "<svg/onload=document.title='owned'>",
    "]]>&lt;b&gt;&#60;b&#62;",
    "nul\x00 bell\x07 escape\x1b[31m delete\x7f",
    "\u202egnp.exe\u202c \u2066isolate\u2069 zero\u200bwidth",
    "שלום עולם — مرحبا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é 汉字",
    "lone \ud800 surrogate \udc00",
    "line\u2028separator\u2029\r\n\ttab",
    "`${document.title='owned'}`",
]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        realistic_run(folder / "first", steps=40),
        realistic_run(folder / "second", steps=40, loss="gspo", seed=1, critic=True),
    ]


@pytest.fixture(scope="module")
def hostile_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs in which every text that a report shows is one of HOSTILE."""
    folder = tmp_path_factory.mktemp("hostile")
    made = []
    for k, name in enumerate(["<img src=x onerror=document.title=1>", "\"'><b>&amp;"]):
        metrics = [
            {
                "step": s,
                "reward/mean": float(s),
                "eval/accuracy": 0.5,
                **{text: float(s) for text in HOSTILE},
            }
            for s in range(3)
        ]
        texts = "".join(HOSTILE)
        named = {"prompt": texts, "answer": texts, "completion": texts, "finish_reason": texts}
        rows = [
            {**rollout(2, HOSTILE, **named), "branch": HOSTILE, "example": texts, "group": texts}
        ]
        settings = {
            "model": HOSTILE[0],
            "task": HOSTILE[3],
            "loss": HOSTILE[1],
            **{text: f"{text}{k}" for text in HOSTILE},
        }
        run = write_run(folder / name, metrics, config=settings, rollouts=rows)
        (run / "environment.json").write_text(json.dumps({text: [text, k] for text in HOSTILE}))
        made.append(run)
    broken = json.loads((made[1] / "config.json").read_text())
    (made[1] / "config.json").write_text(json.dumps({**broken, "loss": {HOSTILE[1]: HOSTILE[0]}}))
    return made


class Tags(HTMLParser):
    """The page as a browser sees it: the number of each element, and every attribute."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]


def strip_policy(page: str) -> str:
    """The page without its own protection, so that a test of the escaping does not pass by it."""
    bare, n = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert n == 1
    return bare


def browser(page: Path, address: str = "", width: int = 1280) -> tuple[str, list[str]]:
    """The document in Chromium after the page's script ran, and its console output."""
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-sync"
    )
    more = (
        "--disable-component-update --enable-logging=stderr --v=0 --virtual-time-budget=1500 "
        f"--window-size={width},1000"
    )
    data = f"--user-data-dir={page.parent / 'profile'}"
    command = [
        CHROMIUM,
        *flags.split(),
        *more.split(),
        data,
        "--dump-dom",
        f"{page.as_uri()}{address}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_metric_is_in_exactly_one_chart(two_runs: list[Path]) -> None:
    shown = view(collect(two_runs))
    keys = [key for panel in shown["panels"] for key in panel["keys"]]
    assert sorted(keys) == sorted({key for run in shown["runs"] for key in run["series"]})
    by_id = {panel["id"]: panel["keys"] for panel in shown["panels"]}
    assert by_id["accuracy"] == ["eval/accuracy", "accuracy"]
    assert by_id["clip"] == [
        f"policy/clip_fraction{kind}" for kind in ("", "_upper", "_lower", "_dual")
    ]
    assert by_id["seconds"] == ["timing/step_s", "timing/sample_s"]
    assert [panel["title"] for panel in panels_for(["odd"])] == ["odd"]


def test_the_colour_scales_hold_98_percent_of_the_tokens(tmp_path: Path) -> None:
    row = rollout(0, ["x"] * 101)
    row |= {
        "ratio": [math.exp(i / 100) for i in range(101)],
        "token_advantage": [-float(i) for i in range(101)],
    }
    row |= {"logp": [0.0] * 101, "rollout_logp": [0.0] * 101}
    row |= {"old_logp": [0.0] * 101, "entropy": [i / 10 for i in range(101)]}
    row |= {"ref_logp": [-i / 50 for i in range(101)]}
    scales = view(collect([write_run(tmp_path / "run", [], rollouts=[row])]))["scales"]
    # The differences to the sampler are all 0, which gets no colour; there is no teacher.
    assert scales == {
        "ratio": 0.98,
        "advantage": 98.0,
        "entropy": 9.8,
        "surprise": 0.1,
        "mismatch": 0.01,
        "ref": 1.96,
    }


def test_the_clip_band_is_shown_where_the_ratio_is_that_of_tokens(two_runs: list[Path]) -> None:
    # DAPO; GSPO's is of sequences.
    assert [run["band"] for run in view(collect(two_runs))["runs"]] == [
        [0.8, 1.28],
        None,
    ]


def test_words_for_numbers() -> None:
    assert [number(x) for x in (None, 0, 1234567, 0.12345, 1234.5, 1e-7)] == [
        "–",
        "0",
        "1,234,567",
        "0.123",
        "1,234",
        "1e-07",
    ]
    assert [duration(x) for x in (None, 1.234, 59.7, 185, 7620)] == [
        "–",
        "1.23 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 07 min",
    ]


def test_every_chart_describes_good_and_bad_values(two_runs: list[Path]) -> None:
    page = render(collect(two_runs))
    for panel in PANELS:
        assert panel.hint.endswith("."), panel.id
        if panel.id == "loss":
            assert panel.judge.startswith("Do not judge"), panel.id
            continue
        good, bad = re.fullmatch(r"Good: (.+)\. Bad: (.+)\.", panel.judge).groups()  # type: ignore
        drawn = f"<b>Good:</b> {escape(good)}. <b>Bad:</b> {escape(bad)}."
        assert (drawn in page) == (f"<h3>{panel.title}</h3>" in page), panel.id


def test_the_page_asks_the_network_for_nothing(two_runs: list[Path]) -> None:
    page = render(collect(two_runs))
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)
    tags = Tags(page)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(tags.count)
    assert not [
        a
        for a in tags.attributes
        if a[1] in ("src", "href", "srcset", "action", "style") or a[1].startswith("on")
    ]
    assert "default-src 'none'" in next(
        value or "" for tag, name, value in tags.attributes if (tag, name) == ("meta", "content")
    )


def test_hostile_texts_add_no_element_and_no_attribute(hostile_runs: list[Path]) -> None:
    page = render(collect(hostile_runs))
    page.encode("utf-8")  # lone surrogates would fail here
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)
    tags = Tags(page)
    assert tags.count["script"] == 2
    assert tags.count["style"] == tags.count["title"] == tags.count["meta"] - 2 == 1
    assert not {"img", "b/", "iframe", "link"} & set(tags.count)
    names = {name for _, name, _ in tags.attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "style")}
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert inside is not None
    assert not re.search("[<>&\u2028\u2029]", inside[1])
    (group,) = json.loads(inside[1])["runs"][0]["rollouts"]
    assert group["rows"][0]["tokens"] == HOSTILE
    assert group["rows"][0]["finish_reason"] == "".join(HOSTILE)[:200] + "…"


def test_escaping() -> None:
    assert (
        escape('<a href="x">\'&\x00\u202e\ud800\t\n')
        == "&lt;a href=&quot;x&quot;&gt;&#x27;&amp;\\u0000\\u202e\\ud800\t\n"
    )
    assert (
        island({"</script>": "<!--&\u2028"})
        == '{"\\u003c/script\\u003e":"\\u003c!--\\u0026\\u2028"}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        island(math.nan)


def element(dom: str, name: str) -> str:
    """The text of the element with this id, tags removed."""
    found = re.search(rf'<(\w+)[^>]*\bid="{name}"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    assert found is not None, name
    return re.sub("<[^>]*>", "|", found[2])


def six_digits(x: float) -> str:
    """As the page writes it."""
    return f"{float(f'{x:.6g}'):.6g}"


@needs_browser
def test_a_link_opens_its_view_in_a_browser(two_runs: list[Path], tmp_path: Path) -> None:
    """The real page, with its policy on: it draws everything, prints nothing to the console, and
    shows the view in the address.
    """
    page = tmp_path / "report.html"
    data = write_report(two_runs, page)
    dom, said = browser(
        page, "#run=1&step=20&group=1&sample=1&token=2&color=advantage&theme=dark&smooth=0.5"
    )
    assert said == []
    row = [r for r in data["runs"][1]["rollouts"] if (r["step"], r["group"]) == (20, 1)][1]
    values = [part for part in element(dom, "token-values").split("|") if part]
    assert dict(zip(values[::2], values[1::2], strict=True)) == {
        "token": json.dumps(row["tokens"][2]),
        "id": "2",
        "position": f"3 of {len(row['tokens'])}",
        "branch": BRANCHES[row["branch"][2]][0],
        "policy gradient": "none"
        if row["clipped"][2]
        else "up"
        if row["token_advantage"][2] > 0
        else "down",
        **{
            name: six_digits(row[name][2]) for name in ("ratio", "logp", "old_logp", "rollout_logp")
        },
        "advantage": six_digits(row["token_advantage"][2]),
        "old_logp − rollout_logp": six_digits(
            float(six_digits(row["old_logp"][2])) - float(six_digits(row["rollout_logp"][2]))
        ),
    }
    assert f"<b>reward {row['reward']:.0f}</b>" in dom
    assert element(dom, "group-facts").endswith(" · sampled by vllm with the weights of step 19")
    strength = 100 * abs(row["token_advantage"][2]) / view(data)["scales"]["advantage"]
    sign = "plus" if row["token_advantage"][2] > 0 else "minus"
    assert f"var(--{sign}) {min(100, strength):.0f}%" in dom
    # The ratios of both runs.
    assert dom.count('<image href="data:image/png') == dom.count('<path class="area') == 2
    assert 'data-theme="dark"' in dom
    assert element(dom, "smoothness") == "0.50"
    assert element(dom, "histogram-step") == "20"
    # The other completion of the group is not on the screen.
    assert dom.count('role="option"') == len(row["tokens"])
    figures = re.findall(r'<figure class="chart" data-panel="\d+".*?</figure>', dom, re.DOTALL)
    lines = [figure.count('<path class="line') for figure in figures]
    assert len(figures) == len(view(data)["panels"])
    assert lines[0] == 6  # accuracy: two runs × (held-out, and the samples' raw and smoothed)


# Uses the page as a person would, and stores its observations in an element, as base64 of JSON.
DRIVER = """
const seen = {}, text = (id) => document.getElementById(id).textContent;
const hash = () => new URLSearchParams(location.hash.slice(1));
const boxes = () => document.querySelectorAll(".tokens .token");
const first = (inside) => document.querySelector(`figure[data-panel="0"] ${inside}`);
const colour = document.getElementById("color");
const point = (node, type, at = {}) =>
  node.dispatchEvent(new PointerEvent(type, {bubbles: true, ...at}));
const press = (key) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
seen.tokens = [...boxes()].map((box) => box.textContent);
point(boxes()[4], "pointerover"); seen.hovered = text("token-values");
boxes()[0].focus(); press("ArrowRight"); seen.right = document.activeElement.dataset.i;
press("End"); seen.end = document.activeElement.dataset.i; seen.token = hash().get("token");
first("> svg").scrollIntoView();  // charts far from the screen are drawn later
const where = first("> svg").getBoundingClientRect();
point(first("> svg"), "pointermove", {clientX: where.right - 20, clientY: where.top + 50});
seen.tip = text("tip");
point(first("> svg"), "pointerleave"); seen.tipGone = document.getElementById("tip").hidden;
const smooth = document.getElementById("smooth");
const reward = document.querySelector('figure[data-panel="1"] > svg');
smooth.value = 0.5; smooth.dispatchEvent(new Event("input"));
point(reward, "pointermove", {clientX: reward.getBoundingClientRect().right - 20, clientY: 0});
seen.smoothed = text("tip");
const lines = () => document.querySelectorAll("figure[data-panel='0'] path.line").length;
seen.before = lines();
document.querySelector("#legend button").click(); seen.after = lines();
first(".log").click();
seen.log = [first(".log").ariaPressed, hash().get("log").split(",").includes("accuracy")];
colour.value = "clip"; colour.dispatchEvent(new Event("change")); seen.color = hash().get("color");
location.hash = "#step=<b>&run=-7&sample=1e9&color=constructor&smooth=NaN";
dispatchEvent(new Event("hashchange")); seen.nonsense = boxes().length;
seen.prompt = text("prompt"); seen.title = document.title;
seen.elements = document.querySelectorAll("img, main script, b b").length;
seen.fits = document.documentElement.scrollWidth <= innerWidth;
const bytes = new TextEncoder().encode(JSON.stringify(seen));
const out = document.createElement("output");
out.id = "seen"; out.textContent = btoa(String.fromCharCode(...bytes)); document.body.append(out);
"""


@needs_browser
def test_hostile_texts_and_every_control_in_a_browser(
    hostile_runs: list[Path], tmp_path: Path
) -> None:
    """Without the page's policy: only the escaping keeps the texts from running as a script. On a
    narrow screen.
    """
    page = tmp_path / "report.html"
    page.write_text(
        strip_policy(render(collect(hostile_runs))).replace(
            "</body>", f"<script>{DRIVER}</script></body>"
        )
    )
    dom, said = browser(page, width=500)
    assert said == []
    seen = json.loads(base64.b64decode(element(dom, "seen")))
    assert "owned" not in seen["title"].replace("document.title='owned'", "")
    assert seen["title"].endswith("training report")
    assert seen["elements"] == 0
    assert seen["tokens"][0] == HOSTILE[0]
    assert seen["tokens"][6] == "nul\\u0000 bell\\u0007 escape\\u001b[31m delete\\u007f"
    assert seen["tokens"][7] == "\\u202egnp.exe\\u202c \\u2066isolate\\u2069 zero\\u200bwidth"
    assert seen["tokens"][8] == HOSTILE[8]
    assert seen["tokens"][10] == "lone \\ud800 surrogate \\udc00"
    assert seen["prompt"].startswith(HOSTILE[0])
    assert json.dumps(HOSTILE[4]) in seen["hovered"]
    assert (seen["right"], seen["end"]) == ("1", str(len(HOSTILE) - 1))
    assert seen["token"] == str(len(HOSTILE) - 1)
    assert seen["tip"].startswith("step 2")
    assert seen["tipGone"] is True
    # Rewards 0, 1, 2 with weight 0.5: (0.5·2 + 0.25·1 + 0.125·0) / (0.5 + 0.25 + 0.125) = 1.25 /
    # 0.875
    assert seen["smoothed"].endswith("1.429")
    # Held-out accuracy of two runs; the first is switched off.
    assert (seen["before"], seen["after"]) == (
        2,
        1,
    )
    assert seen["log"] == ["true", True]
    assert seen["color"] == "clip"
    # An address that makes no sense shows the nearest thing that does.
    assert seen["nonsense"] == len(HOSTILE)
    assert seen["fits"] is True
