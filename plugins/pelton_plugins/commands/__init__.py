"""Commands of the `pelton` program that need no server: complete, chat, and tell what is installed."""
