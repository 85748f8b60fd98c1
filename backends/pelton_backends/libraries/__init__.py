"""Attention of libraries: torch's FlexAttention, and packages that may be installed."""
