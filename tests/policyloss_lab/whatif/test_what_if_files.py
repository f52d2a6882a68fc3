"""Stored tokens are read from runs and files, whatever is in them; the page is complete, offline
and inert; the command reports its work.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import realistic_run, rollout, write_lines, write_run
from torch import Tensor

import policyloss as pl
import policyloss_lab as lab
from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_lab.whatif.page import SHOWN_TOKENS, page, page_data
from policyloss_lab.whatif.tokens import read, tokens_of

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "\"'><img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\u202egnp.exe\u202c zero\u200bwidth nul\x00 escape\x1b[31m",
    "lone \ud800 surrogate",
    "`${document.title='owned'}` \\u003c",
)


def row(n: int, *, group: int = 0, reward: float = 1.0, **changes: Any) -> dict[str, Any]:
    numbers = [-0.5 - 0.1 * i for i in range(n)]
    return {
        "logp": numbers,
        "old_logp": [x - 0.05 for x in numbers],
        "rollout_logp": [x - 0.1 for x in numbers],
        "token_advantage": 1.0 if reward else -1.0,
        "reward": reward,
        "group": group,
        **changes,
    }


def file_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / "tokens.jsonl"
    write_lines(path, rows)
    return path


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, body = {}, b""
    for name, x in tensors.items():
        data = x.contiguous().numpy().tobytes()
        kind = {torch.float32: "F32", torch.bool: "BOOL", torch.int64: "I64"}[x.dtype]
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_a_run_gives_its_last_step_and_its_own_loss(tmp_path: Path) -> None:
    run = realistic_run(tmp_path / "run", steps=40, loss="gspo")
    tokens = read(run)
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    last = [r for r in rows if r["step"] == 20]
    assert tokens.lengths.tolist() == [len(r["tokens"]) for r in last]
    assert tokens.inputs.logp.tolist() == [x for r in last for x in r["logp"]]
    assert tokens.rewards is not None
    assert tokens.rewards.tolist() == [r["reward"] for r in last]
    result = lab.what_if(run, ["gspo", "ppo"])
    assert torch.equal(result["yours"].gradient, result["gspo"].gradient)
    assert "step 20, one of 2 stored steps" in result.notes[0]
    assert len(lab.what_if(run, ["ppo"], step="all").tokens.lengths) == 16
    assert lab.what_if(run, ["ppo"], step=0).tokens.inputs.logp.tolist() == [
        x for r in rows if r["step"] == 0 for x in r["logp"]
    ]
    with pytest.raises(InputError, match=r"step=7 is not stored; there are 0, 20, or step='all'"):
        read(run, 7)


def test_steps_with_zero_advantages_are_skipped(tmp_path: Path) -> None:
    """They have no gradient to look at, whether the file holds advantages, rewards or a mask."""
    by_rewards = [
        {name: x for name, x in row(2, reward=r, step=step).items() if name != "token_advantage"}
        for step, rewards in ((1, (1.0, 0.0)), (2, (1.0, 0.0)), (3, (1.0, 1.0)))
        for r in rewards
    ]
    by_mask = [
        row(2, step=step, token_advantage=[float(step < 3), 1.0], mask=[1, 0]) for step in (2, 3)
    ]
    by_advantage = [row(2, step=step, token_advantage=float(step < 3)) for step in (1, 2, 3, 4)]
    for name, rows in {"rewards": by_rewards, "mask": by_mask, "advantage": by_advantage}.items():
        steps = {r["step"] for r in rows}
        result = lab.what_if(file_of(tmp_path, rows), ["ppo"], spec="dapo")
        assert result.tokens.inputs.advantages.any(), name
        assert result.notes[0] == (
            f"These are the tokens of step 2, one of {len(steps)} stored steps; in the later ones "
            "every advantage is 0."
        ), name
        assert not result.remedies, name
        zeros = read(file_of(tmp_path, rows), max(steps))
        assert not zeros.inputs.advantages.any(), name
        assert zeros.notes[0].endswith(f"of step {max(steps)}, one of {len(steps)} stored steps.")


def test_zero_advantages_are_the_verdict(tmp_path: Path) -> None:
    rows = [row(2, step=step, token_advantage=0.0) for step in (1, 2)]
    result = lab.what_if(file_of(tmp_path, rows), ["ppo"], spec="dapo")
    assert "step 2, one of 2 stored steps." in result.notes[0]
    (remedy,) = result.remedies
    assert remedy.problem.name == "advantages"
    assert "- Every advantage is 0" in str(result)
    assert "Nothing is wrong" not in page(result, "run")
    taught = lab.what_if(
        file_of(tmp_path, [{**r, "teacher_logp": r["logp"]} for r in rows]), [], spec="opd_kl"
    )
    assert not taught.remedies  # a teacher moves it, and no advantage


def test_a_recorded_loop_is_a_run(tmp_path: Path) -> None:
    """Two completions of two tokens and of one, as any training loop records them."""
    logp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    with lab.Recorder(tmp_path / "run", spec="cispo") as recorder:
        recorder.completions(
            1,
            prompts=["p", "p"],
            texts=["ab", "c"],
            ids=torch.tensor([[1, 2], [3, 0]]),
            mask=mask,
            rewards=[1.0, 0.0],
            advantages=torch.tensor([1.0, -1.0]),
            logp=logp,
            old_logp=logp - 0.5,
        )
    result = lab.what_if(tmp_path / "run", ["cispo"])
    tokens = {"logp": logp.double(), "old_logp": logp.double() - 0.5, "mask": mask}
    padded = lab.what_if({**tokens, "advantages": torch.tensor([1.0, -1.0])}, ["cispo"])
    assert torch.equal(result["yours"].gradient, padded["cispo"].gradient[:3])


def test_names_of_other_trainers_are_understood(tmp_path: Path) -> None:
    """verl's names, advantages one per completion, the prompt in the place of a group."""
    rows = [
        {
            "old_log_probs": [-1.0, -2.0],
            "log_probs": [-1.1, -1.9],
            "rollout_log_probs": [-1.0, -2.0],
            "ref_log_prob": [-1.0, -2.1],
            "response_mask": [1, 0],
            "advantage": 0.5,
            "score": 1.0,
            "prompt": name,
        }
        for name in ("a", "b", "a")
    ]
    tokens = read(file_of(tmp_path, rows))
    assert tokens.inputs.mask.tolist() == [True, False] * 3
    assert tokens.inputs.advantages.tolist() == [0.5, 0] * 3
    assert tokens.inputs.group_ids is not None
    assert tokens.inputs.group_ids.tolist() == [0, 1, 0]
    assert tokens.inputs.ref_logp is not None
    assert tokens.inputs.ref_logp[0] == -1.0
    assert tokens.notes == ()


def test_missing_tensors_are_replaced_with_a_note(tmp_path: Path) -> None:
    """Rewards 1 and 0 of one prompt: GRPO's advantages are ±0.5/(std + 1e-6), std over n - 1."""
    rows = [row(2, reward=r) for r in (1.0, 0.0)]
    for r in rows:
        del r["logp"], r["token_advantage"]
    tokens = read(file_of(tmp_path, rows))
    expected = pl.advantage.grpo(torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 0]))
    counts = tokens.sums(tokens.inputs.mask.double())
    advantages = tokens.sums(tokens.inputs.advantages) / counts
    assert advantages.tolist() == pytest.approx(expected.tolist())
    assert torch.equal(tokens.inputs.logp, tokens.inputs.old_logp)
    assert len(tokens.notes) == 2
    for r in rows:
        del r["group"]
    with pytest.raises(InputError, match="without a group or a prompt"):
        read(file_of(tmp_path, rows))


def test_a_completion_with_a_hole_is_left_out(tmp_path: Path) -> None:
    holes = [
        row(3, logp=[-1.0, None, -1.0], old_logp=[math.nan] * 3),
        row(3, token_advantage=None),
        row(3, logp=[-1.0, "x", -1.0], old_logp=None),
    ]
    tokens = read(file_of(tmp_path, [row(2), *holes, row(4)]))
    assert tokens.lengths.tolist() == [2, 4]
    assert tokens.notes == ("3 completions lack numbers and were left out.",)
    ends = read(file_of(tmp_path, [row(2, logp=[-1.0, None], mask=[1, 0])]))
    assert ends.inputs.logp.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"tokens": ["a"]}], "no completion has a logp"),
        ([row(3, old_logp=[-1.0])], "completion 1 has lists of different lengths: .*'logp': 3"),
        ([row(2, mask=[1, 0, 1])], "lists of different lengths"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read(file_of(tmp_path, rows))


def test_only_known_files_are_read(tmp_path: Path) -> None:
    pickle = tmp_path / "tokens.pt"
    pickle.write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="neither a run directory nor"):
        read(pickle)
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="stored no completions"):
        read(write_run(tmp_path / "empty", [{"step": 0}]))
    link = tmp_path / "linked"
    write_run(link, [{"step": 0}])
    (link / "rollouts.jsonl").symlink_to(file_of(tmp_path, [row(2)]))
    with pytest.raises(InputError, match="symbolic link"):
        read(link)


def test_tensors_of_a_file_are_the_arguments(tmp_path: Path) -> None:
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]])
    path = tmp_path / "tokens.safetensors"
    tensors = {"logp": logp, "old_logp": logp - 0.3, "advantages": torch.tensor([1.0, -1.0])}
    write_safetensors(path, {**tensors, "ids": torch.ones(2, 5, dtype=torch.int64)})
    mask = torch.ones(2, 2, dtype=torch.bool)
    a, b = lab.what_if(path, ["dapo"]), lab.what_if({**tensors, "mask": mask}, ["dapo"])
    assert torch.equal(a["dapo"].gradient, b["dapo"].gradient)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile values in every text and in half of its numbers."""
    texts = "".join(HOSTILE)
    rows = [rollout(2, HOSTILE, prompt=texts, answer=texts, completion=texts) for _ in range(2)]
    rows.append({**rows[0], "logp": "x", "old_logp": {"a": 1}})
    rows.append({**rows[0], "group": {"a": [1]}, "token_advantage": [1e308] * len(HOSTILE)})
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=document.title=1>"
    run = write_run(folder, [{"step": 0}], config={"max_new_tokens": "</script>"}, rollouts=rows)
    broken = json.loads((run / "config.json").read_text())
    broken["loss"]["trust"] = {"type": HOSTILE[0]}
    (run / "config.json").write_text(json.dumps(broken))
    return run


def test_a_hostile_run_is_read_as_data(hostile: Path) -> None:
    result = lab.what_if(hostile)
    assert result.tokens.lengths.tolist() == [len(HOSTILE)] * 2
    assert any("cannot be read" in note for note in result.notes)
    html = page(result, hostile.name)
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    for invisible in ("\u202e", "\u200b", "\x00", "\x1b", "\ud800"):
        assert invisible not in html
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)[0])
    shown = "".join(data["sequences"][0]["texts"]) + data["sequences"][0]["prompt"]
    assert "\\u202egnp.exe" in shown
    assert not {"\u202e", "\u200b", "\x00", "\x1b", "\ud800"} & set(shown)


def test_the_page_forbids_every_request_and_every_other_script(hostile: Path) -> None:
    html = page(lab.what_if(hostile, ["ppo"]), "x")
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)[0]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"http-equiv|www\.w3\.org", "", html).split("<body>")[0]


def test_the_page_stays_small() -> None:
    rows = [row(SHOWN_TOKENS // 2 - 1), row(10), row(SHOWN_TOKENS), row(5)]
    data = page_data(lab.what_if(tokens_of(rows), ["ppo"], step="all"))
    assert [len(s["texts"]) for s in data["sequences"]] == [SHOWN_TOKENS // 2 - 1, 10]
    assert data["left_out"] == 2
    assert len(data["losses"][0]["change"]) == 2


def test_the_command_writes_a_page_and_prints_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = file_of(tmp_path, [row(3), row(4, reward=0.0)]), tmp_path / "page.html"
    assert main(["what-if", str(path), "--presets", "ppo", "gspo", "--loss", "dapo"]) == 0
    text = capsys.readouterr().out
    assert text == str(lab.what_if(path, ["ppo", "gspo"], spec="dapo")) + "\n"
    assert main(["what-if", str(path), "--out", str(out)]) == 0
    assert f"{out}: open it in a browser." in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert main(["what-if", str(path), "--json", "--presets", "ppo"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"][0]["name"] == "ppo"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--presets", "pppo"], "unknown preset 'pppo'; did you mean 'ppo'?"),
        (["--step", "x"], "--step takes a whole number or all, got 'x'"),
        (["--out", "{folder}"], "is a folder; give the name of a regular file"),
        (["--loss", "none.json"], "cannot read none.json"),
    ],
)
def test_a_wrong_option_is_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    path = file_of(tmp_path, [row(3)])
    assert main(["what-if", str(path), *(o.format(folder=tmp_path) for o in options)]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_compared_by_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = realistic_run(tmp_path / "run", steps=21)
    assert main(["what-if", str(run), "--presets", "ppo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["through"] == "tokens"
    assert (
        "Losses are compared without the model of the run: it has no checkpoint." in data["notes"]
    )


def opened(browser: Any, path: Path, html: str) -> tuple[Any, list[str]]:
    """The page in a browser, with its errors and requests."""
    path.write_text(html, encoding="utf-8")
    tab, events = browser.new_page(viewport={"width": 1200, "height": 900}), []
    tab.on("console", lambda message: events.append(message.text))
    tab.on("pageerror", lambda error: events.append(str(error)))
    tab.on("request", lambda r: events.append(r.url) if not r.url.startswith("file:") else None)
    tab.goto(path.as_uri())
    return tab, events


def test_a_reader_compares_losses_in_a_browser(browser: Any, tmp_path: Path) -> None:
    """PPO clips the second of two tokens (ratio 1.5), REINFORCE does not; a step of length 1 raises
    the sequence by 1 under PPO, all at its first token, and by √2 under REINFORCE.
    """
    ratios = torch.tensor([1.0, 1.5], dtype=torch.float64).log()
    rows = [
        row(2, old_logp=[-1.0, -1.0], logp=(ratios - 1).tolist(), tokens=[" one", "two"]),
        row(3, token_advantage=0.0, tokens=["a", "b", "c"]),
    ]
    result = lab.what_if(tokens_of(rows), ["reinforce"], spec="ppo")
    tab, events = opened(browser, tmp_path / "page.html", page(result, "tokens"))
    for place, name in enumerate(("yours", "reinforce")):
        tab.select_option(f"#loss{place}", label=name)
    first = tab.locator("#sequences tbody tr").first
    assert first.locator("td").all_inner_texts()[:3] == ["1", "1", "2"]
    assert first.locator(".bar span").all_inner_texts()[:2] == ["+1", "+1.41"]
    lines = tab.locator(".line-of-tokens")
    assert lines.first.locator(".token").all_inner_texts() == ["·one", "two"]
    assert lines.nth(0).locator(".clipped").all_inner_texts() == ["two"]
    assert lines.nth(1).locator(".clipped").count() == 0
    lines.first.focus()
    tab.keyboard.press("ArrowRight")
    values = tab.locator("#token-values").inner_text()
    assert "push 0, at the upper bound" in values
    assert "1.5" in values
    tab.locator("#sequences button").nth(1).click()
    assert lines.first.locator(".token").all_inner_texts() == ["a", "b", "c"]
    tab.locator("#cosines").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#cosine-value").inner_text() == "yours and reinforce: 0.707"
    tab.locator(".side thead button").nth(1).click()
    order = tab.locator(".side tbody th").all_inner_texts()
    assert order == ["reinforce", "yours"]
    assert events == []
    tab.close()


def test_nothing_hostile_comes_alive_in_a_browser(
    browser: Any, tmp_path: Path, hostile: Path
) -> None:
    html = page(lab.what_if(hostile), hostile.name)
    tab, events = opened(browser, tmp_path / "page.html", html)
    assert "owned" not in tab.title()
    assert tab.locator(".line-of-tokens").first.locator(".token").count() == len(HOSTILE)
    assert HOSTILE[1] in tab.locator(".line-of-tokens").first.inner_text()
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert events == []
    tab.close()
