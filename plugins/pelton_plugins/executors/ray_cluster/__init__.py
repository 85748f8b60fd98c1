"""Ranks of one engine as actors of a Ray cluster."""
