"""The tokenizer that a GGUF file's metadata describes: byte-level BPE (`gpt2`), or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pelton.errors import ConfigError
from pelton_plugins.loaders.gguf.file import GGUFFile
from pelton_plugins.loaders.text.tokenizer import RustTokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
NAMED_IDS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}
"""`seperator` is how the metadata spells it."""

LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
SPACE = "▁"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    # Digits first: " 12" is " ", "1", "2". Leaving it out changes the tokens of several spaces before a digit.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": _split(LLAMA3_WORDS),
    "llama3": _split(LLAMA3_WORDS),
    "llama-v3": _split(LLAMA3_WORDS),
    "qwen2": _split(QWEN2_WORDS),
    "deepseek-r1-qwen": _split(QWEN2_WORDS),
}
NFC = ("qwen2", "deepseek-r1-qwen")
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
"""A word that is a token is taken whole, whatever the merges say; a text begins with BOS unless the file says no."""


def load_gguf_tokenizer(file: GGUFFile) -> RustTokenizer:
    """Raises `ConfigError` for a kind that is not known here, or metadata that does not fit together."""
    kind = file.get("tokenizer.ggml.model")
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{file.path} holds no tokenizer; name one with --tokenizer, or use --skip-tokenizer-init.")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(file, tokens)
    else:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {kind!r}; gpt2 and llama are read. Name another with --tokenizer."
        )
    named = _named_tokens(file, tokens)
    _add_special(file, backend, tokens, named)
    _add_bos(file, backend, named, default=adds_bos)
    template = file.get("tokenizer.chat_template")
    return RustTokenizer(backend, special_tokens=named, chat_template=template if isinstance(template, str) else None)


def _byte_level_bpe(file: GGUFFile, tokens: Sequence[str]) -> tuple[Backend, bool]:
    name = file.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path} wants the pre-tokenizer {name!r}; known are {', '.join(PRE_TOKENIZERS)}. "
            "Name the model's own tokenizer with --tokenizer."
        )
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right:
            raise file.broken(f"the merge {merge[:40]!r} is not a pair")
        merges.append((left, right))
    backend = _bpe(file, tokens, merges, ignore_merges=name in WHOLE_WORDS_FIRST)
    if name in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend, name in WHOLE_WORDS_FIRST


def _sentencepiece_bpe(file: GGUFFile, tokens: Sequence[str]) -> tuple[Backend, bool]:
    scores = file.get("tokenizer.ggml.scores", [])
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.broken(f"it has {len(tokens)} tokens, and no score for each")
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    backend = _bpe(
        file,
        tokens,
        _merges_from_scores(tokens, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
    )
    adds_space = file.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(([normalizers.Prepend(SPACE)] if adds_space else []) + steps)
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if adds_space else []))
    return backend, True


def _bpe(file: GGUFFile, tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the Rust package raises bare Exception
        raise file.broken(f"its tokens and merges do not fit together ({error})") from error


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins whatever pair makes the token of the highest score: that order, as merges."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, index in ids.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids]
        found += [(-scores[index], index, left_id, right_id, left, right) for left_id, right_id, left, right in known]
    found.sort()
    return [(left, right) for *_, left, right in found]


def _named_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    named = {}
    for short, name in NAMED_IDS.items():
        token_id = file.get(f"tokenizer.ggml.{short}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise file.broken(f"its {name} is {token_id!r}, but it has {len(tokens)} tokens")
        named[name] = tokens[token_id]
    return named


def _add_special(file: GGUFFile, backend: Backend, tokens: Sequence[str], named: dict[str, str]) -> None:
    types = file.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or (types and len(types) != len(tokens)):
        raise file.broken(f"it has {len(tokens)} tokens, and not a type for each")
    control = {token: None for token, kind in zip(tokens, types, strict=False) if kind in (UNKNOWN, CONTROL)}
    control |= dict.fromkeys(named.values())
    user_defined = [
        token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED and token not in control
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control if token])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined if token])


def _add_bos(file: GGUFFile, backend: Backend, named: dict[str, str], *, default: bool) -> None:
    """Text begins with BOS, or ends with EOS, where the file says so."""
    bos = named.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", default) else None
    eos = named.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([bos, eos]) if token is not None]

    def template(sequence: str) -> list[str]:
        return [*([bos] if bos else []), sequence, *([eos] if eos else [])]

    pair = [*template("$A"), *(f"{part}:1" for part in template("$B"))]
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=template("$A"), pair=pair, special_tokens=ids),
        ]
    )
