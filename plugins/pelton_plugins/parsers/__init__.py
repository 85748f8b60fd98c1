"""Parsers of tool calls and reasoning: one incremental state machine for each format."""
