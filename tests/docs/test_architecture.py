"""The picture of the code is drawn from its imports; its walks are ways that real calls take."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from docs.architecture_figure import drawing, grid
from docs.architecture_imports import Box, boxes, direct_imports, layers, rounded
from docs.architecture_walks import loss_walk, walked

from docs import architecture_page
from policyloss.functional.aggregate import weighted_sum
from policyloss.loss import pipeline, policy_loss, token_losses

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def made_package(folder: Path, **modules: str) -> Path:
    """Packages of these modules, with one layer's worth of real names."""
    for name, text in modules.items():
        file = folder / f"{name.replace('__in__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


# Boxes and layers ---------------------------------------------------------------------------------


def test_imports_are_seen_in_every_form(tmp_path: Path) -> None:
    """At load, inside a function, by a string, through `pl.name`; what only a type checker reads is
    no import.
    """
    package = made_package(
        tmp_path,
        policyloss__in__errors='"""The errors. And more."""\n',
        policyloss__in__loss=(
            "from policyloss.errors import InputError\n"
            "if TYPE_CHECKING:\n"
            "    import policyloss.spec\n"
        ),
        policyloss__in__spec="def late():\n    import policyloss.errors\n",
        policyloss__in__cli='MODULE = "policyloss.loss"\nABOUT = "policyloss.spec is a module"\n',
        policyloss_lab__in__runs__in____init__="import policyloss as pl\n\npl.policy_loss\n",
        policyloss_lab__in__runs__in__files="import policyloss as pl\n\npl.nothing\n",
        policyloss_train__in__loop="from policyloss_lab import runs\n",
    )
    found = boxes(package)
    assert {name: sorted(box.imports) for name, box in found.items()} == {
        "cli": ["loss"],
        "errors": [],
        "loss": ["errors"],
        "runs": ["loss"],
        "spec": ["errors"],
        "trainer": ["runs"],
    }
    assert (found["runs"].files, found["runs"].lines, found["errors"].about) == (
        2,
        6,
        "The errors.",
    )


def a_box(name: str, *imports: str) -> Box:
    return Box(name, f"policyloss/{name}.py", "A box.", 1, 10, frozenset(imports))


def test_a_new_module_appears_in_the_lowest_layer_that_its_imports_allow() -> None:
    extended = {**boxes(), "novelty": a_box("novelty", "metrics", "errors")}
    (layer,) = [layer for layer in layers(extended) if "novelty" in layer.names]
    assert "metrics" in layer.names
    assert "novelty" in {text.text for text in ET.fromstring(drawing(extended)).iter(f"{SVG}text")}
    link = "[`policyloss/novelty.py`](../src/policyloss/novelty.py)"
    row = f"| {link} | A box. | 10 lines | errors, metrics |"
    assert row in architecture_page.rooms_table(extended)


def test_an_import_that_points_up_is_an_error() -> None:
    spoiled = {**boxes(), "errors": replace(boxes()["errors"], imports=frozenset({"loss"}))}
    with pytest.raises(LookupError, match=r"errors imports loss, which is in a higher layer"):
        layers(spoiled)


def test_a_layer_that_names_a_module_that_is_gone_is_an_error() -> None:
    rest = {name: box for name, box in boxes().items() if name != "cli"}
    with pytest.raises(LookupError, match=r"no package has cli"):
        layers(rest)


def test_every_module_is_in_one_layer_and_imports_only_layers_that_are_not_above_it() -> None:
    height = {name: i for i, layer in enumerate(layers(boxes())) for name in layer.names}
    top_level = {
        p.stem
        for package in ("policyloss", "policyloss_lab")
        for p in (ROOT / "src" / package).iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert set(height) == top_level - {"__init__", "__main__", "public"} | {"trainer"}
    assert not [(a, b) for a, box in boxes().items() for b in box.imports if height[b] > height[a]]


def test_arrows_leave_out_implied_ones() -> None:
    three = {"a": a_box("a", "b", "c"), "b": a_box("b", "c"), "c": a_box("c")}
    assert direct_imports(three) == [("a", "b"), ("b", "c")]


def test_sizes_are_rounded_so_that_few_changes_of_code_change_the_page() -> None:
    assert [rounded(n) for n in (3, 37, 60, 86, 120, 130, 240, 420, 620, 1612, 4841, 5428)] == [
        "5", "30", "70", "100", "100", "150", "200", "500", "700", "1,500", "5,000", "5,000",
    ]  # fmt: skip


# The drawing --------------------------------------------------------------------------------------


def test_the_drawing_is_whole_and_nothing_in_it_overlaps() -> None:
    root = ET.fromstring(drawing(boxes()))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    places = grid(boxes())
    assert set(places) == set(boxes())
    for a, b in itertools.combinations(places.values(), 2):
        assert a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y
    assert all(
        p.x >= 0 and p.right <= width and p.y >= 0 and p.bottom <= height for p in places.values()
    )
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert set(boxes()) <= words
    assert {layer.title for layer in layers(boxes())} <= words
    arrows = [path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]
    assert len(arrows) == len(direct_imports(boxes()))


def test_no_arrow_runs_behind_a_box() -> None:
    """The corners and vertical stretches of every path are outside all boxes."""
    places = grid(boxes())
    for path in ET.fromstring(drawing(boxes())).iter(f"{SVG}path"):
        if "marker-end" not in path.attrib:
            continue
        numbers = [float(n) for n in re.findall(r"-?\d+", path.attrib["d"])]
        for x, y in zip(numbers[::2], numbers[1::2], strict=True):
            assert not [
                name for name, p in places.items() if p.x < x < p.right and p.y < y < p.bottom
            ], path.attrib["d"]


# The walks ----------------------------------------------------------------------------------------


def test_a_walk_lists_its_stops_with_their_files_and_first_sentences() -> None:
    rows = walked(replace(loss_walk(), stops=(policy_loss, pipeline, token_losses)))
    assert [(stop.name, stop.file) for stop in rows] == [
        ("policy_loss", "policyloss/loss.py"),
        ("pipeline", "policyloss/loss.py"),
        ("token_losses", "policyloss/loss.py"),
    ]
    assert rows[1].about == "The slots in order, on one call's tokens."


@pytest.mark.parametrize(
    ("stops", "name"),
    [
        (
            (policy_loss, weighted_sum),
            "weighted_sum",
        ),  # is not called: `policy_loss` takes `weighted_total`
        ((pipeline, policy_loss), "policy_loss"),  # is called before
        ((policy_loss, pipeline, pipeline), "pipeline"),  # is called once
    ],
)
def test_a_stop_that_is_not_reached_in_its_order_is_an_error(
    stops: tuple[object, ...], name: str
) -> None:
    with pytest.raises(LookupError, match=rf"\b{name} is not reached there"):
        walked(replace(loss_walk(), stops=stops))


def test_a_walk_leaves_the_random_state_and_the_profiler_alone() -> None:
    def profiler(*_: object) -> None:
        """Somebody else's."""

    before = torch.random.get_rng_state()
    sys.setprofile(profiler)
    try:
        walked(loss_walk())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert torch.equal(torch.random.get_rng_state(), before)


# The page -----------------------------------------------------------------------------------------


def test_every_place_that_the_page_sends_a_reader_to_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture_page.places_table()
    (first, *_) = architecture_page.PLACES
    monkeypatch.setattr(
        architecture_page, "PLACES", (replace(first, files=("src/policyloss/nowhere.py",)),)
    )
    with pytest.raises(LookupError, match=r"src/policyloss/nowhere\.py does not exist"):
        architecture_page.places_table()


def test_every_package_describes_its_contents() -> None:
    assert not [
        name for name, box in boxes().items() if not box.about.endswith(".") or len(box.about) < 15
    ]
