"""One-line mistakes in compiled losses, for `mutants.py`, in the order of `head_mutants.HEAD`."""

from __future__ import annotations

_KERNELS, _NODE = "test_fused.py::", "test_in_graph.py::"

COMPILED = (
    (
        "kernel_takes_the_wrong_bound",
        "policyloss/compiled/token_graph.py",
        '"maximum": "tl.maximum(',
        '"maximum": "tl.minimum(',
        _KERNELS + "test_the_hand_computed_loss",
    ),
    (
        "kernel_clamps_the_other_side",
        "policyloss/compiled/token_graph.py",
        '(("min", "<"), ("max", ">"))',
        '(("min", ">"), ("max", "<"))',
        _KERNELS + "test_the_hand_computed_loss",
    ),
    (
        "node_of_a_graph_without_gradient",
        "policyloss/compiled/in_graph.py",
        "of_leaves) if leaves else loss, packed",
        "of_leaves) if not leaves else loss, packed",
        _NODE + "test_a_compiler_sees_one_operation",
    ),
    (
        "node_of_a_graph_trains_nothing",
        "policyloss/compiled/in_graph.py",
        "check_gradients(spec, Inputs.of(first, second, third, fourth, rest))",
        "Inputs.of(first, second, third, fourth, rest)",
        _NODE + "test_a_wrong_call_raises_the_usual_error",
    ),
    (
        "node_shares_places_between_levels",
        "policyloss/compiled/in_graph.py",
        'kind = f"{text} {level} {dp_size}',
        'kind = f"{text} {dp_size}',
        _NODE + "test_every_level_of_metrics_within_a_graph",
    ),
    (
        "node_needs_a_metric",
        "policyloss/compiled/call.py",
        "RecordPlaces.pack(self.metrics, self.loss)",
        "RecordPlaces.pack(self.metrics)",
        _NODE + "test_every_level_of_metrics_within_a_graph",
    ),
    (
        "node_in_the_exact_mode",
        "policyloss/compiled/in_graph.py",
        "if text is None or is_exact():",
        "if text is None:",
        _NODE + "test_the_exact_mode_stays_out_of_the_graph",
    ),
    (
        "node_of_the_current_policy_is_not_made",
        "policyloss/compiled/in_graph.py",
        "        old_logp = logp  #",
        "        pass  #",
        _NODE + "test_a_loss_against_the_policy_itself",
    ),
    (
        "node_computes_gradients_without_autograd",
        "policyloss/compiled/in_graph.py",
        "if enabled and tensors[name].requires_grad]",
        "if tensors[name].requires_grad]",
        _NODE + "test_a_gradient_that_nobody_wants_is_not_computed",
    ),
    (
        "kernel_sums_beyond_the_end",
        "policyloss/compiled/token_program.py",
        'value = f"tl.where(live, {writer.value(node.args[0], kind)}, {_start(node)})"',
        "value = writer.value(node.args[0], kind)",
        _KERNELS + "test_only_present_tensors_are_summed",
    ),
    (
        "kernel_adds_a_span_too_many",
        "policyloss/compiled/token_program.py",
        "mask=at < spans",
        "mask=at <= spans",
        _KERNELS + "test_only_present_tensors_are_summed",
    ),
    (
        "kernels_of_any_leaves",
        "policyloss/compiled/fused.py",
        "return level, call.dp_size, call.leaves, kinds",
        "return level, call.dp_size, kinds",
        _KERNELS + "test_other_leaves_and_other_ranks_have_kernels_of_their_own",
    ),
    (
        "kernels_of_any_ranks",
        "policyloss/compiled/fused.py",
        "return level, call.dp_size, call.leaves, kinds",
        "return level, call.leaves, kinds",
        _KERNELS + "test_other_leaves_and_other_ranks_have_kernels_of_their_own",
    ),
)
