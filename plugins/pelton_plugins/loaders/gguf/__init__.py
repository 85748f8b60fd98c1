"""GGUF: llama.cpp's single-file form, with config, tokenizer and (quantized) weights."""
