"""The tokenizer of a folder, and what is known of each token."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from pelton.errors import ConfigError, RequestError
from pelton_plugins.loaders.hf_folder.tokenizer import load_hf_tokenizer
from pelton_plugins.loaders.text.tokenizer import BYTE_OF_CHARACTER


def byte_level_backend():
    vocab = {character: index for index, character in enumerate(sorted(BYTE_OF_CHARACTER))}
    vocab |= {"he": 256, "Ġh": 257}
    backend = Backend(models.BPE(vocab, [("h", "e"), ("Ġ", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture
def folder(tmp_path):
    backend = byte_level_backend()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 258)])
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}one"},
    )
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_reads_names_ids_and_template_of_a_folder(folder):
    tokenizer = load_hf_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 259, None)
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_token_ids == {258, 259} and tokenizer.is_special(258) and not tokenizer.is_special(256)
    assert tokenizer.apply_chat_template([]) == "<s>one"


def test_special_tokens_are_added_on_wish_and_texts_are_not_truncated(folder):
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.encode("he") == [258, 256]
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert len(tokenizer.encode("x" * 50)) == 51
    assert tokenizer.encode_batch(["he", "hehe"]) == [[258, 256], [258, 256, 256]]
    assert tokenizer.decode([258, 256]) == "he" and tokenizer.decode([258, 256], skip_special_tokens=False) == "<s>he"


def test_a_long_text_gives_the_same_ids_on_a_path_that_lets_other_threads_run(folder):
    """`tokenizers` holds the GIL in `encode`, which would stop every stream of a server; in a batch it does not."""
    tokenizer = load_hf_tokenizer(folder)
    backend, text = tokenizer.backend, "he said <s> \U0001f600 héhe</s>\n" * 400
    want = [backend.encode(text, add_special_tokens=special).ids for special in (True, False)]

    class Batches:
        def encode_batch_fast(self, texts, *, add_special_tokens):
            return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    tokenizer.backend = Batches()
    assert [tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)] == want
    with pytest.raises(RequestError):
        tokenizer.encode("x" * 5000 + "\ud800")


def test_bytes_and_text_of_single_tokens(folder):
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.token_bytes(257) == b" h" and tokenizer.token_text(257) == " h"
    half = tokenizer.encode("é", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in half] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_text(half[0]) == "\ufffd"
    assert tokenizer.token_text(259) == "</s>"
    assert tokenizer.token_text(10_000) == ""


def test_tokens_that_only_the_config_lists_are_added(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        "260": {"content": "<tool>", "special": False},
        "261": {"content": "<x>", "special": True},
    }
    config["additional_special_tokens"] = ["<y>"]
    write(folder, "tokenizer_config.json", config)
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.encode("<tool><x><y>", add_special_tokens=False) == [260, 261, 262]
    assert tokenizer.decode([260, 261, 262]) == "<tool>"


@pytest.mark.parametrize("template_file", ["chat_template.jinja", "chat_template.json"])
def test_a_template_file_wins_over_the_config(folder, template_file):
    if template_file.endswith("json"):
        write(folder, template_file, {"chat_template": "two"})
    else:
        (folder / template_file).write_text("two")
    assert load_hf_tokenizer(folder).apply_chat_template([]) == "two"


def test_the_template_called_tool_use_serves_requests_with_tools(folder):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": templates})
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"


def test_a_missing_template_is_the_clients_error_and_says_what_to_do(folder):
    write(folder, "tokenizer_config.json", {})
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template"):
        load_hf_tokenizer(folder).apply_chat_template([])


def test_a_missing_tokenizer_says_which_flags_help(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"no tokenizer.json \(only tokenizer.model.*--tokenizer.*--skip-tokenizer-init"
    ):
        load_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, text", [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[1]")]
)
def test_a_broken_file_is_named(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        load_hf_tokenizer(folder)


@pytest.mark.parametrize("text, message", [("ab\ud800", "unpaired surrogate at character 2"), (7, "is a int")])
def test_what_is_no_text_is_the_clients_error(folder, text, message):
    tokenizer = load_hf_tokenizer(folder)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["fine", text])):
        with pytest.raises(RequestError, match=message) as caught:
            encode(text)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70, "a"])
def test_what_is_no_token_id_is_the_clients_error(folder, token_id):
    with pytest.raises(RequestError, match="ids must be 0 to 259"):
        load_hf_tokenizer(folder).decode([256, token_id])


def test_many_threads_get_the_same_ids(folder):
    tokenizer = load_hf_tokenizer(folder)
    texts = [f"he said {i} times é日" for i in range(200)]
    expected = tokenizer.encode_batch(texts)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == texts


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys, pelton.tokenizer, pelton.model.resolve, pelton_plugins.loaders.hf_folder.tokenizer, pelton_plugins.loaders.plugin\n"
        "import pelton_plugins.sources.plugin, pelton_plugins.loaders.gguf.format, pelton_plugins.loaders.gguf.tokenizer\n"
        "sys.exit({'torch', 'transformers', 'gguf', 'numpy', 'huggingface_hub'} & set(sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
