from pelton_fake_engine import fake_engine_site, model_folder, settings, tokenizer  # noqa: F401
