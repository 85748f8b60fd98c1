"""Attention backends: their interface, their selection, and the layer that calls them."""
