"""Executors: where the workers run."""
