"""A Pelton plugin that brings one stat logger."""
