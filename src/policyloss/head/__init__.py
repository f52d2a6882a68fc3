"""From hidden states to log-probabilities, and to the loss, without holding all logits.
The layers, from the ground up:

softmax_rows    statistics and gradients of rows of logits, in plain PyTorch: the reference
kernels         the statistics as a Triton kernel, loaded by name when a tensor on a GPU is met;
                gradient_kernel has the gradients
matmul          products of half-precision matrices that add up in float32, and the memory they use
vocab_parallel  a vocabulary that is cut over ranks
tiles           products of fixed shapes and sums in a fixed order: the exact mode
pair_rows       statistics and gradients of the rows of two models: how far a student is from a
                teacher; pair_kernels and pair_gradient_kernel are the same in Triton
entry_rows      the same on some entries of each row
comparison      a teacher beside a head
head            `Head`: the logits of any rows and their statistics; the windows that rows are
                cut into
validate        the arguments, checked
plans           which order of matmuls a call takes, what it keeps, and why
backward        the gradients of hidden states, weight and bias, for each plan
linear, logits  `linear_logprobs` from hidden states, `logprobs` from logits that exist
divergence      `linear_divergence` and `divergence`
windows         a batch cut into windows: what is known before the first matmul, and each
                window's gradient
walk            the windows of one pass, one after another
loss            `linear_policy_loss`

`linear_policy_loss` runs the pipeline of `policy_loss` twice: once per window, for the gradient,
while the window's logits exist (plan "one_pass"), and once over all tokens,
for the value and the metrics.
"""
