"""Weights kept as blocks of small integers: their forms, and the methods that make them."""
