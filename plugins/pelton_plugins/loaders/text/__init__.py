"""Tokenizers over the Rust `tokenizers` package, and chat templates in Jinja. Neither torch nor transformers is imported here."""
