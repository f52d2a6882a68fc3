"""The page and the form of "Which loss should I use?" show the results of `choose`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs import choose_page
from policyloss.choose import all_choices

CHOICES = all_choices()


def test_the_form_holds_every_choice() -> None:
    text = re.findall(r'id="choose-data">(.*)</script>', choose_page.form())[0]
    assert "<" not in text, "it would end the script"
    data = json.loads(text)
    assert len(data["choices"]) == len(CHOICES)
    for choice in CHOICES:
        entry = data["choices"][" ".join(choice.answers.values())]
        assert entry["code"] == choice.code
        assert [data["reasons"][i] for i in entry["reasons"]] == [list(r) for r in choice.reasons]
        assert data["frameworks"][choice.code] == choice.elsewhere()
    assert "TRL" in data["frameworks"]['pl.preset("gspo")']


def test_the_page_shows_the_choice() -> None:
    page = Path(choose_page.__file__).with_name("choose.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("\n") if line.startswith("| a mixture of experts")]
    assert len(rows) == 6
    assert rows[0].endswith(
        '`pl.preset("gspo").replace(correction=pl.Band(low=0.5, high=5))` '
        "([`gspo`](presets/gspo.md)) |"
    )
