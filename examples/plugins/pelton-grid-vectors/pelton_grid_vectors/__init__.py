"""Vectors of a grid's patches."""
