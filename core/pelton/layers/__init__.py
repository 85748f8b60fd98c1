"""Modules that model plugins are made of: matrices, embeddings, norms, rope."""
