"""The optimal token baseline: hand numbers, a plain loop over groups and tokens, and its value
where the weights are uninformative.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from walk import walked

from policyloss import advantage as adv
from policyloss.advantage import optimal_token_baseline
from policyloss.errors import InputError

# Two rows of a group. π = ½ and Σπ² = ½ give 1 − 1 + ½ = ½; π = ¼ and Σπ² = ½ give 1 − ½ + ½ = 1.
REWARDS = torch.tensor([[0.0, 0.0, 4.0], [1.0, 1.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
PI = torch.tensor([[0.5, 0.25, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64)
SUM_PI_SQUARED = torch.full((2, 3), 0.5, dtype=torch.float64)
IDS = torch.tensor([3, 3])


def baseline(rewards=REWARDS, ids=IDS, mask=MASK, pi=PI, squared=SUM_PI_SQUARED, **options):
    return optimal_token_baseline(rewards, ids, mask, pi.log(), squared, **{"eps": 0.0, **options})


def close(actual, expected, atol=1e-13):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol
    )


def batch(seed, rows=9, length=11):
    """Rows of several turns in groups of one, three and five;
    one row empty, for even seeds one full.
    """
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    mask &= torch.rand(rows, length, generator=g) < 0.7
    mask[0] = False
    if seed % 2 == 0:
        mask[1] = True
    ids = torch.tensor([5, 5, -1, 5, 70, 70, 70, 5, 5])[torch.randperm(rows, generator=g)]
    pi, squared, weights = torch.rand(3, rows, length, generator=g, dtype=torch.float64)
    return {
        "rewards": torch.randn(rows, length, generator=g, dtype=torch.float64),
        "ids": ids,
        "mask": mask,
        "pi": pi,
        "squared": pi**2 + (1 - pi) ** 2 * squared,
        "weights": 2 * weights,
    }


def reference(rewards, ids, mask, pi, squared, weights, zero_tail, bridge, eps):
    """The docstring, one number at a time."""
    rows, length = mask.shape
    out = torch.zeros(rows, length, dtype=torch.float64)
    rewards, ids, pi, squared, weights = (x.tolist() for x in (rewards, ids, pi, squared, weights))
    tokens = []  # for each row, its valid tokens: place → (column, return, path)
    for i in range(rows):
        found, path = {}, 0.0
        for t in range(length):
            if not mask[i, t]:
                continue
            path = path + weights[i][t] ** 2 * (1 - 2 * pi[i][t] + squared[i][t])
            to_go = sum(rewards[i][u] for u in range(t, length) if mask[i, u])
            found[len(found) if bridge else t] = (t, to_go, path)
        tokens.append(found)
    for i in range(rows):
        group = [j for j in range(rows) if ids[j] == ids[i] and (tokens[j] or not bridge)]
        others = max((len(tokens[j]) for j in group if j != i), default=0)
        for place, (t, to_go, _) in tokens[i].items():
            there = [tokens[j][place][1:] for j in group if place in tokens[j]]
            mean = sum(g * w for g, w in there) / (sum(w for _, w in there) + eps)
            compared = len(group) > 1 and not (
                zero_tail and place >= others and len(tokens[i]) > others
            )
            out[i, t] = to_go - mean if compared else to_go
    return out


def test_by_hand():
    # Returns: 4, 4, 4 and 2, 1. Paths: ½, 3/2, 2 and ½, 1.
    # Baselines: (½·4 + ½·2)/1 = 3; (3/2·4 + 1·1)/(5/2) = 2.8; the third token is the first row's
    # alone: 0, and without the tail 4.
    close(baseline(), [[1, 1.2, 4], [-1, -1.8, 0]])
    close(baseline(zero_tail=False), [[1, 1.2, 0], [-1, -1.8, 0]])


def test_eps_is_added_to_the_weights():
    # (½·4 + ½·2)/(1 + 1) = 1.5; (3/2·4 + 1)/(5/2 + 1) = 2
    close(baseline(eps=1.0), [[2.5, 2, 4], [0.5, -1, 0]])


def test_a_correction_weight_enters_squared():
    # The second row's first token weighs 2, so its term is 4·½ = 2 and its path 2, 5/2:
    # (½·4 + 2·2)/(5/2) = 2.4; (3/2·4 + 5/2·1)/4 = 2.125.
    weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, math.nan]], dtype=torch.float64)
    close(baseline(weights=weights), [[1.6, 1.875, 4], [-0.4, -1.125, 0]])


@walked("bridge", [True, False])
@walked("zero_tail", [True, False])
@walked("seed", range(3))
def test_equals_the_definition(bridge, zero_tail, seed):
    b = batch(seed)
    options = {"zero_tail": zero_tail, "bridge": bridge, "eps": 0.1}
    close(baseline(**b, **options), reference(**b, **options), atol=1e-12)


def test_bridged_rows_are_rows_without_their_holes():
    b = batch(4)
    lengths = b["mask"].sum(-1)
    order = b["mask"].long().argsort(dim=-1, descending=True, stable=True)
    straight = {name: b[name].gather(1, order) for name in ("rewards", "pi", "squared", "weights")}
    short = torch.arange(11) < lengths[:, None]
    packed = baseline(**straight, ids=b["ids"], mask=short)
    holes = baseline(**b)
    for i in range(9):
        close(holes[i][b["mask"][i]], packed[i][short[i]])
    # With the tails at baseline 0, only an empty row could be counted differently,
    # and it changes nothing.
    close(baseline(**straight, ids=b["ids"], mask=short, bridge=False), packed)


def test_equal_paths_make_the_mean_of_the_group_and_a_longer_path_counts_more():
    rewards, ids = torch.tensor([1.0, 4.0], dtype=torch.float64), torch.zeros(2).long()
    one = {
        "ids": ids,
        "mask": torch.ones(2, 1),
        "squared": torch.full((2, 1), 0.5, dtype=torch.float64),
    }
    # One token each, the reward per sequence: r − mean.
    close(
        baseline(rewards, **one, pi=torch.full((2, 1), 0.5, dtype=torch.float64)),
        adv.dr_grpo(rewards, ids).view(2, 1),
    )
    # π = ¼ weighs 1 and π = ½ weighs ½: (1·1 + ½·4)/(3/2) = 2.
    close(
        baseline(rewards, **one, pi=torch.tensor([[0.25], [0.5]], dtype=torch.float64)), [[-1], [2]]
    )


def test_an_empty_row_is_no_companion_for_a_bridged_one():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    # Alone, the row keeps its returns; compared by columns, its own return is its baseline.
    close(baseline(mask=mask, zero_tail=False), [[4, 4, 4], [0, 0, 0]])
    close(baseline(mask=mask, zero_tail=False, bridge=False), torch.zeros(2, 3))
    close(baseline(mask=mask), [[4, 4, 4], [0, 0, 0]])
    close(baseline(mask=torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_group_of_one_keeps_its_returns():
    close(baseline(ids=torch.tensor([3, 4])), [[4, 4, 4], [2, 1, 0]])


def test_masked_tokens_are_never_read():
    given = {"rewards": REWARDS, "pi": PI, "squared": SUM_PI_SQUARED}
    assert torch.equal(
        baseline(**{name: torch.where(MASK.bool(), x, math.nan) for name, x in given.items()}),
        baseline(),
    )


def test_row_order_and_group_names_do_not_matter():
    b = batch(5)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    renamed = {**{name: x[order] for name, x in b.items()}, "ids": b["ids"][order] * 1000 - 3}
    close(baseline(**renamed), baseline(**b)[order], atol=1e-14)


def test_float32_stays_and_half_is_computed_in_float32():
    b = {name: x.float() if x.is_floating_point() else x for name, x in batch(6).items()}
    assert baseline(**b).dtype == torch.float32
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in b.items()}
    exact = {name: x.float() if x.is_floating_point() else x for name, x in half.items()}
    arguments = ("rewards", "ids", "mask")

    def call(x):
        args = [x[n] for n in arguments]
        return optimal_token_baseline(*args, half["pi"].log(), x["squared"], weights=x["weights"])

    assert torch.equal(call(half), call(exact))


def test_no_gradient():
    logp = PI.log().requires_grad_()
    rewards = REWARDS.clone().requires_grad_()
    assert not optimal_token_baseline(rewards, IDS, MASK, logp, SUM_PI_SQUARED).requires_grad


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_no_loop_over_groups_rows_or_tokens():
    def ops(rows, length):
        pi = torch.full((rows, length), 0.5)
        with CountOps() as counter:
            optimal_token_baseline(
                torch.rand(rows, length),
                torch.arange(rows) // 4,
                torch.ones(rows, length),
                pi.log(),
                pi,
            )
        return counter.ops

    assert ops(8, 5) == ops(400, 90)


def test_it_is_among_the_estimators():
    assert adv.estimator("optimal_token_baseline") is optimal_token_baseline
    none = torch.zeros(0, 3)
    assert optimal_token_baseline(none, torch.zeros(0).long(), none, none, none).shape == (0, 3)


@walked(
    ("change", "message"),
    [
        ({"mask": torch.ones(6)}, r"padded tokens \[B, T\]"),
        ({"pi": torch.ones(2, 2)}, "old_logp has shape"),
        ({"squared": torch.ones(2)}, "sum_pi_squared has shape"),
        ({"weights": torch.ones(3, 2)}, "weights has shape"),
        ({"ids": torch.tensor([1.0, 2.0])}, "tensor of integers"),
        ({"ids": torch.tensor([1, 2, 3])}, "give one id each"),
        ({"rewards": torch.ones(2, 2)}, "rewards have shape"),
        ({"eps": -1.0}, "eps must be >= 0"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(InputError, match=message):
        baseline(**change)
