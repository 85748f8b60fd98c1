"""The built-in KV-cache manager: paged blocks with a prefix cache, and a manager of blocks for each kind of layer."""
