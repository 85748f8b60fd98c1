"""Resolvers that find LoRA adapters by name: in a folder of the machine, and on the Hugging Face hub."""
