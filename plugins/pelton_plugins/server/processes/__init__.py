"""Several API processes over one engine: the owner of the engine, and the processes that serve."""
