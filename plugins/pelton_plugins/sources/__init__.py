"""Where models come from: a local path, the demo package, the Hugging Face hub."""
