"""From hidden states to log-probabilities, and to the loss, without holding all logits.
The modules, from the lowest layer up:

softmax_rows    statistics and gradients of rows of logits, in plain PyTorch: the reference
kernels         the same as Triton kernels, imported for the first tensor on a GPU
matmul          products of half-precision matrices that add up in float32, and the memory they use
vocab_parallel  a vocabulary that is split over ranks
tiles           products of fixed shapes and sums in a fixed order: the exact mode
head            `Head`: the logits of any rows and their statistics; the windows that rows are
                split into
validate        checks of the arguments
terms           loss terms that share hidden states (`index=`), as distinct rows
teacher/        the teacher's head, and the divergence of each row of the student from it;
                `linear_divergence` and `divergence`
plans           the order of a call's matmuls, the tensors it keeps, and the reason
backward        the gradients of hidden states, weight and bias, for each plan
linear, logits  `linear_logprobs` from hidden states, `logprobs` from computed logits
windows         a batch split into windows: the numbers that are known before the first matmul,
                each window's gradient, and the one pass over all windows
loss            `linear_policy_loss`

With the plan "one_pass", `linear_policy_loss` runs the pipeline of `policy_loss` twice: on each
window, for the gradient, while the window's logits are in memory, and once over all tokens, for the
value and the metrics.
"""
