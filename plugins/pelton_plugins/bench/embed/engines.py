"""One engine of `pelton bench embed`, in a process of its own: a job as JSON on stdin, its figures on the last line of stdout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[Sequence[str]], Any]
"""Texts to vectors [texts, D], of length 1."""

WORD_STARTS = ("\u0120", "\u2581")
"""Of tokens that begin a word, in vocabularies that tell them from others."""
BATCH = 32
"""Of engines that want to be told: what sentence-transformers takes by itself."""
SAMPLE = ("A river runs through the town.", "Vectors of a text", "The dog and the other dog met a third one at noon.")
VECTORS = Path(tempfile.gettempdir()) / f"pelton-bench-embed-{os.getuid()}.json"
"""Where the first engine of a run leaves its vectors of `SAMPLE`, which others are compared with."""


def make_texts(path: str, length: int, count: int) -> list[str]:
    """Texts of `length` tokens each, special ones included, of words that are a token each."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words, num_special = word_list(path)
    chooser = random.Random(length)
    room = length - num_special
    texts = [" ".join(chooser.choices(words, k=room)) for _ in range(count)]
    # A word may be a token alone and none behind another: such a text is made of its first word.
    return [text if len(tokenizer.encode(text).ids) == length else " ".join(["the"] * room) for text in texts]


def word_list(path: str) -> tuple[list[str], int]:
    """Words that are a token each behind a space, and how many special tokens a text gets."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    tokens = tokenizer.get_vocab()
    begun = [token[1:] for token in tokens if token.startswith(WORD_STARTS)] or list(tokens)
    words = sorted(word for word in begun if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
    return words, tokenizer.num_special_tokens_to_add(is_pair=False)


def pelton(path: str, settings: dict[str, Any], threads: int) -> tuple[Embed, str]:
    import numpy as np

    from pelton import LLM, __version__

    llm = LLM(**settings)

    def embed(texts: Sequence[str]) -> Any:
        return np.stack(
            [output.outputs.data for output in llm.encode(list(texts), pooling_task="embed", use_tqdm=False)]
        )

    return embed, __version__


def transformers(path: str, settings: dict[str, Any], threads: int) -> tuple[Embed, str]:
    """In batches, padded, with the pooling of the folder written out: mean."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    def embed(texts: Sequence[str]) -> Any:
        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), BATCH):
                given = tokenizer(
                    list(texts[start : start + BATCH]), padding=True, truncation=True, return_tensors="pt"
                )
                states, mask = model(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1)
                found.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found).numpy()

    return embed, importlib.metadata.version("transformers")


def sentence_transformers(path: str, settings: dict[str, Any], threads: int) -> tuple[Embed, str]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(path, device="cpu")
    return (
        lambda texts: model.encode(list(texts), batch_size=BATCH, normalize_embeddings=True),
        importlib.metadata.version("sentence-transformers"),
    )


def fastembed(path: str, settings: dict[str, Any], threads: int) -> tuple[Embed, str]:
    """The model as ONNX, made here where it is not in the folder."""
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    folder = Path(tempfile.mkdtemp(prefix="pelton-onnx-"))
    size = _export(path, folder)
    TextEmbedding.add_custom_model(
        model="bench/model", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="bench/model"), dim=size,
        model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding("bench/model", specific_model_path=str(folder), threads=threads)
    version = f"{importlib.metadata.version('fastembed')} (onnxruntime {importlib.metadata.version('onnxruntime')})"
    return lambda texts: np.stack(list(model.embed(list(texts), batch_size=BATCH))), version


def _export(path: str, folder: Path) -> int:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((Path(path) / name).read_bytes())
    names = ["input_ids", "attention_mask", "token_type_ids"]
    given = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    axes = {name: {0: "texts", 1: "tokens"} for name in [*names, "last_hidden_state"]}

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            found = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return found.last_hidden_state

    torch.onnx.export(
        States().eval(), given, str(folder / "model.onnx"), input_names=names, output_names=["last_hidden_state"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    return int(model.config.hidden_size)


ENGINES: dict[str, Callable[[str, dict[str, Any], int], tuple[Embed, str]]] = {
    "pelton": pelton,
    "transformers": transformers,
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    embed, version = ENGINES[job["engine"]](job["path"], job["settings"], job["threads"])
    rates: dict[str, list[float]] = {}
    for length in job["lengths"]:
        texts = make_texts(job["path"], length, max(job["num_tokens"] // length, 1))
        embed(texts[: len(texts) // 4 + 1])  # warm-up
        for _ in range(job["repeats"]):
            began = time.perf_counter()
            found = embed(texts)
            rates.setdefault(str(length), []).append(len(texts) / (time.perf_counter() - began))
            assert len(found) == len(texts)
    return {"version": version, "texts_per_s": rates, "cosine": _cosine(embed(SAMPLE), job)}


def _cosine(vectors: Any, job: dict[str, Any]) -> float:
    """The least with Pelton's vectors, which it leaves for the others."""
    import numpy as np

    found = np.asarray(vectors, dtype=np.float64)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    if job["engine"] == "pelton":
        VECTORS.write_text(json.dumps({"path": job["path"], "vectors": found.tolist()}))
        return 1.0
    kept = json.loads(VECTORS.read_text()) if VECTORS.is_file() else {}
    return float((found * np.array(kept["vectors"])).sum(1).min()) if kept.get("path") == job["path"] else float("nan")


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.stdin.read()))))
