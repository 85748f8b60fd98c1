"""Hugging Face folders: config, tokenizer and chat templates. Their weights: `safetensors_loader.py`."""
