"""Ranks that share a model."""
