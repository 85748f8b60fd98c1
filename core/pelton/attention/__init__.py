"""Attention backends: their promise, their selection, and the layer that calls them."""
