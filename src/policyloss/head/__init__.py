"""From hidden states or logits to log-probabilities, entropy and the loss, without keeping the logits."""
