"""Captured steps: which mode is possible, which key serves a batch, how captures are kept and replayed."""
