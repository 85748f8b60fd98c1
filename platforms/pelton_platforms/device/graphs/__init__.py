"""Graphs of steps: which are captured, by what, and when they are replayed."""
