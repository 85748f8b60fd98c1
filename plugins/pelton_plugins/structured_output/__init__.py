"""Structured output: backends that keep a request's output to a JSON schema, a regex, one of some texts, or a grammar."""
