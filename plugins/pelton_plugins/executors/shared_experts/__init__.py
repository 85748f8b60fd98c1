"""Engines that share their experts: how their ranks meet, step together, and exchange tokens."""
