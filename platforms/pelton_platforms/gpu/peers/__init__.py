"""Collectives of GPUs through memory that the ranks of one host map from each other."""
