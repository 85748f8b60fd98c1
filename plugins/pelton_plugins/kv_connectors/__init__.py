"""KV connectors: KV cache that outlives an engine, or comes from another one."""
