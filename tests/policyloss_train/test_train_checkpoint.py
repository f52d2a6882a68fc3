"""Checkpoints: bit for bit, complete or absent, for any failure during the write."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import train_ranks
from safetensors import safe_open
from started import run_ranks, started_once
from torch import Tensor, nn

from policyloss.errors import InputError, PolicyLossError
from policyloss_lab.runs.files import StorageError
from policyloss_train.optimizers import MasterAdamW, load_optimizer_state, optimizer_state
from policyloss_train.run import checkpoint
from policyloss_train.run.checkpoint import discard_after, latest, load, save, step_of, subtree


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, dtype and shape; NaN equals itself."""
    bits = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def put(folder: Path, step: int, value: float | None = None, *, keep: int | None = None) -> Path:
    """A small checkpoint whose contents identify it."""
    value = float(step) if value is None else value
    return save(
        folder, step, {"model": {"w": torch.full((4,), value)}}, {"value": value}, keep=keep
    )


def holds(path: Path | None) -> float:
    assert path is not None
    tensors, numbers = load(path)
    assert same(tensors["model/w"], torch.full((4,), numbers["value"]))
    value: float = numbers["value"]
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    state = {
        "model": {
            "in.weight": tied,
            "out.weight": tied,
            "view": tied[1:],
            "t": tied.T,
            "bf16": torch.randn(5).bfloat16(),
        },
        "queue": [{"ids": torch.arange(3)}, {"ids": torch.arange(0)}],
        "flags": (torch.tensor([True, False]), torch.tensor(7, dtype=torch.uint8)),
        "odd": {"nan": torch.tensor([math.nan, math.inf, -0.0])},
        "nothing": {},
    }
    numbers = {
        "step": 3,
        "best": -math.inf,
        "lr": 0.1 + 0.2,
        "names": ["ä", None, True],
        "deep": {"big": 2**60},
    }
    path = save(tmp_path / "new" / "checkpoints", 12, state, numbers, keep=1)
    assert path == tmp_path / "new" / "checkpoints" / "step_000012"
    tensors, back = load(path)
    assert back == numbers
    assert set(tensors) == {
        *("model/in.weight", "model/out.weight", "model/view", "model/t", "model/bf16"),
        *("queue/0/ids", "queue/1/ids", "flags/0", "flags/1", "odd/nan"),
    }
    for name, saved in checkpoint.flatten(state).items():
        assert same(tensors[name], saved), name
    with safe_open(path / "rank00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors) - {"model/out.weight", "queue/1/ids"}, (
            "tied weights are written once, nothing never"
        )
    assert set(subtree(tensors, "queue/0")) == {"ids"}
    assert step_of(path) == 12


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda f: save(f, 1, {}, {"rng": torch.ones(1)}, keep=1),
            r"checkpoint\['numbers'\]\['rng'\] is a Tensor",
        ),
        (lambda f: step_of(f / "elsewhere"), "is not a checkpoint"),
    ],
)
def test_unsupported_values_are_not_saved(
    tmp_path: Path, call: Callable[[Path], Any], says: str
) -> None:
    put(tmp_path, 0)
    with pytest.raises(InputError, match=says):
        call(tmp_path)
    assert names(tmp_path) == ["step_000000"]


# ------------------------------------------------------------------------------ failures on the way


def no_space(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "where",
    ["os.replace", "os.fsync", "os.mkdir", "checkpoint.save_file", "files.write_synced"],
)
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there"])
def test_a_full_disk_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, again: bool
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    step = 2 if again else 3
    with monkeypatch.context() as patch:
        module, name = where.split(".")
        modules = {"os": os, "checkpoint": checkpoint, "files": checkpoint.files}
        patch.setattr(modules[module], name, no_space)
        with pytest.raises(
            StorageError,
            match=(
                rf"checkpoint .*step_00000{step}: No space left on device\. Older.*Free some space"
            ),
        ):
            put(tmp_path, step, 30.0, keep=1)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert holds(latest(tmp_path)) == 2.0
    assert holds(put(tmp_path, step, 30.0, keep=1)) == 30.0
    assert names(tmp_path) == [f"step_00000{step}"]


def test_one_that_stepped_aside_for_a_newer_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 2)
    real = os.replace

    def only_old_ones(source: Path, target: Path) -> None:
        no_space() if source.name.endswith(".tmp") else real(source, target)

    monkeypatch.setattr(os, "replace", only_old_ones)
    with pytest.raises(StorageError, match="No space left"):
        put(tmp_path, 2, 30.0)
    assert names(tmp_path) == ["step_000002"]
    assert holds(tmp_path / "step_000002") == 2.0


def test_a_file_that_the_system_cuts_short(tmp_path: Path) -> None:
    """A real limit, which safetensors meets in its own code:
    half a megabyte does not fit in 64 kB.
    """
    put(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            StorageError,
            match=r"could not write checkpoint .*step_000002: .*[Ff]ile too large.* Older",
        ):
            save(tmp_path, 2, {"big": torch.zeros(1 << 17)}, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step_000001"]
    assert holds(latest(tmp_path)) == 1.0


class Killed(BaseException):
    """The process was killed: none of its later writes happens."""


def killed_at(moment: int, patch: pytest.MonkeyPatch, call: Callable[[], Any]) -> int:
    """Run `call`, and end it when it is about to change the disk for the `moment`-th time.
    Returns how often it did.
    """
    changes = 0

    def counted(real: Any) -> Any:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes >= moment:
                raise Killed
            return real(*args, **options)

        return change

    for module, name in [
        (os, "replace"),
        (os, "fsync"),
        (os, "mkdir"),
        (os, "unlink"),
        (os, "rmdir"),
        (checkpoint, "save_file"),
    ]:
        patch.setattr(module, name, counted(getattr(module, name)))
    try:
        call()
    except Killed:
        pass
    finally:
        patch.undo()
    return changes


@pytest.mark.parametrize("step", [2, 3], ids=["a step that is there", "a new step"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    def start(folder: Path) -> None:
        put(folder, 1)
        put(folder, 2)

    start(tmp_path / "count")
    moments = killed_at(10**9, monkeypatch, lambda: put(tmp_path / "count", step, 30.0, keep=2))
    assert moments > 8
    seen = set()
    for moment in range(1, moments + 1):
        folder = tmp_path / str(moment)
        start(folder)
        killed_at(moment, monkeypatch, lambda folder=folder: put(folder, step, 30.0, keep=2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing half written is even met
            seen.add(holds(latest(folder)))
        assert holds(put(folder, step, 31.0, keep=2)) == 31.0
        assert names(folder) == (
            ["step_000001", "step_000002"] if step == 2 else ["step_000002", "step_000003"]
        )
    assert seen == {2.0, 30.0}


# ------------------------------------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"value": 3.0', '"value": 4.0'))


def elsewhere(path: Path) -> None:
    """An index that is sound in itself, by someone who wants another file read."""
    body = (
        path.read_bytes()
        .partition(b', "checkpoint": ')[2][:-1]
        .replace(b'"rank00000.safetensors": {', b'"../outside": {')
    )
    path.write_bytes(
        b'{"sha256": "%s", "checkpoint": %s}' % (hashlib.sha256(body).hexdigest().encode(), body)
    )


DAMAGE = {
    "tensors cut": ("rank00000.safetensors", cut, "has 85 bytes, 88 were written"),
    "a bit of a tensor": (
        "rank00000.safetensors",
        flip,
        "rank00000.safetensors does not have its checksum",
    ),
    "no tensors": (
        "rank00000.safetensors",
        Path.unlink,
        "is incomplete: .*rank00000.safetensors: No such file",
    ),
    "no index": ("checkpoint.json", Path.unlink, "is incomplete: .*checkpoint.json: No such file"),
    "index cut": ("checkpoint.json", cut, "checkpoint.json is not readable"),
    "another number": (
        "checkpoint.json",
        other_number,
        "checkpoint.json does not have its checksum",
    ),
    "not an object": (
        "checkpoint.json",
        lambda path: path.write_text("[1]"),
        "checkpoint.json is not readable",
    ),
    "another file": ("checkpoint.json", elsewhere, "outside of its folder"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, what: str) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    file, damage, says = DAMAGE[what]
    damage(tmp_path / "step_000003" / file)
    with pytest.raises(StorageError, match=says):
        checkpoint.check_index(tmp_path / "step_000003", sums=True)
    with pytest.warns(UserWarning, match=f"step_000003.*{says}.*next older"):
        assert holds(latest(tmp_path)) == 2.0


def test_there_may_be_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "never made") is None
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_000004").write_text("a file")
    assert latest(tmp_path) is None


# ----------------------------------------------------------------------------------------- how many


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 1000000):
        put(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step_000002", "step_000010", "step_1000000"]
    assert holds(latest(tmp_path)) == 1000000.0
    put(tmp_path, 1000001)
    assert len(names(tmp_path)) == 4, "keep=None keeps all"


def test_one_that_cannot_be_read_is_not_counted(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    cut(tmp_path / "step_000002" / "rank00000.safetensors")
    put(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_run_that_goes_back_leaves_later_ones_behind(tmp_path: Path) -> None:
    """They are set aside at once, and deleted when there
    is something newer than where the run went back to.
    """
    for step in (10, 20, 30):
        put(tmp_path, step)
    discard_after(tmp_path, 10)
    assert holds(latest(tmp_path)) == 10.0
    assert names(tmp_path) == [".step_000020.discarded", ".step_000030.discarded", "step_000010"]
    put(tmp_path, 15, keep=5)
    assert names(tmp_path) == ["step_000010", "step_000015"]


def test_an_older_one_does_not_delete_itself(tmp_path: Path) -> None:
    put(tmp_path, 30)
    put(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["step_000020", "step_000030"]


# --------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "masters": lambda p: MasterAdamW(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.95)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = train_ranks.make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train_ranks.train(model, optimizer, 0, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
    path = save(tmp_path, 3, state, {}, keep=1)

    torch.manual_seed(5)
    again = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7, bias=False))
    other = OPTIMIZERS[name](reversed(list(again.parameters())))
    tensors, _ = load(path)
    again.load_state_dict(subtree(tensors, "model"))
    load_optimizer_state(again, other, subtree(tensors, "optimizer"))
    train_ranks.train(model, optimizer, 3, 2)
    train_ranks.train(again, other, 3, 2)
    for key, x in model.state_dict().items():
        assert same(x, again.state_dict()[key]), key
    for parameter, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[parameter].keys() == other.state[twin].keys()


def test_state_keeps_its_dtype() -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    moment = torch.tensor([[1 / 3, 0.1], [0.2, 0.3]])
    optimizer.state[model.weight] = {
        "step": torch.tensor(4.0),
        "exp_avg": moment,
        "exp_avg_sq": moment**2,
    }
    other = torch.optim.AdamW(model.parameters(), lr=0.2)
    load_optimizer_state(model, other, optimizer_state(model, optimizer))
    assert same(other.state[model.weight]["exp_avg"], moment)
    assert other.state[model.weight]["exp_avg"].data_ptr() != moment.data_ptr()


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = train_ranks.make_model()
    optimizer = train_ranks.make_optimizer(model)
    train_ranks.train(model, optimizer, 0, 1)
    tensors = optimizer_state(model, optimizer)
    part = {name: x for name, x in tensors.items() if name != "0.bias/exp_avg"}
    with pytest.raises(InputError, match="of some parameters in part"):
        load_optimizer_state(model, optimizer, part)
    for wrong, shown in ((torch.zeros(4), r"float32 \(4,\)"), (torch.ones(5).int(), "int32")):
        found = rf"0.bias/exp_avg in the checkpoint is torch.{shown}.*parameter is .* \(5,\)"
        with pytest.raises(InputError, match=found):
            load_optimizer_state(model, optimizer, {**tensors, "0.bias/exp_avg": wrong})
    with pytest.raises(KeyError, match=r"9.bias"):  # `restore` names the checkpoint
        load_optimizer_state(model, optimizer, {"9.bias/exp_avg": torch.zeros(4)})


# -------------------------------------------------------------------------------------------- ranks

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the four ranks worked. Parallel test workers share one start of processes:
    the first's.
    """

    def start(place: Path) -> None:
        run_ranks(train_ranks.work, str(place), count=4, imports="policyloss_train.run.checkpoint")

    return started_once(tmp_path_factory, "train_ranks", start)


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of one process at the checkpoint, and after more training."""
    model, optimizer = train_ranks.trained(None)
    state, _ = train_ranks.state_of(model, optimizer)
    held = {name: x.clone() for name, x in checkpoint.flatten(state).items()}
    train_ranks.train(model, optimizer, train_ranks.STEPS, train_ranks.MORE)
    return held, {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("case", ["2 to 2", "1 to 2", "4 to 2", "2 to 4", "1 to 4"])
def test_another_number_of_ranks_goes_on_bit_for_bit(case: str, said: Said, alone: Any) -> None:
    for rank in range(int(case[-1])):
        for found, expected in zip(said[rank][case], alone, strict=True):
            assert expected.keys() <= found.keys()
            for name, x in expected.items():
                assert same(found[name], x), f"{name} on rank {rank}"


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_one_process_reads_a_checkpoint_of_ranks(
    ranks: str, folder: Path, said: Said, alone: Any
) -> None:
    path = latest(folder / ranks)
    assert path == folder / ranks / "step_000003"
    tensors, numbers = load(path)
    for name, x in alone[0].items():
        assert same(tensors[name], x), name
    assert numbers["lr"] == 0.1
    if ranks == "two":
        assert [tensors[f"rng/rank{rank}"].tolist() for rank in (0, 1)] == [[0, 0, 0], [1, 1, 1]]
        assert tensors["empty"].shape == (0, 4)
        assert tensors["count"].item() == 7


def test_each_rank_wrote_its_own_rows(folder: Path, said: Said) -> None:
    """Of 5 rows, two ranks have 3 and 2; four have 2, 2, 1 and none."""
    for ranks, rows in (("two", [3, 2]), ("four", [2, 2, 1])):
        index = checkpoint.check_index(folder / ranks / "step_000003", sums=True)
        pieces = index["tensors"]["model/0.weight"]["pieces"]
        assert [piece["rows"] for piece in pieces] == rows
        assert [piece["file"] for piece in pieces] == [
            f"rank{rank:05d}.safetensors" for rank in range(len(rows))
        ]
    assert said[0]["path"] == said[1]["path"] == said[1]["latest"]


def test_a_rank_that_cannot_write_stops_all(folder: Path, said: Said) -> None:
    for rank in (0, 1):
        assert said[rank]["full disk"].startswith(
            "StorageError: rank 1: StorageError: could not write checkpoint "
        )
        assert (
            "step_000009: No space left on device. Older checkpoints are untouched. Free"
            in said[rank]["full disk"]
        )
        assert said[rank]["folder"] == ["step_000003"]
        assert said[rank]["latest"] == said[rank]["path"]


def test_a_piece_that_is_missing(folder: Path, said: Said, tmp_path: Path) -> None:
    path = tmp_path / "step_000003"
    shutil.copytree(folder / "two" / "step_000003", path)
    flip(path / "rank00001.safetensors")
    with pytest.warns(UserWarning, match=r"rank00001\.safetensors does not have its checksum"):
        assert latest(tmp_path) is None
    (path / "rank00001.safetensors").unlink()
    with pytest.raises(PolicyLossError, match=r"incomplete: .*rank00001\.safetensors"):
        load(path)


def test_one_process_and_many_write_one_format(folder: Path, said: Said) -> None:
    """The same state: one index, but for where the rows are. Each rank writes a file, and the file
    of one process is that of a single rank.
    """
    one, two, four = (
        checkpoint.check_index(folder / name / "step_000003", sums=True)
        for name in ("one", "two", "four")
    )
    assert list(one["files"]) == ["rank00000.safetensors"]
    assert list(two["files"]) == [f"rank{rank:05d}.safetensors" for rank in (0, 1)]
    assert one.keys() == two.keys() == four.keys()
    assert one["numbers"] == two["numbers"] == four["numbers"]
    for name, entry in one["tensors"].items():
        rows = entry["shape"][0] if entry["shape"] else 1
        assert entry["pieces"] == [{"file": "rank00000.safetensors", "first": 0, "rows": rows}], (
            name
        )
        for other in (two, four):
            assert {**other["tensors"][name], "pieces": entry["pieces"]} == entry, name
            assert sum(piece["rows"] for piece in other["tensors"][name]["pieces"]) == rows, name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": 1}, r"model/w: a piece begins at row 1, where row 0 is next"),
        ({"first": -1}, r"model/w: a piece begins at row -1, where row 0 is next"),
        (
            {"rows": 3},
            r"model/w has the shape \[4\] in rank00000\.safetensors, but \[3\] in the index",
        ),
        ({"first": "x"}, r"model/w: a piece begins at row x"),
        ({"file": "rank00007.safetensors"}, "KeyError: 'rank00007.safetensors'"),
        (None, r"model/w: 8 of 4 rows are in the files"),
        ([], r"model/w: 0 of 4 rows are in the files"),
    ],
)
def test_pieces_that_are_not_the_rows_of_a_tensor(tmp_path: Path, change: Any, says: str) -> None:
    """An index with right sums in which some rows are missing, or occur twice: unwritten memory is
    not read.
    """
    path = put(tmp_path, 1)
    body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
    entry = body["tensors"]["model/w"]
    (piece,) = entry["pieces"]
    if change is None:  # the same rows once more, as if they were the next
        entry["pieces"] = [piece, {**piece, "first": 4}]
    else:
        entry["pieces"] = [{**piece, **change}] if change else []
    data = json.dumps(body).encode()
    (path / "checkpoint.json").write_bytes(
        b'{"sha256": "%s", "checkpoint": %s}' % (hashlib.sha256(data).hexdigest().encode(), data)
    )
    with pytest.raises(StorageError, match=says):
        load(path)


def test_a_checkpoint_of_another_format_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    body = (
        (path / "checkpoint.json")
        .read_bytes()
        .partition(b', "checkpoint": ')[2][:-1]
        .replace(b'"format": 2', b'"format": 1')
    )
    sha256 = hashlib.sha256(body).hexdigest().encode()
    (path / "checkpoint.json").write_bytes(b'{"sha256": "%s", "checkpoint": %s}' % (sha256, body))
    with pytest.raises(
        StorageError,
        match="has format 1, and this version reads format 2; use the version that wrote it",
    ):
        load(path)
