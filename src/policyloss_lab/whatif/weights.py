"""The weights by which losses are compared: the similarity of two gradients, and the change of
each sequence by a small step.

With `J = ∂logp/∂θ` (`[N, P]`), a loss with `g = ∂loss/∂logp` has the gradient `Jᵀg`. Two numbers
follow from it: `⟨Jᵀa, Jᵀb⟩` of two losses, and `−J·Jᵀg`, the first-order change of every token for
a step of gradient descent with learning rate 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.hf.calls import logprobs
from policyloss.hf.one_call import ModelCall
from policyloss.hf.output_head import Matrices, Transformation
from policyloss_lab.whatif.tokens import StoredTokens

GRADIENT_NUMBERS = 2**28  # the most numbers in the stored gradients of all losses together
HEAD_TOKENS = 4096
_VOCABULARY = 8192  # entries of the vocabulary processed at once
_ROWS = 16  # sequences that go through the model together


class Products(NamedTuple):
    """Products of L losses and S sequences. gram: `[L, L]`, inner products of gradients. change:
    `[L, S]`, the first-order change of each sequence's log-probability at learning rate 1.
    """

    gram: Tensor
    change: Tensor

    @property
    def cosine(self) -> Tensor:
        """`[L, L]`; 0 for a loss without gradient."""
        norms = self.gram.diagonal().clamp(min=0).sqrt()
        scale = norms[:, None] * norms
        return torch.where(scale > 0, self.gram / scale.where(scale > 0, 1.0), 0.0)

    @property
    def unit_change(self) -> Tensor:
        """`change` for a step of length 1 along each gradient, `[L, S]`."""
        norms = self.gram.diagonal().clamp(min=0).sqrt()[:, None]
        return torch.where(norms > 0, self.change / norms.where(norms > 0, 1.0), 0.0)


class EachToken:
    """Without a model: the log-probability of each token counts as a free parameter, so the
    Jacobian of logp by the parameters is the identity.
    """

    name = "tokens"

    def products(self, gradients: Tensor, tokens: StoredTokens) -> Products:
        """The products of the gradients themselves."""
        return Products(gradients @ gradients.T, -tokens.sums(gradients))


class Parameters:
    """All parameters of a model that have a gradient, by `L + S` backward passes."""

    name = "parameters"

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model, self.temperature = model, temperature
        self.weights = [p for p in model.parameters() if p.requires_grad]

    @property
    def size(self) -> int:
        """The number of trained numbers."""
        return sum(p.numel() for p in self.weights)

    def products(self, gradients: Tensor, tokens: StoredTokens) -> Products:
        """See `Products`."""
        directions = self.gradients(gradients, tokens)
        return Products((directions @ directions.T).double(), -self.along(directions, tokens))

    def gradients(self, gradients: Tensor, tokens: StoredTokens) -> Tensor:
        """`Jᵀg` of each loss, `[L, P]`."""
        out = torch.zeros(gradients.shape[0], self.size, device=self.weights[0].device)
        for place, logp in self._chunks(tokens):
            for row, g in zip(out, gradients[:, place].to(logp), strict=True):
                row += self._backward(logp, g)
        return out

    def along(self, directions: Tensor, tokens: StoredTokens) -> Tensor:
        """`⟨∇logp_s, d⟩` of each sequence and each direction `[L, P]`: `[L, S]`."""
        columns = []
        for place, logp in self._chunks(tokens):
            sequence = tokens.sequence[place].to(logp.device)
            for s in torch.unique(sequence).tolist():
                columns.append(directions @ self._backward(logp, (sequence == s).to(logp)))
        out = directions.new_zeros(directions.shape[0], tokens.lengths.shape[0])
        with_tokens = (tokens.sums(tokens.inputs.mask.long()) > 0).nonzero().flatten()
        out[:, with_tokens] = torch.stack(columns, 1)
        return out.double().cpu()

    def logp(self, tokens: StoredTokens) -> Tensor:
        """The model's log-probabilities of the trained tokens, `[N]`, 0 elsewhere."""
        out = torch.zeros_like(tokens.inputs.logp)
        with torch.no_grad():
            for place, logp in self._chunks(tokens):
                out[place] = logp.double().cpu()
        return out

    def _backward(self, logp: Tensor, g: Tensor) -> Tensor:
        parts = torch.autograd.grad(logp, self.weights, g, retain_graph=True, allow_unused=True)
        pairs = zip(parts, self.weights, strict=True)
        each = [torch.zeros_like(p) if x is None else x for x, p in pairs]
        return torch.cat([x.flatten() for x in each])

    def _chunks(self, tokens: StoredTokens) -> Iterator[tuple[Tensor, Tensor]]:
        """The indices of the trained tokens of some sequences, and their log-probabilities."""
        for batch in model_batches(tokens, self.model):
            logp = logprobs(
                self.model,
                batch.ids,
                batch.attention_mask,
                mask=batch.mask,
                temperature=self.temperature,
                head="auto",
            ).logp
            yield batch.place, logp[batch.mask]


class HeadWeight:
    """The weight of the model's head alone, with constant hidden states.

    `J·Jᵀ` of two tokens is `⟨h, h'⟩·⟨e, e'⟩`: e is the derivative of the log-probability by the
    logits, one-hot − softmax.
    """

    name = "head"

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model, self.temperature = model, temperature

    def products(self, gradients: Tensor, tokens: StoredTokens) -> Products:
        """See `Products`."""
        kernel = self.kernel(tokens)
        reached = gradients @ kernel
        return Products(reached @ gradients.T, -tokens.sums(reached))

    @torch.no_grad()
    def kernel(self, tokens: StoredTokens) -> Tensor:
        """`J·Jᵀ`, `[N, N]`, 0 at tokens that are not trained on."""
        trained = int(tokens.inputs.mask.sum())
        if trained > HEAD_TOKENS:
            raise InputError(f"{trained} tokens are too many for the head; it takes {HEAD_TOKENS}.")
        places, states, ids = [], [], []
        for batch in model_batches(tokens, self.model):
            call = ModelCall.of(self.model, batch.ids, batch.attention_mask, None, None, None, None)
            # The hidden states before the head, and the head.
            before, matrices, known = call.run_without_head(lambda *caught: caught)
            states.append(call.predicting(before)[batch.mask])
            ids.append(call.ids[batch.mask])
            places.append(batch.place)
        place, hidden, target = torch.cat(places), torch.cat(states), torch.cat(ids)
        inside = _logit_products(hidden, target, matrices, known, self.temperature)
        inside = inside * (hidden.float() @ hidden.float().T)
        out = tokens.inputs.logp.new_zeros(tokens.inputs.logp.shape[0], tokens.inputs.logp.shape[0])
        out[place[:, None], place] = inside.double().cpu()
        return out


def _logit_products(
    hidden: Tensor, target: Tensor, matrices: Matrices, known: Transformation, temperature: float
) -> Tensor:
    """`⟨e, e'⟩` of every two tokens, `[M, M]` float32, by parts of the vocabulary."""
    rows = torch.arange(target.shape[0], device=target.device)
    weights = torch.split(matrices.weight, _VOCABULARY)
    bias = matrices.bias
    biases = [None] * len(weights) if bias is None else torch.split(bias, _VOCABULARY)
    parts = [Matrices(w, b) for w, b in zip(weights, biases, strict=True)]

    def logits(part: Matrices) -> Tensor:
        return known(part.logits(hidden).float()) / temperature

    total = torch.stack([logits(part).logsumexp(1) for part in parts]).logsumexp(0)
    out = hidden.new_zeros(rows.shape[0], rows.shape[0], dtype=torch.float32)
    for i, part in enumerate(parts):
        z = logits(part)
        e = -(z - total[:, None]).exp()
        inside = (target // _VOCABULARY) == i
        e[rows[inside], target[inside] % _VOCABULARY] += 1
        slope = known.scale / temperature
        if known.cap is not None:  # cap·tanh(scale·z/cap) rises by scale·(1 − tanh²)
            e = e * (1 - (z * temperature / known.cap) ** 2)
        out += (e * slope) @ (e * slope).T
    return out


class _ModelBatch(NamedTuple):
    """Rows of tokens for a model. mask: `[B, T-1]`, the trained ones among the predicted tokens.
    place: their indices in the stored tokens.
    """

    ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    place: Tensor


def model_batches(tokens: StoredTokens, model: Any, at_once: int = _ROWS) -> Iterator[_ModelBatch]:
    """Batches of the sequences that have a trained token, prompt and completion."""
    if tokens.ids is None or tokens.prompts is None:
        raise InputError("a model needs the ids of the tokens and prompts, the ids before them.")
    if len(tokens.prompts) != tokens.lengths.shape[0] or not all(map(len, tokens.prompts)):
        count = tokens.lengths.shape[0]
        raise InputError(f"prompts must hold token ids for each of {count} sequences, none empty.")
    try:
        flat = torch.tensor([x for prompt in tokens.prompts for x in prompt], dtype=torch.long)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("prompts must hold whole numbers, the ids of tokens.") from None
    every_id, last = torch.cat([flat, tokens.ids]), model.get_input_embeddings().weight.shape[0] - 1
    if bool(((every_id < 0) | (every_id > last)).any()):
        raise InputError(
            f"ids and prompts hold {int(every_id.min())} to {int(every_id.max())}, and the model "
            f"has the ids 0 to {last}; give the model that the tokens are of."
        )
    device = next(model.parameters()).device
    every = torch.arange(tokens.ids.shape[0])
    places = torch.split(every, tokens.lengths.tolist())
    rows = [
        (torch.tensor(list(prompt)), place)
        for prompt, place in zip(tokens.prompts, places, strict=True)
        if bool(tokens.inputs.mask[place].any())
    ]
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        ids = [torch.cat([prompt, tokens.ids[place]]) for prompt, place in some]
        mask = [
            torch.cat([torch.zeros(len(prompt) - 1).bool(), tokens.inputs.mask[place]])
            for prompt, place in some
        ]
        columns = (ids, [torch.ones_like(x) for x in ids], mask)
        padded = [nn.utils.rnn.pad_sequence(x, batch_first=True).to(device) for x in columns]
        trained = torch.cat([place[tokens.inputs.mask[place]] for _, place in some])
        yield _ModelBatch(padded[0], padded[1], padded[2], trained)


Weights = EachToken | Parameters | HeadWeight


def weights_for(model: Any, losses: int, temperature: float, through: str | None) -> Weights:
    """Choose the weights for comparing gradients: without a model, the log-probabilities; with a
    model, all parameters if the gradients of `losses` losses fit into memory, else the weight of
    the head. through: "tokens", "head" or "parameters" overrides this choice.
    """
    if model is None or through == EachToken.name:
        return EachToken()
    parameters = Parameters(model, temperature)
    fits = through is None and parameters.size * losses <= GRADIENT_NUMBERS
    return parameters if fits or through == Parameters.name else HeadWeight(model, temperature)
