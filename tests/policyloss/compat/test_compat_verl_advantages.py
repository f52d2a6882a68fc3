"""verl's advantage estimators: hand numbers (its small constants and roundings included),
releases, signatures, errors.
"""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from walk import walked

from policyloss.compat.verl.advantages import ADVANTAGE_ESTIMATORS, group_numbers
from policyloss.errors import InputError, SpecError

# Six rows. Their scores are 1, 5, 3, 1, 2, 6, in groups {1, 3} (mean 2, deviation √2), {5} alone,
# {1, 2, 6} (mean 3, deviation √7). Rewards at masked tokens count in a score: 0.25 + 0.75 = 1 in
# the first row.
INDEX = ["a", "b", "a", "c", "c", "c"]
MASK = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 1], [1, 1], [1, 0]])
REWARDS = torch.tensor(
    [[0.25, 0.75], [2.0, 3.0], [0.0, 3.0], [1.0, 0.0], [2.0, 0.0], [6.0, 0.0]], dtype=torch.float64
)
ROOT2, ROOT7 = math.sqrt(2), math.sqrt(7)


def float32(x):
    """`x` as a float32 number."""
    return torch.tensor(x, dtype=torch.float32).item()


def call(name, rewards=REWARDS, mask=MASK, **given):
    return ADVANTAGE_ESTIMATORS[name](token_level_rewards=rewards, response_mask=mask, **given)


def close(actual, expected, atol=1e-14):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol
    )


def outcome(pair, expected, mask=MASK, atol=1e-14):
    """One number per row at its valid tokens, and the same tensor as returns."""
    assert pair[0] is pair[1]
    close(pair[0], torch.tensor(expected, dtype=torch.float64).view(-1, 1) * mask, atol)


def whitened(rows, mask=MASK, bessel=None, count_eps=0.0):
    """verl's whitening of one number per row, counted once per valid token, in Python floats."""
    tokens = [x for x, n in zip(rows, mask.sum(-1).tolist(), strict=True) for _ in range(n)]
    n = len(tokens)
    mean = math.fsum(tokens) / (n + count_eps)
    variance = (
        math.fsum((x - mean) ** 2 for x in tokens)
        / (n + count_eps)
        * (n / (n - 1) if bessel is None else bessel)
    )
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in rows]


# One group's rewards against each other


def test_grpo():
    outcome(
        call("grpo", index=INDEX, epsilon=0.5),
        [
            -1 / (ROOT2 + 0.5),
            5 / 1.5,
            1 / (ROOT2 + 0.5),
            -2 / (ROOT7 + 0.5),
            -1 / (ROOT7 + 0.5),
            3 / (ROOT7 + 0.5),
        ],
    )
    outcome(call("grpo", index=INDEX, norm_adv_by_std_in_grpo=False), [-1, 5, 1, -2, -1, 3])
    # By default 1e-6 is added, for a row alone in float32.
    advantages, _ = call("grpo", index=INDEX)
    close(
        advantages[:3, 0],
        [-1 / (ROOT2 + 1e-6), 5 / float32(1 + 1e-6), 1 / (ROOT2 + 1e-6)],
        atol=1e-15,
    )


def test_grpo_vectorized_has_float32_statistics():
    rewards, mask = torch.tensor([[0.1], [0.2], [7.0]], dtype=torch.float64), torch.ones(3, 1)
    # In float32, 0.1 + 0.2 is 0.3 and its half 0.15, each rounded;
    # they are subtracted from the float64 scores.
    mean = float32(float32(float32(0.1) + float32(0.2)) / 2)
    assert mean != 0.15
    pair = call(
        "grpo_vectorized", rewards, mask, index=["a", "a", "b"], norm_adv_by_std_in_grpo=False
    )
    outcome(pair, [0.1 - mean, 0.2 - mean, 7], mask, atol=1e-17)
    pair = call("grpo_vectorized", index=INDEX, epsilon=0.5)
    a, c = float32(float32(ROOT2) + 0.5), float32(float32(ROOT7) + 0.5)
    outcome(pair, [-1 / a, 5 / 1.5, 1 / a, -2 / c, -1 / c, 3 / c])


def test_grpo_passk():
    # The margins of the best over the second: 3 − 1 = 2 and 6 − 2 = 4.
    rewards, mask, index = (
        REWARDS[[0, 2, 3, 4, 5]],
        MASK[[0, 2, 3, 4, 5]],
        ["a", "a", "c", "c", "c"],
    )
    pair = call(
        "grpo_passk",
        rewards,
        mask,
        index=index,
        epsilon=0.5,
        config={"norm_adv_by_std_in_grpo": True},
    )
    outcome(pair, [0, 2 / (ROOT2 + 0.5), 0, 0, 4 / (ROOT7 + 0.5)], mask)
    # The config decides, not the argument, as in verl.
    config = SimpleNamespace(norm_adv_by_std_in_grpo=False)
    outcome(
        call("grpo_passk", rewards, mask, index=index, norm_adv_by_std_in_grpo=True, config=config),
        [0, 2, 0, 0, 4],
        mask,
    )
    pair = call(
        "grpo_passk",
        rewards,
        mask,
        index=index,
        epsilon=0.5,
        norm_adv_by_std_in_grpo=False,
        config={},
    )
    outcome(pair, [0, 2 / (ROOT2 + 0.5), 0, 0, 4 / (ROOT7 + 0.5)], mask)


def test_rloo_and_its_vectorized_form():
    # 1 − 3 and 3 − 1; 1 − 4, 2 − 3.5, 6 − 1.5. A row alone keeps its score,
    # and in the vectorized form gets 0.
    outcome(call("rloo", index=INDEX), [-2, 5, 2, -3, -1.5, 4.5])
    outcome(call("rloo_vectorized", index=INDEX), [-2, 0, 2, -3, -1.5, 4.5])


def test_opo():
    # Baselines by length: (1·1 + 2·3)/3 = 7/3 and (1·1 + 2·2 + 1·6)/4 = 11/4.
    outcome(call("opo", index=INDEX), [-4 / 3, 5, 2 / 3, -7 / 4, -3 / 4, 13 / 4])


def test_opo_of_a_group_without_tokens_is_zero():
    mask = MASK * torch.tensor([[0], [1], [0], [1], [1], [1]])
    outcome(call("opo", mask=mask, index=INDEX), [0, 5, 0, -7 / 4, -3 / 4, 13 / 4], mask)


def test_gpg():
    # All six rewards count: α = 1. With one of them 0, α = 6/5, in float32 six times a fifth.
    outcome(call("gpg", index=INDEX, f_norm=0.5, alpha=100.0), [-2, 10, 2, -4, -2, 6])
    rewards = REWARDS.clone()
    rewards[1] = 0
    alpha = float32(float32(1 / 5) * 6)
    assert alpha != 1.2
    outcome(
        call("gpg", rewards, index=INDEX),
        [-alpha, 0, alpha, -2 * alpha, -alpha, 3 * alpha],
        atol=1e-16,
    )


# The batch, whitened

CENTERED = [-1, 5, 1, -2, -1, 3]


@walked("dtype", [torch.float64, torch.int64, torch.bool])
def test_reinforce_plus_plus_baseline_is_whitened_over_nine_tokens(dtype):
    pair = call("reinforce_plus_plus_baseline", mask=MASK.to(dtype), index=INDEX)
    # A float64 mask has n + 1e-8 in its means; an integer one is counted in float32,
    # where that is n and 9/8 is exact.
    outcome(pair, whitened(CENTERED, count_eps=1e-8 if dtype == torch.float64 else 0.0), atol=1e-14)


def test_an_integer_mask_has_a_rounded_correction():
    rewards, mask = REWARDS[:3], MASK[:3]
    # Five tokens: 5/4 is exact. With four, 4/3 is not.
    outcome(
        call("reinforce_plus_plus_baseline", rewards, mask, index=INDEX[:3]),
        whitened([-1, 5, 1], mask),
        mask,
    )
    mask = torch.tensor([[1, 0], [1, 1], [0, 1]])
    expected = whitened([-1, 5, 1], mask, bessel=float32(4 / 3))
    assert abs(expected[1] - whitened([-1, 5, 1], mask)[1]) > 1e-9
    outcome(call("reinforce_plus_plus_baseline", rewards, mask, index=INDEX[:3]), expected, mask)


def test_gdpo_of_one_reward():
    grpo = [
        -1 / (ROOT2 + 0.5),
        5 / 1.5,
        1 / (ROOT2 + 0.5),
        -2 / (ROOT7 + 0.5),
        -1 / (ROOT7 + 0.5),
        3 / (ROOT7 + 0.5),
    ]
    outcome(call("gdpo", index=INDEX, epsilon=0.5), whitened(grpo))
    # Several rewards need all three of config, non_tensor_batch and batch;
    # without one of them the tokens' is the only one.
    config = SimpleNamespace(gdpo_reward_keys=["x"])
    outcome(
        call("gdpo", index=INDEX, epsilon=0.5, config=config, non_tensor_batch={"x": [9.0] * 6}),
        whitened(grpo),
    )
    outcome(call("gdpo", index=INDEX, norm_adv_by_std_in_grpo=False), whitened(CENTERED))


def test_gdpo_of_two_rewards():
    components = {"fit": [1.0, 5.0, 3.0, 1.0, 2.0, 6.0], "form": [0.0, 1.0, 2.0, 3.0, 3.0, 0.0]}
    config = {"gdpo_reward_keys": ["fit", "form"], "gdpo_reward_weights": [1.0, 2.0]}
    given = {
        "index": INDEX,
        "config": config,
        "non_tensor_batch": components,
        "batch": {},
        "norm_adv_by_std_in_grpo": False,
    }
    # Centered: fit as above; form −1, 1, 1, 1, 1, −2.
    # Together −1 − 2, 5 + 2, 1 + 2, −2 + 2, −1 + 2, 3 − 4.
    summed = [-3, 7, 3, 0, 1, -1]
    outcome(call("gdpo", **given), whitened(summed), atol=1e-6)
    outcome(call("gdpo", **given, mask=MASK.double()), whitened(summed, count_eps=1e-8))
    unweighted = {**given, "config": {"gdpo_reward_keys": ["fit", "form"]}}
    outcome(
        call("gdpo", **unweighted, mask=MASK.double()),
        whitened([-2, 6, 2, -1, 0, 1], count_eps=1e-8),
    )
    # The rewards are float32 whatever the batch is: with an integer mask, so is the result.
    assert call("gdpo", **given)[0].dtype == torch.float32
    assert call("gdpo", **given, mask=MASK.double())[0].dtype == torch.float64


# Over time

TURNS = torch.tensor([[1, 0, 1]])
STEPS = torch.tensor([[1.0, 5.0, 2.0]], dtype=torch.float64)


def test_reinforce_plus_plus_carries_returns_over_holes():
    # γ = ½: 2, then 1 + ½·2 = 2 over the hole: constant,
    # so whitened to 0 (n is exact in float32 with this mask).
    advantages, returns = call(
        "reinforce_plus_plus", STEPS, TURNS, config=SimpleNamespace(gamma=0.5)
    )
    close(returns, [[2, 0, 2]])
    close(advantages, [[0, 0, 0]])
    # γ = 1: 2 and 3, mean 2.5, variance (¼ + ¼)/2·2 = ½.
    advantages, returns = call("reinforce_plus_plus", STEPS, TURNS, config={"gamma": 1.0})
    close(returns, [[3, 0, 2]])
    s = 0.5 / math.sqrt(0.5 + 1e-8)
    close(advantages, [[s, 0, -s]])


def test_reinforce_plus_plus_before_0_9_0_cuts_at_holes():
    # 2; at the hole 5 + ½·2 = 6, which is kept there but passed on to no one; 1.
    # Whitened {1, 2}: ∓½/√½.
    advantages, returns = call(
        "reinforce_plus_plus", STEPS, TURNS, config=SimpleNamespace(gamma=0.5), release="0.8.0"
    )
    close(returns, [[1, 6, 2]])
    s = 0.5 / math.sqrt(0.5 + 1e-8)
    close(advantages, [[-s, 0, s]])


def test_remax():
    advantages, returns = call(
        "remax", STEPS, TURNS, reward_baselines=torch.tensor([0.5], dtype=torch.float64)
    )
    close(returns, [[3, 2, 2]])
    close(advantages, [[2.5, 2, 1.5]])


def test_gae():
    values = torch.tensor([[0.5, 1.0, 1.5]], dtype=torch.float64)
    advantages, returns = call("gae", STEPS, TURNS, values=values, gamma=0.9, lam=0.5)
    # A₃ = 2 − 1.5 = 0.5, carried over the hole; A₁ = 1 + 0.9·1.5 − 0.5 + 0.45·0.5 = 2.075.
    close(returns, [[2.575, 1.5, 2]])
    # {2.075, 0.5}: mean 1.2875, variance 2·0.7875². The hole holds ½ too.
    s = 0.7875 / math.sqrt(2 * 0.7875**2 + 1e-8)
    close(advantages, [[s, -s, -s]])


@walked("name", ["gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@walked("count", [0, 1])
def test_whitening_refuses_fewer_than_two_tokens(name, count):
    extra = {
        "gae": {"values": REWARDS, "gamma": 1.0, "lam": 1.0},
        "reinforce_plus_plus": {"config": {"gamma": 1.0}},
    }.get(name, {"index": INDEX})
    with pytest.raises(ValueError, match=f"two valid tokens, got {count}"):
        call(name, mask=torch.arange(12).view(6, 2) < count, **extra)


# The optimal token baseline. π = ½ and Σπ² = ½ give each token the weight ½,
# so a row's path is ½, 1, 3/2.


def otb(name, rewards, mask, **given):
    half = torch.full(mask.shape, 0.5, dtype=torch.float64)
    given = {"index": [7] * len(mask), "epsilon": 0.0, **given}
    return call(
        name,
        torch.tensor(rewards, dtype=torch.float64),
        mask,
        old_log_probs=half.log(),
        sum_pi_squared=half,
        **given,
    )


def test_optimal_token_baseline_compares_columns():
    # Returns 4, 4, 4 and (a hole in the second row, where its return is carried) 3, 2, 2;
    # paths ½, 1, 3/2 and ½, ·, 1.
    # Baselines: 7/2; the first row's own 4; (3/2·4 + 1·2)/(5/2) = 3.2. The second-largest count of
    # tokens is 2, so the first row's tail begins at the third column.
    rewards, mask = [[0, 0, 4], [1, 9, 2]], torch.tensor([[1, 1, 1], [1, 0, 1]])
    advantages, returns = otb("optimal_token_baseline", rewards, mask)
    close(returns, [[4, 4, 4], [3, 2, 2]])
    close(advantages, [[0.5, 0, 4], [-0.5, 0, -1.2]])
    close(
        otb("optimal_token_baseline", rewards, mask, handle_zero_tail=False)[0],
        [[0.5, 0, 0.8], [-0.5, 0, -1.2]],
    )


def test_multi_turn_optimal_token_baseline_compares_valid_tokens():
    # The second tokens are now compared: (1·4 + 1·2)/2 = 3; the third is the first row's alone.
    rewards, mask = [[0, 0, 4], [1, 9, 2]], torch.tensor([[1, 1, 1], [1, 0, 1]])
    advantages, returns = otb("tir_optimal_token_baseline", rewards, mask)
    close(returns, [[4, 4, 4], [3, 2, 2]])
    close(advantages, [[0.5, 1, 4], [-0.5, 0, -1]])
    close(
        otb("tir_optimal_token_baseline", rewards, mask, handle_zero_tail=False)[0],
        [[0.5, 1, 0], [-0.5, 0, -1]],
    )


@walked("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_rollout_weights_enter_squared_and_epsilon_is_added(name):
    weights = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    # Paths ½ and 4·½ = 2: (½·4 + 2·3)/(5/2 + ½) = 8/3.
    advantages, _ = otb(name, [[4], [3]], torch.ones(2, 1), rollout_is_weights=weights, epsilon=0.5)
    close(advantages, [[4 - 8 / 3], [3 - 8 / 3]])


# Calling conventions

R, M, I, C = "token_level_rewards", "response_mask", "index", "config=None"  # noqa: E741
GROUPED = [R, M, I, "epsilon=1e-06"]
NORM = "norm_adv_by_std_in_grpo=True"
WEIGHTS = ["old_log_probs", "sum_pi_squared", "rollout_is_weights=None"]
TOKEN_BASELINE = [R, M, I, *WEIGHTS, "handle_zero_tail=True", "epsilon=1e-08", "**kwargs"]
# verl 0.9.1's names, order and defaults; ours may add a keyword-only release.
SIGNATURES = {
    "gae": ("compute_gae_advantage_return", [R, "values", M, "gamma", "lam"]),
    "grpo": ("compute_grpo_outcome_advantage", [*GROUPED, NORM, C]),
    "grpo_vectorized": ("compute_grpo_vectorized_outcome_advantage", [*GROUPED, NORM, C]),
    "gdpo": (
        "compute_gdpo_outcome_advantage",
        [*GROUPED, NORM, C, "non_tensor_batch=None", "batch=None", "**kwargs"],
    ),
    "grpo_passk": ("compute_grpo_passk_outcome_advantage", [*GROUPED, NORM, C, "**kwargs"]),
    "reinforce_plus_plus_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        [*GROUPED, C, "**kwargs"],
    ),
    "rloo": ("compute_rloo_outcome_advantage", [*GROUPED, C, "**kwargs"]),
    "opo": ("compute_opo_outcome_advantage", [*GROUPED, C, "**kwargs"]),
    "reinforce_plus_plus": ("compute_reinforce_plus_plus_outcome_advantage", [R, M, C, "**kwargs"]),
    "remax": ("compute_remax_outcome_advantage", [R, "reward_baselines", M, C, "**kwargs"]),
    "gpg": ("compute_gpg_outcome_advantage", [*GROUPED, "f_norm=1.0", "alpha=1.0", C, "**kwargs"]),
    "rloo_vectorized": ("compute_rloo_vectorized_outcome_advantage", [*GROUPED, C, "**kwargs"]),
    "optimal_token_baseline": ("compute_optimal_token_baseline_advantage", TOKEN_BASELINE),
    "tir_optimal_token_baseline": (
        "compute_multi_turn_optimal_token_baseline_advantage",
        TOKEN_BASELINE,
    ),
}


def test_names_arguments_and_defaults_are_verls():
    for name, function in ADVANTAGE_ESTIMATORS.items():
        parameters = inspect.signature(function).parameters.values()
        plain = [
            str(p.replace(annotation=inspect.Parameter.empty))
            for p in parameters
            if p.name != "release"
        ]
        assert (function.__name__, plain) == SIGNATURES[name]
        assert all(
            p.kind == p.KEYWORD_ONLY and p.default is None
            for p in parameters
            if p.name == "release"
        )
    assert ADVANTAGE_ESTIMATORS.keys() == SIGNATURES.keys()


def arguments(name):
    """A call of this estimator, with everything verl's trainer may pass it."""
    given = {
        "token_level_rewards": REWARDS,
        "response_mask": MASK,
        "index": INDEX,
        "config": {"gamma": 0.9},
    }
    given |= {
        "values": REWARDS + 1,
        "gamma": 0.9,
        "lam": 0.8,
        "reward_baselines": REWARDS[:, 0],
        "sum_pi_squared": REWARDS.abs(),
    }
    given["old_log_probs"] = -REWARDS
    if name == "grpo_passk":
        given["index"] = ["a", "a", "a", "c", "c", "c"]
    names = inspect.signature(ADVANTAGE_ESTIMATORS[name]).parameters
    return (
        given if "kwargs" in names else {key: value for key, value in given.items() if key in names}
    )


@walked("name", ADVANTAGE_ESTIMATORS)
def test_nothing_given_is_changed_and_nothing_carries_a_gradient(name):
    given = arguments(name)
    before = {key: x.clone() for key, x in given.items() if isinstance(x, torch.Tensor)}
    leaves = {
        key: x.clone().requires_grad_() if x.is_floating_point() else x for key, x in before.items()
    }
    for result in (
        ADVANTAGE_ESTIMATORS[name](**given),
        ADVANTAGE_ESTIMATORS[name](**{**given, **leaves}),
    ):
        assert len(result) == 2
        assert all(
            x.shape == REWARDS.shape and x.dtype == torch.float64 and not x.requires_grad
            for x in result
        )
    assert all(torch.equal(given[key], x) for key, x in before.items())


@walked("name", ADVANTAGE_ESTIMATORS)
def test_float32_stays_float32(name):
    given = {
        key: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in arguments(name).items()
    }
    wide = ADVANTAGE_ESTIMATORS[name](**arguments(name))
    for narrow, x in zip(ADVANTAGE_ESTIMATORS[name](**given), wide, strict=True):
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), x, rtol=1e-5, atol=1e-5)


class Labels:
    """What numpy arrays have, and lists have not."""

    def __init__(self, labels):
        self.labels = labels

    def tolist(self):
        return self.labels


LABELS = {
    "list": INDEX,
    "tuple": tuple(INDEX),
    "array": Labels(INDEX),
    "integers": [3, -1, 3, 10**20, 10**20, 10**20],
    "tensor": torch.tensor([5, 1, 5, 2, 2, 2]),
    "mixed": [1.5, None, 1.5, "c", "c", "c"],
}


@walked("index", LABELS.values(), ids=LABELS)
def test_any_labels_make_groups(index):
    assert group_numbers(index, REWARDS).tolist() == [0, 1, 0, 2, 2, 2]
    outcome(call("grpo", index=index, norm_adv_by_std_in_grpo=False), CENTERED)


@walked("config", [SimpleNamespace(gamma=0.5), {"gamma": 0.5}])
def test_any_config_is_read(config):
    close(call("reinforce_plus_plus", STEPS, TURNS, config=config)[1], [[2, 0, 2]])


def components(**config):
    return {
        "index": INDEX,
        "config": config,
        "non_tensor_batch": {"x": [0.0] * 6, "z": [1.0] * 6},
        "batch": {},
    }


@walked(
    ("name", "given", "error", "message"),
    [
        ("grpo_passk", {"index": INDEX}, InputError, "config was not given"),
        ("grpo_passk", {"index": INDEX, "config": {}}, InputError, "at least 2 samples"),
        ("reinforce_plus_plus", {}, InputError, "config was not given"),
        ("reinforce_plus_plus", {"config": {}}, InputError, "config.gamma is missing"),
        (
            "reinforce_plus_plus",
            {"config": {"gamma": 1.0}, "release": "newest"},
            SpecError,
            "release='newest'",
        ),
        (
            "reinforce_plus_plus",
            {"config": {"gamma": 1.0}, "release": "0.7.1"},
            SpecError,
            r"0\.7\.1.*older than 0\.8\.0",
        ),
        ("gdpo", components(), InputError, "gdpo_reward_keys is missing"),
        (
            "gdpo",
            components(gdpo_reward_keys=["x", "y"]),
            InputError,
            r"\['y'\] are not in non_tensor_batch, which has \['x'",
        ),
        (
            "gdpo",
            components(gdpo_reward_keys=["x"], gdpo_reward_weights=[1, 2]),
            InputError,
            r"one number per reward \(1\), got 2",
        ),
        ("grpo", {"index": INDEX[:5]}, InputError, "5 labels for 6 rows"),
        ("grpo", {"index": None}, InputError, "got NoneType"),
        ("rloo", {"index": [[1]] * 6}, InputError, "one label per row"),
        (
            "rloo",
            {"index": INDEX, "mask": MASK[:5]},
            InputError,
            r"response_mask has shape \(5, 2\)",
        ),
        (
            "rloo",
            {"index": INDEX, "rewards": REWARDS[:, 0]},
            InputError,
            r"token_level_rewards has \(6,\)",
        ),
    ],
)
def test_errors_name_the_argument(name, given, error, message):
    with pytest.raises(error, match=message):
        call(name, **given)
