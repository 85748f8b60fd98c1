"""A Pelton plugin that brings one model."""
