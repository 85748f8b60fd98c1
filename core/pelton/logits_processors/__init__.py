"""Logits processors: plugins that change a request's logits before a token is sampled."""
