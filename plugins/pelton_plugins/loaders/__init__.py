"""Weights and formats: safetensors, GGUF."""
