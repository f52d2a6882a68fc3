"""The divergence between the distributions of a student's head and a teacher, row by row.

rows        divergence and gradient of rows of two models, over the vocabulary or on some
            entries of each row, in plain PyTorch: the reference
kernels     the same over the vocabulary, as Triton kernels
comparison  `Comparison`: the teacher of a call, its logits of any rows, and their divergence
divergence  `linear_divergence` and `divergence`
"""
