"""A Pelton plugin that brings a model with parts of its own."""
