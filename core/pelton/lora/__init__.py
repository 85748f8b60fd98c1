"""LoRA adapters: what a request names, how folders are read, where weights lie, and who finds an adapter by its name."""
