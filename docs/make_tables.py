"""Make the pages that are tables of the code: hooks, flags, limits, fields, metrics, attention backends.

`make docs` writes them; a test fails when a page is not what this file makes of the code.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

from pelton import env, hookspecs, limits
from pelton.attention.interface import AttentionBackend, AttentionNeeds
from pelton.config.engine import SECTIONS
from pelton.config.other_names import other_names
from pelton.entries import POOL, BackendEntry
from pelton.plugins import load_plugins
from pelton_plugins.flags.field_docs import first_line
from pelton_plugins.flags.other_variables import OTHER_VARIABLES
from pelton_plugins.flags.table import SHORT_FLAGS, Flag, make_flags

DOCS = Path(__file__).parent
TREES = ("pelton", "pelton_platforms", "pelton_backends", "pelton_plugins")
NOTE = "<!-- Made by docs/make_tables.py from the code: `make docs` writes it again. -->"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines)


def hooks_page() -> str:
    """Every extension point, with its built-in implementations."""
    plugins = load_plugins(only=[])
    version = ".".join(map(str, hookspecs.API_VERSION))
    parts = [
        "# Hooks",
        NOTE,
        f"Every extension point of Pelton; hook API version {version}. A plugin implements any of them as functions marked "
        "`@pelton.hookimpl` in the module that its entry point names, and names only the arguments that it uses. How to "
        "write one is in [plugins.md](plugins.md). The example of each hook is from the package that `pelton plugins new KIND mine` "
        "writes; tests install every such package and run its conformance suites.",
    ]
    examples = hook_examples()
    for hook in hookspecs.hooks().values():
        arguments = ", ".join(hook.arguments)
        own = sorted(plugin.name for plugin in plugins.loaded if hook.name in plugin.hooks)
        parts += [
            f"## {hook.name}",
            f"`{hook.name}({arguments}) -> {hook.returns}`, since {hook.since}"
            + (f"; **deprecated**: {hook.deprecated}" if hook.deprecated else ""),
            hook.doc,
            f"Built-in plugins that implement it: {', '.join(own) or 'none'}.",
            "Kind `{}`:\n\n```python\n{}\n```".format(*examples[hook.name]),
        ]
    return "\n\n".join(parts)


def kinds_page() -> str:
    """Every kind of plugin with its whole example: the modules of its skeleton."""
    from pelton_plugins.commands.plugin_author import SKELETONS, kinds, renamed

    parts = [
        "# Every kind of plugin",
        NOTE,
        "What `pelton plugins new KIND mine` writes, for each kind: the modules beside `plugin.py`, whose hook is in "
        "[hooks.md](../hooks.md). "
        "Tests install every such package and run its conformance suites; `tests/tools/plugins_from_wheel.py` does so with the wheel "
        "alone. How to begin, and the rules for all of them: [plugins.md](../plugins.md).",
    ]
    for kind, about in kinds().items():
        parts += [f"## {kind}", renamed(about.partition(": ")[2] or about, "mine").capitalize()]
        folder = SKELETONS / kind.replace("-", "_")
        for file in sorted(folder.glob("*.py"), key=lambda file: (file.name == "conformance.py", file.name)):
            if file.name != "plugin.py" or len(list(folder.glob("*.py"))) == 2:
                code = renamed(file.read_text(), "mine").rstrip()
                parts.append(f"`pelton_mine/{file.name}`:\n\n```python\n{code}\n```")
    return "\n\n".join(parts)


def hook_examples() -> dict[str, tuple[str, str]]:
    """By hook: the kind that is called after it, else the kind of the smallest skeleton that implements it, and its code there."""
    from pelton_plugins.commands.plugin_author import SKELETONS, kinds, renamed

    found: dict[str, tuple[bool, int, str, str]] = {}
    for kind in kinds():
        source = renamed((SKELETONS / kind.replace("-", "_") / "plugin.py").read_text(), "mine")
        hooks = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.decorator_list]
        for node in hooks:
            code = "\n".join(source.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
            is_of_another = not node.name.startswith(f"pelton_{kind.replace('-', '_')}")
            offer = (is_of_another, len(hooks), kind, code)
            found[node.name] = min(found.get(node.name, offer), offer)
    return {name: (kind, code) for name, (_, _, kind, code) in found.items()}


def flags_page() -> str:
    """Every setting, as flag and as argument of `LLM`."""
    from pelton_plugins.server.config import ServerConfig

    flags = make_flags([ServerConfig])
    shorts = ", ".join(f"`{short}` (`{long}`)" for short, long in SHORT_FLAGS.items())
    parts = [
        "# Settings",
        NOTE,
        "A setting has one name: `max_num_seqs` is the flag `--max-num-seqs` and the argument `LLM(max_num_seqs=...)`, "
        'wherever it lives. A section can be given as a whole, `--attention-config \'{"backend": "sdpa"}\'`, or by a dot, '
        f"`--attention-config.backend sdpa`. Short forms: {shorts}. `--config FILE` reads settings by name from a JSON, "
        "TOML or YAML file. A flag wins over an environment variable, and that over the file. Settings of plugins are "
        "`--plugin-config.NAME.FIELD`. A number may end in k, m, g (powers of 1000) or K, M, G (powers of 1024).",
    ]
    for section, struct in SECTIONS.items():
        parts += [f"## {section}", first_line(struct), _flag_table([f for f in flags.values() if f.section == section])]
    parts += [
        "## server",
        first_line(ServerConfig),
        "Flags of `pelton serve`.",
        _flag_table([flag for flag in flags.values() if flag.owner == "ServerConfig"]),
        "## Environment variables",
        table(("variable", "setting", "what"), [(f"`{v.name}`", f"`{v.setting}`", v.doc) for v in env.VARIABLES]),
        "huggingface_hub's own, such as `HF_HUB_OFFLINE` and `HF_HOME`, are honoured by it. vLLM's are not read; a command says "
        f"so, and what to use, where one of these is set: {', '.join(f'`{one.name}`' for one in OTHER_VARIABLES)}.",
        "## vLLM's names",
        "Settings of vLLM's that are called otherwise here do the same, on the command line and as arguments of `LLM`.",
        table(
            ("vLLM's", "here"),
            [(f"`{name}`", _shown_name(name, one.here)) for name, one in other_names().items() if one.here],
        ),
        "Those that Pelton does not have are refused in one line, unless they ask for nothing: `None`, or a value of the last "
        "column.",
        table(
            ("vLLM's", "what to do", "accepted"),
            [
                (f"`{name}`", one.instead, ", ".join(f"`{json.dumps(value)}`" for value in one.accepts) or "-")
                for name, one in other_names().items()
                if one.instead
            ],
        ),
    ]
    return "\n\n".join(parts)


def _shown_name(name: str, here: str) -> str:
    section, dot, _ = name.partition(".")
    own = f"`{section}{dot}{here.removeprefix('!')}`" if dot else f"`{here.removeprefix('!')}`"
    return f"the opposite of {own}" if here.startswith("!") else own


def _flag_table(flags: Sequence[Flag]) -> str:
    rows = []
    for flag in flags:
        names = [name for name in flag.names if not name.startswith("--no-") or flag.default is True]
        default = flag.default
        shown = "" if default in (None, [], {}, "") else f"`{getattr(default, 'value', default)}`"
        rows.append((", ".join(f"`{name}`" for name in names), shown, flag.doc))
    return table(("flag", "default", "what"), rows)


def limits_page() -> str:
    """Every bound on what a client may send."""
    source = Path(limits.__file__).read_text()
    lines = source.splitlines()
    rows = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            comment = lines[node.lineno - 1].partition("#")[2].strip()
            rows.append((f"`{name}`", f"{getattr(limits, name):,}", comment))
    parts = [
        "# Limits",
        NOTE,
        "No input is unbounded: what goes over one of these is refused with status 400 (a body that is too long: 413), and "
        "the error names the field. Bounds that depend on the model (context length, vocabulary) or on a setting "
        "(`max_logprobs`, `max_num_queued_reqs`, `max_body_bytes`) come on top.",
        table(("limit", "value", "note"), rows),
    ]
    return "\n\n".join(parts)


def fields_page() -> str:
    """What clients of other servers know and this one does not offer."""
    from pelton_plugins.server.known_routes import NOT_OFFERED as ROUTES
    from pelton_plugins.server.rules import NOT_OFFERED, OF_NO_EFFECT, WITHIN_OF_NO_EFFECT

    refused, without = [], []
    for struct, rules in NOT_OFFERED.items():
        for name, (neutral, advice) in rules.items():
            shown = ", ".join(f"`{json.dumps(value)}`" for value in neutral) or "-"
            refused.append((struct.__name__, f"`{name}`", advice, shown))
    for struct, names in OF_NO_EFFECT.items():
        without.append((struct.__name__, ", ".join(f"`{name}`" for name in names)))
    parts = [
        "# Fields and routes that are not offered",
        NOTE,
        "A field that would change the answer is never ignored. Each field of each request does something, is refused with status "
        "400 and a message that names it, or says something about the request and nothing about its answer; "
        "`tests/plugins/server/test_fields.py` tries all of them. `GenerateRequest` is what completions and chats have in common.",
        "## Refused fields",
        "`null` asks for nothing, and so do the values in the last column.",
        table(("request", "field", "what to do", "accepted"), refused),
        "## Fields without an effect on the answer",
        table(("request", "fields"), without),
        "Within other fields:",
        table(
            ("place", "fields", "why"),
            [
                (f"`{place}`", ", ".join(f"`{name}`" for name in names), why)
                for place, (names, why) in WITHIN_OF_NO_EFFECT.items()
            ],
        ),
        "## Refused routes",
        "Each is a 404 with these words.",
        table(("route", "what to do"), [(f"`{path}`", advice) for path, advice in ROUTES.items()]),
    ]
    return "\n\n".join(parts)


def metrics_page() -> str:
    """Every family that /metrics exports."""
    from pelton_plugins.server.http_metrics import HttpMetrics
    from pelton_plugins.stat_loggers.families import FAMILIES, NOT_EXPORTED

    rows = []
    for family in FAMILIES:
        labels = ["model_name", "engine", *([family.label] if family.label else [])]
        note = f" Only with `{family.when}`." if family.when else ""
        if family.deprecated_in:
            note += f" Deprecated in {'.'.join(map(str, family.deprecated_in))}."
        rows.append((f"`pelton_{family.name}`", family.kind, ", ".join(labels), family.help + note))
    rows += _further_families()
    http = HttpMetrics()
    http.observe("/v1/models", "GET", 200, 0.1)
    http.count_tool_answer("hermes", 1)
    with http.sleep_operation("sleep"):
        pass
    http_rows = [
        (f"`{metric.name}`", type(metric).__name__.lower(), ", ".join(metric.labels), metric.documentation)
        for metric in {metric.name: metric for metric in http.snapshot()}.values()
    ]
    parts = [
        "# Metrics",
        NOTE,
        "`GET /metrics` in Prometheus' text format; `LLM.get_metrics()` offline. Names as vLLM has them with `pelton_` in "
        "front; `--metrics-prefix vllm:` gives vLLM's. The Prometheus client adds `_total` to counters and `_bucket`, "
        "`_sum`, `_count` to histograms. Intervals: queue is QUEUED to SCHEDULED, prefill SCHEDULED to the first token, "
        "decode first to last token, inference SCHEDULED to last token, all by the engine's clock; time to first token and "
        "end to end begin with the arrival at the front end, by its clock.",
        table(("family", "kind", "labels", "what"), rows),
        "## Of the HTTP server",
        "Those of HTTP itself have no prefix, whatever `--metrics-prefix` says.",
        table(("family", "kind", "labels", "what"), http_rows),
        "`process_*` (memory, processor time, descriptors) and `python_*` (version, garbage collector) are the Prometheus "
        "client's; with several API processes each value has the label `process`. Families of plugins stand beside all of "
        "these: `pelton_kv_transfer_tokens` of the connector over files, `pelton_expert_moves` and `pelton_expert_balance` "
        "with `--enable-eplb`.",
        "## Families of vLLM's that are not here",
        table(("family", "why"), [(f"`{name}`", why) for name, why in NOT_EXPORTED.items()]),
    ]
    return "\n\n".join(parts)


def _further_families() -> list[tuple[str, str, str, str]]:
    """Those that stand outside the table of families, since their labels are facts, or since they are not always there."""
    from pelton.config import EngineConfig
    from pelton.messages.report import DeviceReport, EngineInfo
    from pelton.metrics.plugin_metrics import PluginTotals
    from pelton_plugins.data_parallel.client import state_sample
    from pelton_plugins.server.processes.owner import process_counts
    from pelton_plugins.stat_loggers.families import FAMILIES
    from pelton_plugins.stat_loggers.prometheus import PrometheusLogger

    logger = PrometheusLogger(EngineConfig.from_flat(model="m", enable_lora=True))
    logger.engine_started(
        EngineInfo(
            report=DeviceReport(),
            num_blocks=2,
            block_size=16,
            kv_cache_bytes=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=64,
        )
    )
    of_engines = PluginTotals("pelton_", {"model_name": "m", "engine": "0"})
    of_engines.add([state_sample(is_up=True)])
    told = {
        metric.name: metric for metric in [*logger.snapshot(), *of_engines.snapshot(), *process_counts("pelton_", 2, 0)]
    }
    known = {"pelton_" + family.name for family in FAMILIES}
    notes = {"pelton_cache_config_info": "model_name, engine, and a label for each setting"}
    several = "`--api-server-count` above 1"
    when = {
        "pelton_lora_requests_info": "`--enable-lora`",
        "pelton_engine_up": "`--data-parallel-size` above 1",
        "pelton_api_processes": several,
        "pelton_api_process_restarts": several,
    }
    return [
        (
            f"`{name}`",
            type(metric).__name__.lower(),
            notes.get(name, ", ".join(metric.labels)),
            metric.documentation + (f" Only with {when[name]}." if name in when else ""),
        )
        for name, metric in told.items()
        if name not in known
    ]


PLAIN = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="bfloat16")
"""What every backend takes, where the machine lets it."""
LATENT = replace(PLAIN, head_dim=576, num_kv_heads=1, is_mla=True, latent_dim=512)
"""The same for backends of attention over latents."""
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
CAPABILITIES = ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
MOST_SIZE = 1024  # of blocks and heads that are asked for
OPTIONS: dict[str, dict[str, Any]] = {
    "sliding windows": {"sliding_window": 32},
    "soft cap": {"logit_soft_cap": 30.0},
    "sinks": {"has_sinks": True},
    "ALiBi": {"has_alibi": True},
    "MLA": {"is_mla": True},
    "sparse": {"is_sparse": True},
    "multimodal prefix": {"has_mm_prefix": True},
    "decode context parallel": {"decode_context_parallel": 2},
}

STATES = ("state", "delta_rule", "key_delta_rule", "selective_scan", "short_conv", "lightning", "rg_lru")
"""And of layers with a state, the attention types."""
ATTENTION_TYPES: dict[str, dict[str, Any]] = {
    "decoder": {}, "encoder": {}, "cross": {}, "indexer": {"head_dim": 128},
    **{kind: {} for kind in STATES},
}  # fmt: skip
"""With what else their layers need."""

Backend = type[AttentionBackend]


def takes(backend: Backend, capability: tuple[int, int] | None = None, **changes: Any) -> bool:
    """Whether the backend takes the plain needs with these changes. What it has against the plain ones is this machine's."""
    plain = LATENT if "is_mla" in backend.handles else PLAIN
    for kind in STATES if "attention_type" in backend.handles else ():
        if not backend.unsupported(replace(PLAIN, attention_type=kind)):
            plain = replace(PLAIN, attention_type=kind)
    needs = replace(plain, **changes)
    reasons = set(backend.unsupported(needs, capability)) - set(backend.unsupported(plain))
    return not reasons and backend.handles.issuperset(needs.optional())


def spelled_sizes(sizes: Sequence[int]) -> str:
    """Sizes up to MOST_SIZE as "any", "%16", "%8 from 16 to 256", or one by one."""
    step = math.gcd(*sizes)
    if not sizes or list(sizes) != list(range(sizes[0], sizes[-1] + 1, step)):
        return ", ".join(map(str, sizes)) or "none"
    words = "any" if step == 1 else f"%{step}"
    if sizes[0] > step:
        words += f" from {sizes[0]}"
    return words if sizes[-1] + step > MOST_SIZE else f"{words} to {sizes[-1]}"


def kv_dtypes(backend: Backend) -> list[str]:
    """Those that do not depend on the model's dtype."""
    dtypes = [dtype for dtype in DTYPES if takes(backend, dtype=dtype)]
    return [kv for kv in KV_DTYPES if all(takes(backend, dtype=dtype, kv_dtype=kv) for dtype in dtypes)]


def capabilities(backend: Backend) -> str:
    """The least for each KV dtype, said once for those that have the first one's."""
    least: dict[tuple[int, int], list[str]] = {}
    for kv in kv_dtypes(backend):
        found = next(c for c in CAPABILITIES if takes(backend, c, kv_dtype=kv))
        least.setdefault(found, []).append(kv)
    words = []
    for found, kvs in least.items():
        version = "any" if found == CAPABILITIES[0] else f"{found[0]}.{found[1]}"
        words.append(f"{version} for {', '.join(kvs)}" if words else version)
    return "; ".join(words)


def features(entry: BackendEntry, device_type: str) -> dict[str, object]:
    """A backend's column: its class is asked, need by need."""
    backend, sizes = entry.resolve(), range(1, MOST_SIZE + 1)
    return {
        "what": entry.doc,
        "device": device_type,
        "priority": entry.priority,
        "graphs": backend.graph_support.name,
        "phases": ", ".join(sorted(backend.phases)),
        "dtypes": ", ".join(dtype for dtype in DTYPES if takes(backend, dtype=dtype)),
        "KV dtypes": ", ".join(kv_dtypes(backend)),
        "block sizes": spelled_sizes([size for size in sizes if takes(backend, block_size=size)]),
        "head sizes": spelled_sizes([size for size in sizes if takes(backend, head_dim=size)]),
        "attention types": ", ".join(
            kind for kind, other in ATTENTION_TYPES.items() if takes(backend, attention_type=kind, **other)
        ),
        **{what: "yes" if takes(backend, **need) else "no" for what, need in OPTIONS.items()},
        "compute capability": capabilities(backend) if device_type == "cuda" else "",
    }


def attention_page() -> str:
    """What each built-in attention backend takes."""
    plugins = load_plugins(only=[])
    columns = {
        f"`{entry.name}`": features(entry, device_type)
        for device_type in ("cpu", "cuda")
        for entry in plugins.entries("pelton_attention_backends", device_type=device_type)
    }
    rows = [(what, *(column[what] for column in columns.values())) for what in next(iter(columns.values()))]
    parts = [
        "# Attention backends",
        NOTE,
        "The first entry by priority whose backend fits the layer's needs is taken; `pelton backends MODEL` shows the whole "
        "table for a machine and a model, with the reasons. What is not named here is refused. `%16`: multiples of 16. "
        "`auto`: the model's dtype; other KV dtypes are named where they go with every dtype of the backend. A compute "
        "capability is the least.",
        table(("", *columns), rows),
    ]
    return "\n\n".join(parts)


def naming(words: Sequence[str], folders: Sequence[str]) -> str:
    """Links to the test files under `folders` that have one of `words` in quotes."""
    found = sorted(
        path
        for folder in folders
        for path in (DOCS.parent / "tests" / folder).rglob("test_*.py")
        if any(f'"{word}"' in path.read_text() for word in words)
    )
    return ", ".join(f"[{path.stem}](../{path.relative_to(DOCS.parent).as_posix()})" for path in found) or "none"


EQUALITY_TESTS = {
    "e2e/test_equality.py": "support/pelton_e2e.py", "e2e/test_experts.py": "e2e/test_experts.py",
    "e2e/test_families.py": "e2e/test_families.py", "e2e/test_cache_kinds.py": "e2e/test_cache_kinds.py",
}  # fmt: skip
"""Tests that compare ids with transformers', and the files that have their families."""


def tests_of(families: Sequence[str]) -> str:
    """Links to the tests of `EQUALITY_TESTS` that go through one of these families."""
    found = []
    for test, file in EQUALITY_TESTS.items():
        text = (DOCS.parent / "tests" / file).read_text()
        if any(f'"{family}"' in text for family in families):
            found.append(f"[{Path(test).stem}](../tests/{test})")
    return ", ".join(found) or "none"


def models_page() -> str:
    """The models and the forms of weights there are, and the tests that name them."""
    from pelton.testing.models import FAMILIES

    plugins = load_plugins(only=[])
    models = [entry for entry in plugins.entries("pelton_models") if entry.implementation == "pelton"]
    rows = []
    for entry in sorted(models, key=lambda entry: (entry.kind, entry.name)):
        families = [family for family, (_, model, _) in FAMILIES.items() if model in entry.architectures]
        module = entry.name.partition("-")[0]
        if families:
            tested = tests_of(families)
        elif entry.kind == POOL:
            tested = naming([module, f"xlm_{module}"], ["plugins/models"])
        else:
            tested = naming([*entry.architectures, entry.name], ["e2e"])
        names = ", ".join(f"`{name}`" for name in entry.architectures)
        rows.append((f"`{entry.name}`", names, entry.kind, entry.doc, tested))
    folders = ("plugins/quantization", "plugins/loaders", "core/quantization")
    methods = [
        (f"`{entry.name}`", entry.doc, naming([entry.name], folders))
        for entry in sorted(plugins.entries("pelton_quantization_methods"), key=lambda entry: entry.name)
    ]
    loaders = [
        (f"`{entry.name}`", entry.doc, naming([entry.name], ("plugins/loaders", "sdk", "e2e")))
        for entry in sorted(plugins.entries("pelton_model_loaders"), key=lambda entry: entry.name)
        if entry.load.startswith("pelton_plugins.loaders")
    ]
    parts = [
        "# Models and forms of weights",
        NOTE,
        "Architectures that Pelton has a model of its own for, by the name in config.json. Others run on transformers' modules "
        "([transformers_models.md](transformers_models.md)). A test of a model that generates compares greedy ids with those of "
        "transformers in float32, token for token: batched, alone, in chunks, with hits of the prefix cache, after preemption. A test "
        "of one that pools compares its vectors and scores.",
        table(("model", "architectures", "kind", "what it has", "tests that name it"), rows),
        "## Models with states",
        "State-space layers (Mamba, Mamba-2), the gated delta rule and short convolutions keep a state of one size for a request, however "
        "long it is: a page of the KV cache, whose size the blocks of attention beside it take on. States are float32, but for those of "
        "convolutions. Prompts are computed in chunks by products, but for Mamba's, whose tokens take turns; rows that decode are computed "
        "together. Drafts are refused. With `-tp N` each rank holds the states of its heads or channels "
        "([parallelism.md](parallelism.md#layers-with-states)). An attention backend of its own computes each kind "
        "([attention_backends.md](attention_backends.md)).",
        "### Prefix caching of states",
        "A running state changes with every token, so requests do not share one as they share blocks of keys and values. The prefix cache "
        "keeps copies: of a prompt the state behind its last full block, which the next turn of a chat, or the same prompt, goes on from; "
        "the state where two prompts part, when the second is computed (the third finds it; a model without attention to all "
        "tokens does not see where that is); and of an output the state behind its last full block, which the next one is written "
        "over. A request finds the longest "
        "prefix whose keys and values, and whose state, are there. It gets a copy of that, made on the device before its first step.",
        "Nobody holds what is kept: it lies among the free blocks until its block is needed, least recently used first. So it takes "
        "no room from a request; in a pool that is full nothing is kept, and a request that is preempted there computes its states "
        "again. A copy takes as much as a block of tokens in each of the groups of states, which is why a prompt leaves one or two, and "
        "not one at each block. Prompts of more than a block end a step where a state is kept, so they have one step more, or two; "
        "`enable_prefix_caching` off, or `enable_chunked_prefill` off, spares it. An executor whose steps are not ordered finds no states.",
        "## Forms of weights",
        "What `--quantization` or config.json's `quant_method` may name; [quantization.md](quantization.md) says how exact each is, and "
        "what it refuses.",
        table(("method", "what", "tests that name it"), methods),
        "## Loaders",
        "What `--load-format` may name; `auto` takes the one of the model's files. `--model-loader-extra-config` has their settings: a "
        "`uri` (and `concurrency`, `timeout_s`) of `streamed`, the `pattern` of `sharded_state`.",
        table(("loader", "what", "tests that name it"), loaders),
    ]
    return "\n\n".join(parts)


BEGIN, END = "<!-- methods: made by docs/make_tables.py -->", "<!-- end of methods -->"


def quantization_page() -> str:
    """The page as it stands, with the table of methods made anew."""
    plugins = load_plugins(only=[])
    rows = [
        (
            f"`{entry.name}`",
            entry.doc,
            naming([entry.name], ("plugins/quantization", "plugins/loaders", "core/quantization", "e2e")),
        )
        for entry in sorted(plugins.entries("pelton_quantization_methods"), key=lambda entry: entry.name)
    ]
    before, _, rest = (DOCS / "quantization.md").read_text().rstrip("\n").partition(BEGIN)
    made = table(("method", "what", "tests that name it"), rows)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def project_frames(skipped: int) -> list[tuple[str, str]]:
    """(file below its tree, function) of the calls that led here, outermost first, without the last `skipped`."""
    frame: FrameType | None = sys._getframe(skipped)
    calls: list[tuple[str, str]] = []
    while frame is not None:
        # Not by the path, where the checkout's own name may be a tree's.
        tree = frame.f_globals["__name__"].partition(".")[0]
        if tree in TREES:
            _, _, file = frame.f_code.co_filename.rpartition(f"/{tree}/")
            calls.append((f"{tree}/{file}", frame.f_code.co_qualname))
        frame = frame.f_back
    return calls[::-1]


def calls_to_the_launch() -> list[list[tuple[str, str]]]:
    """The calls from `LLM.generate` to the replay of a captured decode step: those on the caller's thread, and those on the
    worker's. A tiny model generates, and the last step's stacks are kept."""
    from pelton import LLM, SamplingParams
    from pelton.testing.models import make_tiny_checkpoint
    from pelton_platforms.device.graphs.call_graph import CallGraph
    from pelton_plugins.executors.in_process import WorkerThread

    submit, replay = WorkerThread.submit, CallGraph.replay
    before: list[tuple[str, str]] = []
    found: list[list[tuple[str, str]]] = []

    def watched_submit(self: WorkerThread, job: Callable[[], Any]) -> Any:
        before[:] = project_frames(2)
        return submit(self, job)

    def watched_replay(self: CallGraph) -> None:
        found[:] = [list(before), project_frames(2)]
        replay(self)

    with TemporaryDirectory() as folder:
        path = make_tiny_checkpoint(Path(folder) / "llama", "llama")
        llm = LLM(str(path), device="cpu", max_num_seqs=1, kv_cache_memory_bytes=2**20, disable_log_stats=True)
        with (
            llm,
            patch.object(WorkerThread, "submit", watched_submit),
            patch.object(CallGraph, "replay", watched_replay),
        ):
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    return found


def call_path_page() -> str:
    """Every call between a user's and the device's, for a captured decode step."""
    caller, worker = calls_to_the_launch()
    rows = [
        (number, thread, f"`{function}`", file)
        for number, (thread, (file, function)) in enumerate(
            [*(("caller", call) for call in caller), *(("worker", call) for call in worker)], start=1
        )
    ]
    parts = [
        "# From `LLM.generate` to the launch",
        NOTE,
        "The calls of a decode step whose graph is captured, as the interpreter's stack had them just before the replay, which is "
        f"the launch: {len(rows)}. The executor hands the step from the caller's thread to the worker's; on a GPU the path is the "
        "same. What passes between them is in [request_flow.md](request_flow.md).",
        table(("", "thread", "function", "file"), rows),
    ]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "hooks.md": hooks_page,
    "howto/kinds.md": kinds_page,
    "flags.md": flags_page,
    "limits.md": limits_page,
    "fields.md": fields_page,
    "metrics.md": metrics_page,
    "attention_backends.md": attention_page,
    "models.md": models_page,
    "quantization.md": quantization_page,
    "call_path.md": call_path_page,
}


def main() -> int:
    for name, make in PAGES.items():
        text = make() + "\n"
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
