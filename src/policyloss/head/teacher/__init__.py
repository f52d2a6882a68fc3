"""A teacher compared with a student's head: how far their distributions are apart, row by row.

rows        divergence and gradient of rows of two models, over the whole vocabulary or on some
            entries of each row, in plain PyTorch: the reference
kernels     the same over the whole vocabulary, as Triton kernels
comparison  `Comparison`: the teacher of a call, its logits of any rows, and their divergence
divergence  `linear_divergence` and `divergence`
"""
