"""One-line mistakes in preference losses, as `Mutant`s of mutants.py."""

from __future__ import annotations

_TESTS = "test_preference.py::"
_HAND = _TESTS + "test_losses_by_hand"
_FUNCTIONAL = "policyloss/functional/preference.py"
_PARTS = "policyloss/preference/spec.py"
_LOSS = "policyloss/preference/loss.py"
PREFERENCE = (
    (
        "preference_power_of_the_inverse",
        _FUNCTIONAL,
        "return torch.expm1(((alpha - 1) * x)",
        "return torch.expm1(((1 - alpha) * x)",
        _HAND,
    ),
    (
        "preference_odds_upside_down",
        _FUNCTIONAL,
        "return x - torch.log(-torch.expm1(x))",
        "return x + torch.log(-torch.expm1(x))",
        _HAND,
    ),
    (
        "preference_smoothing_swapped",
        _FUNCTIONAL,
        "(1 - smoothing) * loss - smoothing * logsigmoid(-z)",
        "smoothing * loss - (1 - smoothing) * logsigmoid(-z)",
        _HAND,
    ),
    (
        "preference_forward_kl_of_the_labels",
        _FUNCTIONAL,
        "win + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(smoothing))",
        "win + torch.sigmoid(-z) * (logsigmoid(-z) - math.log1p(-smoothing))",
        _HAND,
    ),
    (
        "preference_gate_reversed",
        _FUNCTIONAL,
        "gate = torch.sigmoid(z / tau)",
        "gate = torch.sigmoid(-z / tau)",
        _HAND,
    ),
    (
        "preference_exponent_unbounded",
        _FUNCTIONAL,
        "torch.exp((-z).clamp(max=LARGEST_EXPONENT))",
        "torch.exp(-z)",
        _TESTS + "test_far_scores_stay_finite",
    ),
    (
        "preference_ranks_are_an_order",
        _FUNCTIONAL,
        "torch.where(valid, b, torch.inf).sort().values[rank]",
        "torch.where(valid, b, torch.inf).sort().values[order]",
        _TESTS + "test_aot_by_hand",
    ),
    (
        "preference_empty_pairs_have_a_rank",
        _FUNCTIONAL,
        "order = torch.where(valid, a, torch.inf).argsort(stable=True)",
        "order = a.argsort(stable=True)",
        _TESTS + "test_aot_by_hand",
    ),
    (
        "preference_target_added",
        _PARTS,
        "self.beta * m - self.target",
        "self.beta * m + self.target",
        _HAND,
    ),
    (
        "preference_hinge_at_zero",
        _PARTS,
        "torch.relu(1 - self.beta * m)",
        "torch.relu(-self.beta * m)",
        _HAND,
    ),
    (
        "preference_square_at_another_margin",
        _PARTS,
        "(m - 1 / (2 * self.beta)) ** 2",
        "(m - 1 / self.beta) ** 2",
        _HAND,
    ),
    (
        "preference_sigmoid_rewards_the_rejected",
        _PARTS,
        "torch.sigmoid(-self.beta * m)",
        "torch.sigmoid(self.beta * m)",
        _HAND,
    ),
    (
        "preference_weights_keep_their_gradient",
        _LOSS,
        "t.sequence_mean(call.logp.detach() - squares)",
        "t.sequence_mean(call.logp - squares)",
        _TESTS + "test_wpo_by_hand",
    ),
    (
        "preference_tail_of_the_longer_answer",
        _LOSS,
        "shorter = torch.minimum(counts[0::2], counts[1::2])",
        "shorter = torch.maximum(counts[0::2], counts[1::2])",
        _HAND,
    ),
    (
        "preference_mean_over_the_width",
        _LOSS,
        'total if score.length == "sum" else total / self.t.lengths.clamp(min=1)',
        'total if score.length == "sum" else total / self.t.mask.shape[-1]',
        _HAND,
    ),
    (
        "preference_rejected_measured_upwards",
        _LOSS,
        'return z - l if term.margin == "rejected"',
        'return l - z if term.margin == "rejected"',
        _HAND,
    ),
    (
        "preference_baseline_forgotten",
        _LOSS,
        'z - w if "against" in term.margin else w - z',
        'z - w if "against" in term.margin else w',
        _TESTS + "test_kto_by_hand",
    ),
    (
        "preference_labels_swapped",
        _LOSS,
        'side = ~self.labels if term.margin == "rejected" else self.labels',
        'side = self.labels if term.margin == "rejected" else ~self.labels',
        _TESTS + "test_kto_by_hand",
    ),
    (
        "preference_likelihood_of_all_answers",
        _LOSS,
        "x = x - fill(call.logp, call.chosen_tokens)",
        "x = x - fill(call.logp, t.mask)",
        _HAND,
    ),
    (
        "preference_likelihood_by_the_tokens_of_the_call",
        _LOSS,
        'tokens = step.statistics["chosen_tokens"]',
        "tokens = fill(call.t.counts, call.is_chosen).sum()",
        _TESTS + "test_any_cut_is_the_whole",
    ),
    (
        "preference_totals_count_all_tokens",
        _LOSS,
        "of_chosen = _Call(t, mask, mask, chosen).chosen_tokens",
        "of_chosen = mask",
        _TESTS + "test_any_cut_is_the_whole",
    ),
    (
        "preference_accuracy_of_the_wrong",
        _LOSS,
        "Stat(count(margin > 0), count(pairs))",
        "Stat(count(margin < 0), count(pairs))",
        _TESTS + "test_metrics_by_hand",
    ),
)
