"""Command-line flags made from settings structs, for every plugin that brings commands."""

from pelton_plugins.flags.parser import Parsed, parse_flags

__all__ = ["Parsed", "parse_flags"]
