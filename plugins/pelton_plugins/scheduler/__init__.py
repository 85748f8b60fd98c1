"""The built-in scheduler: continuous batching with chunked prefill, prefix hits, preemption and drafts; and its policies."""
