"""Group advantages, whitening and the named estimators:
hand numbers, plain-Python references, brute force, edge cases.
"""

import itertools
import math
import statistics
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from walk import walked

import policyloss as pl
from policyloss import advantage as adv
from policyloss.advantage import group_advantages, whiten

# Groups {0, 2, 3}, {1, 4} and {5}: not contiguous, negative, far apart.
IDS = torch.tensor([7, -3, 7, 7, -3, 10**12])
REWARDS = torch.tensor([1.0, 3.0, 2.0, 6.0, 5.0, 4.0], dtype=torch.float64)
SCALES = ["std", "loo_std", "batch_std", "mad", "mean", None]
CENTERED = [(c, s) for c in ("mean", "loo") for s in SCALES]


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol
    )


def members(ids):
    """For each id, the rows that carry it."""
    return {g: [i for i, x in enumerate(ids.tolist()) if x == g] for g in set(ids.tolist())}


def reference(rewards, ids, center, scale, eps, ddof):
    """`group_advantages` from its docstring, one element at a time,
    with Python's own statistics.
    """
    r, out = rewards.tolist(), [0.0] * len(rewards)

    def std(x):
        if len(x) <= ddof or min(x) == max(x):
            return 0.0
        return statistics.stdev(x) if ddof else statistics.pstdev(x)

    for rows in members(ids).values():
        group = [r[i] for i in rows]
        for i in rows:
            others = [r[j] for j in rows if j != i]
            if center is None:
                base = 0.0
            elif center == "mean" or not others:
                base = statistics.fmean(group)
            else:
                base = statistics.fmean(others)
            spread = {
                "std": std(group),
                "loo_std": std(others),
                "batch_std": std(r),
                "mad": statistics.fmean(abs(x - statistics.fmean(group)) for x in group),
                "mean": statistics.fmean(group),
                None: 0.0,
            }[scale]
            out[i] = (r[i] - base) / (spread + eps if spread else 1.0)
    return out


def random_batch(seed, n=40, groups=9):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**40), 2**40, (groups,), generator=g)[
        torch.randint(0, groups, (n,), generator=g)
    ]
    return torch.rand(n, generator=g, dtype=torch.float64) * 3, ids


# group_advantages


@walked(
    ("center", "scale", "expected"),
    [
        # Group {1, 2, 6}: mean 3, deviations −2, −1, 3, sample variance (4 + 1 + 9)/2 = 7. Group
        # {3, 5}: mean 4, ∓1, variance 2.
        ("mean", "std", [-2 / 7**0.5, -1 / 2**0.5, -1 / 7**0.5, 3 / 7**0.5, 1 / 2**0.5, 0]),
        ("mean", None, [-2, -1, -1, 3, 1, 0]),
        ("mean", "mean", [-2 / 3, -1 / 4, -1 / 3, 3 / 3, 1 / 4, 0]),
        # Mean deviations: (2 + 1 + 3)/3 = 2, and 1.
        ("mean", "mad", [-1, -1, -0.5, 1.5, 1, 0]),
        # The others of 1: mean 4; of 2: mean 3.5; of 6: mean 1.5. The other of 3 is 5.
        ("loo", None, [-3, -2, -1.5, 4.5, 2, 0]),
        # Std of the others: {2, 6} √8, {1, 6} √12.5, {1, 2} √0.5;
        # of one other: 0, so nothing is divided.
        ("loo", "loo_std", [-3 / 8**0.5, -2, -1.5 / 12.5**0.5, 4.5 / 0.5**0.5, 2, 0]),
        # All: mean 3.5, deviations² 6.25 + 0.25 + 2.25 + 6.25 + 2.25 + 0.25 = 17.5,
        # variance 17.5/5 = 3.5.
        (
            "mean",
            "batch_std",
            [-2 / 3.5**0.5, -1 / 3.5**0.5, -1 / 3.5**0.5, 3 / 3.5**0.5, 1 / 3.5**0.5, 0],
        ),
        (None, None, [1, 3, 2, 6, 5, 4]),
    ],
)
def test_by_hand(center, scale, expected):
    close(group_advantages(REWARDS, IDS, center=center, scale=scale, eps=0.0), expected)


@walked("center", ["mean", "loo", None])
@walked("scale", SCALES)
@walked("ddof", [0, 1])
def test_equals_the_definition(center, scale, ddof):
    for seed in range(3):
        rewards, ids = random_batch(seed)
        actual = group_advantages(rewards, ids, center=center, scale=scale, eps=1e-6, ddof=ddof)
        close(
            actual,
            reference(rewards, ids, center, scale, 1e-6, ddof),
            atol=1e-11 if scale == "loo_std" else 1e-12,
        )


def test_population_deviation_and_eps():
    # {0, 2}: mean 1, population std 1; 1/(1 + 0.25) = 0.8
    close(
        group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([5, 5]), eps=0.25, ddof=0),
        [-0.8, 0.8],
    )


@walked(("center", "scale"), CENTERED)
@walked("value", [0.1, 1 / 3, -0.7, 1e8 + 0.1, 1e-30, 0.0])
@walked("dtype", [torch.float32, torch.float64])
def test_a_constant_group_gives_exactly_zero(center, scale, value, dtype):
    sizes = [2, 3, 5, 6, 7, 10, 17]
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.full((len(ids),), value, dtype=dtype)
    assert (group_advantages(rewards, ids, center=center, scale=scale, eps=0.0) == 0).all()


@walked("scale", ["std", "loo_std", "batch_std"])
@walked("n", [3, 6, 7, 10, 11])
def test_a_spread_of_zero_divides_nothing(scale, n):
    # In float64 the mean of n times 0.1 is not always 0.1;
    # with eps = 0 any residue would make the result enormous.
    rewards = torch.full((n,), 0.1, dtype=torch.float64)
    assert torch.equal(
        group_advantages(rewards, torch.zeros(n).long(), center=None, scale=scale, eps=0.0), rewards
    )


@walked("common", [0.1, 0.35, 0.7, 1 / 3])
@walked("winner", [0.2, 1.0, -3.3])
def test_others_that_are_equal_divide_nothing(common, winner):
    for n in range(3, 12):
        rewards = torch.tensor([common] * n + [winner], dtype=torch.float64)
        close(adv.grpo_loo(rewards, torch.zeros(n + 1).long(), eps=0.0)[-1], winner - common)


@walked("common", [0.35, 0.4, 0.3, 1 / 3])
def test_one_winner_among_equals_is_not_blown_up(common):
    # The seven others are equal, so their spread is 0 and the winner keeps r − mean of the others;
    # in float32 the residue of E[x²] − E[x]² is about 1e-4, which made this 4000.
    rewards = torch.tensor([common] * 7 + [1.0])
    out = adv.grpo_loo(rewards, torch.zeros(8, dtype=torch.int64))
    close(out[-1], 1 - common, atol=1e-7)
    # Each loser's others: six equal and the winner; d = 1 − common: mean of others = common + d/7,
    # variance d²·(6/7)/6 = d²/7, so (−d/7)/(d/√7) = −1/√7.
    close(out[:-1], [-1 / 7**0.5] * 7, atol=1e-5)


@walked(("center", "scale"), CENTERED)
def test_a_group_of_one_gives_zero_or_the_raw_reward(center, scale):
    rewards, ids = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64), torch.tensor([4, 9, 9])
    assert group_advantages(rewards, ids, center=center, scale=scale)[0] == 0
    raw = group_advantages(rewards, ids, center=center, scale=scale, single="raw", eps=0.5)
    std = statistics.stdev(rewards.tolist())
    divisor = {"batch_std": std + 0.5, "mean": 1.0, None: 1.0}.get(scale, 1.5)
    close(raw[0], 0.7 / divisor)


def test_row_order_changes_no_bit():
    rewards, ids = random_batch(4)
    rewards = rewards.float()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for center, scale in CENTERED:
        straight = group_advantages(rewards, ids, center=center, scale=scale)
        assert torch.equal(
            straight[order],
            group_advantages(rewards[order], ids[order], center=center, scale=scale),
        )


def test_group_names_do_not_matter():
    rewards, ids = random_batch(5)
    dense = torch.unique(ids, return_inverse=True)[1]
    assert torch.equal(
        group_advantages(rewards, ids), group_advantages(rewards, dense.to(torch.int32))
    )


@walked(
    ("name", "extra"),
    [(n, {}) for n in ("grpo", "dr_grpo", "rloo", "grpo_loo", "maxrl", "passk_max_gap")]
    + [("passk_combinatorial", {"k": 2})],
)
def test_a_nan_reward_shows_in_its_group_only(name, extra):
    rewards = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0, 6.0, 9.0, float("nan")])
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])
    out = adv.estimator(name)(rewards, ids, **extra)
    clean = adv.estimator(name)(rewards[[0, 1, 4, 5, 6]], ids[[0, 1, 4, 5, 6]], **extra)
    assert torch.equal(out[[0, 1, 4, 5, 6]], clean)
    assert out[2].isnan()
    assert out[3].isnan()
    if name != "passk_max_gap":
        assert out[7].isnan()


@walked("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_other_reward_types_are_computed_in_float32(dtype):
    rewards = torch.tensor([0, 1, 1, 0]).to(dtype)
    out = adv.grpo(rewards, torch.zeros(4, dtype=torch.int64))
    assert out.dtype == torch.float32
    assert torch.equal(out, adv.grpo(rewards.float(), torch.zeros(4, dtype=torch.int64)))


def test_no_gradient():
    rewards = REWARDS.clone().requires_grad_()
    assert not group_advantages(rewards, IDS).requires_grad
    assert not whiten(rewards, torch.ones(6)).requires_grad
    assert not adv.remax(rewards, rewards).requires_grad


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_no_loop_over_groups():
    def ops(n):
        rewards, ids = torch.rand(n), torch.arange(n) // 4
        with CountOps() as counter:
            adv.grpo_loo(rewards, ids)
            adv.gdpo(rewards.view(-1, 1).expand(-1, 3), ids)
            adv.passk_max_gap(rewards, ids)
        return counter.ops

    assert ops(8) == ops(800)


# whiten


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 2.0, float("nan")], [6.0, float("inf"), 3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    # {1, 2, 6, 3}: mean 3, squares 4 + 1 + 9 + 0 = 14, unbiased variance 14/3
    s = (14 / 3) ** 0.5
    close(whiten(x, mask, eps=0.0), [[-2 / s, -1 / s, 0], [3 / s, 0, 0]])
    close(whiten(x, mask, eps=0.0, mean=False), [[3 - 2 / s, 3 - 1 / s, 0], [3 + 3 / s, 0, 3]])
    # eps is added to the variance: √(14/3 + 1/3) = √5
    close(whiten(x, mask, eps=1 / 3), [[-2 / 5**0.5, -1 / 5**0.5, 0], [3 / 5**0.5, 0, 0]])


def test_whiten_gives_mean_zero_and_variance_one():
    g = torch.Generator().manual_seed(0)
    x, mask = 50 + 7 * torch.randn(30, 40, generator=g), torch.rand(30, 40, generator=g) < 0.5
    y = whiten(x, mask)[mask].double()
    assert abs(y.mean()) < 1e-6
    assert abs(y.var() - 1) < 1e-6


def test_whiten_without_information():
    assert (whiten(torch.full((3, 5), 0.1), torch.ones(3, 5)) == 0).all()
    assert whiten(torch.tensor([4.0, 9.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([4.0, 9.0]), torch.tensor([1, 0]), mean=False).tolist() == [4.0, 0.0]
    assert whiten(torch.tensor([4.0, 9.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.zeros(0, 3), torch.ones(0, 3)).shape == (0, 3)


def on_rank(rank, store, out):
    """The results of one of two ranks for its uneven share of 40 sequences, saved to `out`."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    rewards, _ = random_batch(6)
    mine = slice(0, 15) if rank == 0 else slice(15, 40)
    parts = batch_wide(rewards[mine], torch.arange(40)[mine] // 5, group=dist.group.WORLD)
    dist.destroy_process_group()
    torch.save(parts, out)


def batch_wide(rewards, ids, group=None):
    return {
        "whiten": whiten(rewards, torch.arange(len(rewards)) % 5 > 1, group=group),
        "batch_std": group_advantages(rewards, ids, scale="batch_std", group=group),
        "asymre": adv.asymre(rewards, ids // 4, single="raw", group=group),
        "flash_reinforce": adv.flash_reinforce(rewards, group=group),
        "hierarchical_grpo": adv.hierarchical_grpo(
            rewards, ids // 4, ids, ids % 3, torch.tensor([1]), group=group
        ),
        "top_entropy_mask": adv.top_entropy_mask(rewards, rewards < 9, 0.5, group=group).double(),
        "gpg": adv.gpg((rewards > 2.7).double(), ids, group=group),
        "gdpo": adv.gdpo(torch.stack((rewards, rewards**2), 1), ids, group=group),
        "reinforce_pp": adv.reinforce_pp(
            rewards.view(-1, 5), torch.ones(len(rewards) // 5, 5), 0.9, group=group
        ).view(-1),
        "reinforce_pp_baseline": adv.reinforce_pp_baseline(rewards, ids, ids + 1, group=group),
    }


def test_ranks_share_the_batch_statistics(tmp_path):
    store, outs = tmp_path / "store", [tmp_path / "0.pt", tmp_path / "1.pt"]
    other = mp.get_context("spawn").Process(target=on_rank, args=(1, store, outs[1]))
    other.start()
    on_rank(0, store, outs[0])
    other.join()
    parts = [torch.load(out) for out in outs]
    rewards, _ = random_batch(6)
    for name, whole in batch_wide(rewards, torch.arange(40) // 5).items():
        close(torch.cat([part[name] for part in parts]), whole)
        assert (
            parts[0][name] - batch_wide(rewards[:15], torch.arange(15) // 5)[name]
        ).abs().max() > 1e-3


# named estimators


def test_grpo_and_its_relatives_by_hand():
    # Group {1, 0, 0, 0}: mean 1/4, sample variance (9/16 + 3/16)/3 = 1/4, std 1/2.
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.full((4,), -1)
    close(adv.grpo(rewards, ids, eps=0.0), [1.5, -0.5, -0.5, -0.5])
    close(adv.grpo(rewards, ids, eps=0.5), [0.75, -0.25, -0.25, -0.25])
    close(adv.dr_grpo(rewards, ids), [0.75, -0.25, -0.25, -0.25])
    close(adv.rloo(rewards, ids), [1, -1 / 3, -1 / 3, -1 / 3])
    close(adv.maxrl(rewards, ids, eps=0.0), [3, -1, -1, -1])
    # The winner's others are all 0: undivided. A loser's others {1, 0, 0}: mean 1/3,
    # variance (4/9 + 2/9)/2 = 1/3.
    close(adv.grpo_loo(rewards, ids, eps=0.0), [1] + [-1 / 3 / (1 / 3) ** 0.5] * 3)


def test_the_mean_deviation_weighs_easy_and_hard_prompts_alike():
    # One or four of eight right: Σ|A| is 8 for both, while the standard deviation gives less to the
    # hard prompt.
    rewards, ids = torch.zeros(16, dtype=torch.float64), torch.arange(16) // 8
    rewards[0], rewards[8:12] = 1, 1
    hard, easy = group_advantages(rewards, ids, scale="mad", eps=0.0).abs().view(2, 8).sum(1)
    close(hard, 8)
    close(easy, 8)
    hard, easy = group_advantages(rewards, ids, eps=0.0).abs().view(2, 8).sum(1)
    assert hard < 0.7 * easy


def test_asymre_by_hand():
    # Means 3 and 4, and a group of one, its own mean.
    close(adv.asymre(REWARDS, IDS), [-1.9, -0.9, -0.9, 3.1, 1.1, 0.1])
    close(adv.asymre(REWARDS, IDS, shift=-1.0, single="raw"), [-1, 0, 0, 4, 2, 4])
    close(adv.asymre(torch.ones(3).double(), torch.zeros(3).long()), [0.1, 0.1, 0.1])


def test_baselines_of_the_batch_by_hand():
    # Mean 3.5, deviations² 17.5: population variance 17.5/6.
    close(adv.flash_reinforce(REWARDS), [-2.5, -0.5, -1.5, 2.5, 1.5, 0.5])
    std = (17.5 / 6) ** 0.5
    close(adv.prpo(REWARDS, eps=0.0), [x / std for x in (-2.5, -0.5, -1.5, 2.5, 1.5, 0.5)])
    assert adv.prpo(torch.full((3,), 0.1)).tolist() == [0.0, 0.0, 0.0]


def test_hierarchical_grpo_by_hand():
    # Prompt 7 has episodes 1 and 2, prompt 8 has episode 1, another one than that of prompt 7.
    # Proposers (role 5): {1, 3} of prompt 7, {9} of prompt 8. Solvers (role 6): {0, 4} of the first
    # episode, {2, 10} of the second, {6, 8} of the third.
    rewards = torch.tensor([1.0, 0.0, 4.0, 3.0, 2.0, 10.0, 9.0, 6.0, 8.0], dtype=torch.float64)
    prompt = torch.tensor([7, 7, 7, 7, 7, 7, 8, 8, 8])
    episode = torch.tensor([1, 1, 1, 2, 2, 2, 1, 1, 1])
    role = torch.tensor([5, 6, 6, 5, 6, 6, 5, 6, 6])
    expected = [-1, -2, 2, 1, -4, 4, 0, -1, 1]
    close(adv.hierarchical_grpo(rewards, prompt, episode, role, torch.tensor([6])), expected)
    # No role is compared inside its episode: the solvers {0, 4, 2, 10} have mean 4.
    expected = [-1, -4, 0, 1, -2, 6, 0, -1, 1]
    close(adv.hierarchical_grpo(rewards, prompt, episode, role, torch.tensor([9])), expected)


def test_opo_by_hand():
    # Baseline (3·1 + 1·0)/(3 + 1) = 3/4 in the first group; the second has one sequence.
    rewards, ids, lengths = (
        torch.tensor([1.0, 0.0, 5.0]),
        torch.tensor([1, 1, 2]),
        torch.tensor([3, 1, 8]),
    )
    close(adv.opo(rewards, ids, lengths), [0.25, -0.75, 0])
    close(adv.opo(rewards, ids, lengths, single="raw"), [0.25, -0.75, 5])
    close(adv.opo(rewards, ids, torch.tensor([2, 2, 8])), adv.dr_grpo(rewards, ids))


def test_remax_by_hand():
    close(adv.remax(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 1.0])), [0.75, -1.0])


def test_gpg_by_hand():
    # Group 1 is {1, 0}, group 2 is {1, 1}. Informative: 2 of 4 sequences, α = 2.
    # Rewards that are not 0: 3, α = 4/3.
    rewards, ids = (
        torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([1, 1, 2, 2]),
    )
    close(adv.gpg(rewards, ids), [1, -1, 0, 0])
    close(adv.gpg(rewards, ids, valid="nonzero", f_norm=0.5), [4 / 3, -4 / 3, 0, 0])
    close(adv.gpg(torch.zeros(2), torch.tensor([1, 1])), [0, 0])
    # A raw group of one has a gradient, so it counts: α = 2/2.
    close(adv.gpg(torch.tensor([3.0, 4.0]), torch.tensor([1, 2]), single="raw"), [3, 4])


def test_reinforce_pp_by_hand():
    # γ = 0.5, reward 2 on the last valid token: returns 1, ·, 2 and 4 (a row of one token): mean
    # 7/3, squares (16 + 1 + 25)/9 = 42/9, variance 21/9 = 7/3.
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    s = (7 / 3) ** 0.5
    expected = [[-4 / 3 / s, 0, -1 / 3 / s], [5 / 3 / s, 0, 0]]
    close(
        adv.reinforce_pp(torch.tensor([2.0, 4.0], dtype=torch.float64), mask, 0.5, eps=0.0),
        expected,
    )
    on_tokens = torch.tensor([[0.0, 9.0, 2.0], [4.0, 9.0, 9.0]], dtype=torch.float64)
    close(adv.reinforce_pp(on_tokens, mask, 0.5, eps=0.0), expected)
    packed = adv.reinforce_pp(
        on_tokens.view(-1), mask.view(-1), 0.5, cu_seqlens=torch.tensor([0, 3, 6]), eps=0.0
    )
    close(packed.view(2, 3), expected)


def test_reinforce_pp_baseline_is_whitening_of_tokens():
    rewards, ids = random_batch(7)
    lengths = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(7))
    mask = torch.arange(6) < lengths[:, None]
    by_token = whiten(adv.dr_grpo(rewards, ids)[:, None].expand(40, 6), mask)
    by_sequence = adv.reinforce_pp_baseline(rewards, ids, lengths)
    close(torch.where(mask, by_sequence[:, None], 0), by_token)
    assert (by_sequence[lengths == 0] == 0).all()


def test_gdpo_by_hand():
    # First reward: {0, 1} → ∓1/√2 (times weight 2); second: {4, 2} → ±1/√2. Sum: −1/√2, 1/√2;
    # second group: first reward constant, second {1, 3} → −1/√2, 1/√2. All: mean 0, variance 4·½/3
    # = 2/3, so ∓(1/√2)/√(2/3) = ∓√3/2.
    rewards = torch.tensor([[0.0, 4.0], [1.0, 2.0], [5.0, 1.0], [5.0, 3.0]], dtype=torch.float64)
    out = adv.gdpo(rewards, torch.tensor([3, 3, -3, -3]), weights=[2.0, 1.0], eps=0.0)
    h = 3**0.5 / 2
    close(out, [-h, h, -h, h], atol=1e-7)


def test_gdpo_of_one_reward_is_grpo_whitened():
    rewards, ids = random_batch(8)
    close(adv.gdpo(rewards[:, None], ids), whiten(adv.grpo(rewards, ids), torch.ones(40)))
    lengths = torch.arange(40) % 5
    tokens = torch.arange(5) < lengths[:, None]
    close(
        torch.where(tokens, adv.gdpo(rewards[:, None], ids, lengths=lengths)[:, None], 0),
        whiten(adv.grpo(rewards, ids)[:, None].expand(40, 5), tokens),
    )


def test_gdpo_does_not_depend_on_the_scale_of_a_reward():
    g = torch.Generator().manual_seed(9)
    rewards, ids = torch.randn(24, 3, generator=g, dtype=torch.float64), torch.arange(24) % 6
    scaled = rewards * torch.tensor([1.0, 1000.0, 0.001], dtype=torch.float64)
    close(adv.gdpo(rewards, ids, eps=0.0), adv.gdpo(scaled, ids, eps=0.0))


def test_passk_max_gap_by_hand():
    # {1, 5, 2}: the best leads the second by 3; mean 8/3, squares (25 + 49 + 4)/9 = 78/9,
    # variance 13/3. {4, 4, 0}: a tie.
    rewards = torch.tensor([1.0, 4.0, 5.0, 4.0, 2.0, 0.0, 8.0], dtype=torch.float64)
    ids = torch.tensor([2, 9, 2, 9, 2, 9, 5])
    close(adv.passk_max_gap(rewards, ids, scale=None), [0, 0, 3, 0, 0, 0, 0])
    close(adv.passk_max_gap(rewards, ids, eps=0.0), [0, 0, 3 / (13 / 3) ** 0.5, 0, 0, 0, 0])


def test_passk_combinatorial_by_hand():
    # One right of four, k = 2: R = 1 − C(3,2)/C(4,2) = 1/2, σ = 1/2; right (1 − 1/2)/σ = 1;
    # wrong (1/2 − C(2,1)/C(3,1))/σ = (1/2 − 2/3)·2 = −1/3.
    close(
        adv.passk_combinatorial(
            torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4).long(), 2
        ),
        [-1 / 3, 1, -1 / 3, -1 / 3],
    )


def brute_force_passk(rewards, k):
    """Every subset of k, rewarded by its best; a member's advantage
    is the mean over its subsets of the standardised reward.
    """
    n = len(rewards)
    subsets = list(itertools.combinations(range(n), k))
    best = [max(rewards[i] for i in s) for s in subsets]
    if not subsets or min(best) == max(best):
        return [0.0] * n
    mean, std = statistics.fmean(best), statistics.pstdev(best)
    return [
        statistics.fmean((b - mean) / std for s, b in zip(subsets, best, strict=True) if i in s)
        for i in range(n)
    ]


@walked("k", [1, 2, 3, 4, 7])
@walked("kind", ["binary", "ties", "real"])
def test_passk_combinatorial_equals_brute_force(k, kind):
    g = torch.Generator().manual_seed(k)
    ids = torch.repeat_interleave(torch.tensor([-5, 100, 3, 42, 8]), torch.tensor([1, 3, 6, 8, 9]))
    ids = ids[torch.randperm(len(ids), generator=g)]
    real = torch.randn(len(ids), generator=g, dtype=torch.float64)
    rewards = {"binary": (real > 0.5).double(), "ties": real.round(), "real": real}[kind]
    out = adv.passk_combinatorial(rewards, ids, k)
    for rows in members(ids).values():
        close(out[rows], brute_force_passk(rewards[rows].tolist(), k))


def test_passk_combinatorial_of_one_is_grpo():
    rewards, ids = random_batch(10)
    close(adv.passk_combinatorial(rewards, ids, 1), adv.grpo(rewards, ids, eps=0.0, ddof=0))


@walked(("n", "wrong", "k"), [(64, 60, 8), (128, 100, 16), (256, 255, 4), (16, 3, 4)])
def test_passk_combinatorial_equals_the_formula_of_the_paper(n, wrong, k):
    rewards = (torch.arange(n) >= wrong).double()
    out = adv.passk_combinatorial(rewards, torch.zeros(n).long(), k)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    if mean == 1:
        assert (out == 0).all()  # fewer than k wrong: every subset passes
        return
    std = (mean * (1 - mean)) ** 0.5
    close(out[-1], (1 - mean) / std)
    close(out[0], (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std)


def test_passk_combinatorial_without_scale_and_with_shift():
    rewards, ids = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4).long()
    # Undivided: right 1 − 1/2, wrong C-mean 1/3 − 1/2 (see above);
    # a shift of all rewards changes nothing.
    close(adv.passk_combinatorial(rewards, ids, 2, scale=None), [-1 / 6, 0.5, -1 / 6, -1 / 6])
    close(adv.passk_combinatorial(rewards + 100, ids, 2, scale=None), [-1 / 6, 0.5, -1 / 6, -1 / 6])


@walked(
    "name",
    sorted(
        set(adv.ESTIMATORS) - {"gae", "iw_opd", "opd", "optimal_token_baseline", "reinforce_pp"}
    ),
)
def test_empty_input(name):
    extra = {
        "remax": [torch.zeros(0)],
        "opo": [torch.zeros(0).long(), torch.zeros(0).long()],
        "reinforce_pp_baseline": [torch.zeros(0).long(), torch.zeros(0).long()],
        "passk_combinatorial": [torch.zeros(0).long(), 2],
        "hierarchical_grpo": [torch.zeros(0).long()] * 4,
        "flash_reinforce": [],
        "prpo": [],
    }.get(name, [torch.zeros(0).long()])
    rewards = torch.zeros(0, 2) if name == "gdpo" else torch.zeros(0)
    assert adv.ESTIMATORS[name](rewards, *extra).shape == (0,)


def test_policy_loss_takes_the_result():
    # One token each, on policy: ratio 1, so the token-mean loss
    # is −mean(A) = −(0.75 − 3·0.25)/4 = 0, its gradient −A/4.
    logp = torch.full((4, 1), -1.0, requires_grad=True)
    advantages = adv.dr_grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long())
    pl.policy_loss(
        pl.preset("ppo"), logp, logp.detach(), advantages, torch.ones(4, 1)
    ).loss.backward()
    close(logp.grad.view(-1), [-0.1875, 0.0625, 0.0625, 0.0625], atol=1e-7)


# errors


def test_an_unknown_estimator_names_the_closest():
    with pytest.raises(pl.InputError, match="did you mean 'grpo'"):
        adv.estimator("grpoo")
    assert adv.estimator("rloo") is adv.rloo


@walked(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 3)}, r"a tensor \[S\]"),
        ({"rewards": [1.0]}, "got list"),
        ({"group_ids": torch.zeros(3)}, "tensor of integers"),
        ({"group_ids": [1, 2, 3, 4]}, "got list"),
        ({"group_ids": torch.zeros(3).long()}, "give one id each"),
        ({"center": "median"}, "unknown center 'median'"),
        ({"scale": "stdev"}, "did you mean 'std'"),
        ({"single": "one"}, "unknown single"),
        ({"eps": -1e-6}, "eps must be >= 0"),
        ({"ddof": 2}, "ddof must be 0"),
        ({"weights": torch.ones(3)}, "weights has shape .* give one number per sequence"),
        ({"weights": torch.ones(4), "center": "loo"}, 'belong to center="mean"'),
    ],
)
def test_bad_input_is_named(change, message):
    call = {"rewards": torch.zeros(4), "group_ids": torch.zeros(4).long()} | change
    with pytest.raises(pl.InputError, match=message):
        group_advantages(**call)


@walked(
    ("call", "message"),
    [
        (lambda r, i: adv.passk_combinatorial(r, i, 0), "k must be an integer >= 1"),
        (lambda r, i: adv.passk_combinatorial(r, i, 2, scale="mean"), "unknown scale"),
        (lambda r, i: adv.passk_max_gap(r.view(2, 2), i), "rewards must be"),
        (lambda r, i: adv.gpg(r, i, valid="all"), "unknown valid"),
        (lambda r, i: adv.gpg(r, i, f_norm=0.0), "f_norm must be > 0"),
        (lambda r, i: adv.gdpo(r, i), r"rewards must be \[S, K\]"),
        (lambda r, i: adv.gdpo(r.view(4, 1), i, weights=[1.0, 2.0]), "one number per reward"),
        (lambda r, i: adv.gdpo(r.view(4, 1), i[:3]), "group_ids has shape"),
        (lambda r, i: adv.opo(r, i, torch.ones(3)), "lengths has shape"),
        (lambda r, i: adv.remax(r, torch.ones(3)), "baseline_rewards has shape"),
        (lambda r, i: adv.asymre(r, i, shift=math.inf), "shift must be finite"),
        (lambda r, i: adv.flash_reinforce(r.view(2, 2)), r"a tensor \[S\]"),
        (lambda r, i: adv.prpo([1.0]), "rewards must be"),
        (lambda r, i: adv.hierarchical_grpo(r, i, i, i[:3], i), "role_ids has shape"),
        (lambda r, i: adv.hierarchical_grpo(r, i, i, i, [1]), "episode_roles must be"),
        (lambda r, i: whiten(r.long(), torch.ones(4)), "floating-point"),
        (lambda r, i: whiten(r, torch.ones(3)), "mask has shape"),
        (lambda r, i: whiten(r, torch.ones(4), eps=-1.0), "eps must be >= 0"),
    ],
)
def test_bad_input_of_the_others_is_named(call, message):
    with pytest.raises(pl.InputError, match=message):
        call(torch.rand(4), torch.zeros(4).long())
