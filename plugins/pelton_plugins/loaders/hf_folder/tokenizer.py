"""The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pelton.errors import ConfigError
from pelton.model.formats import MAX_JSON_BYTES, read_json
from pelton_plugins.loaders.text.chat_template import read_template_file
from pelton_plugins.loaders.text.tokenizer import RustTokenizer

NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens",
)  # fmt: skip


def load_hf_tokenizer(folder: Path) -> RustTokenizer:
    """Raises `ConfigError` naming the file that is missing or broken."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).is_file()]
        found = f" (only {', '.join(others)}, an older form)" if others else ""
        raise ConfigError(
            f"{folder} has no tokenizer.json{found}. Name another tokenizer with --tokenizer, or send token ids and use "
            "--skip-tokenizer-init."
        )
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust package raises bare Exception
        raise ConfigError(f"{file} cannot be read by tokenizers {tokenizers.__version__}: {error}.") from error
    backend.no_truncation()  # settings of training time, not of the model
    backend.no_padding()
    config = _read_optional(folder / "tokenizer_config.json")
    tokens = {
        **_read_optional(folder / "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    named = {name: text for name in NAMED_TOKENS if (text := _text(tokens.get(name))) is not None}
    _add_missing(backend, config, named, tokens)
    template, others_by_name = _chat_templates(folder, config)
    return RustTokenizer(backend, special_tokens=named, chat_template=template, chat_templates=others_by_name)


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _text(token: Any) -> str | None:
    """A token is written as its text, or as a mapping with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], tokens: Mapping[str, Any]
) -> None:
    """Tokens that only tokenizer_config.json knows as added, or only their name as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        for _, fields in sorted(listed.items(), key=lambda item: int(item[0])):
            text = _text(fields)
            if text and text not in known:
                flags = {key: bool(fields.get(key, False)) for key in ("special", "lstrip", "rstrip", "single_word")}
                flags["normalized"] = bool(fields.get("normalized", not flags["special"]))
                known[text] = tokenizers.AddedToken(text, **flags)
                backend.add_tokens([known[text]])
    extra = tokens.get("additional_special_tokens")
    texts = [*named.values(), *(text for token in (extra if isinstance(extra, list) else []) if (text := _text(token)))]
    plain = [text for text in dict.fromkeys(texts) if text not in known or not known[text].special]
    if plain:
        backend.add_special_tokens([_as_special(text, known.get(text)) for text in plain])


def _as_special(text: str, token: tokenizers.AddedToken | None) -> tokenizers.AddedToken:
    if token is None:
        return tokenizers.AddedToken(text, special=True, normalized=False)
    return tokenizers.AddedToken(
        text,
        special=True,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """(the default template, others by name): a file of its own wins over the config's field."""
    named: dict[str, str] = {}
    field = config.get("chat_template")
    if isinstance(field, str):
        named["default"] = field
    elif isinstance(field, list):
        for item in field:
            if isinstance(item, Mapping) and isinstance(item.get("template"), str):
                named[str(item.get("name"))] = item["template"]
    legacy = folder / "chat_template.json"
    if legacy.is_file() and isinstance(text := read_json(legacy).get("chat_template"), str):
        named["default"] = text
    if (folder / "chat_template.jinja").is_file():
        named["default"] = read_template_file(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = read_template_file(file)
    return named.pop("default", None), named
