"""`pelton collect-env`: what a bug report needs to know of this machine. Loads no torch; shows no secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

import msgspec

from pelton import __version__, env, hookspecs
from pelton.errors import PeltonError
from pelton.plugins import DISTRIBUTION, load_plugins
from pelton_plugins.flags import parse_flags

OTHER_PACKAGES = ("transformers", "gguf", "triton")
SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "LD_PRELOAD",
)  # fmt: skip


class CollectEnvArguments(msgspec.Struct, frozen=True, kw_only=True):
    """How to print it."""

    json: bool = False
    """Print JSON."""


def run(argv: list[str]) -> int:
    doc = "Print what a bug report needs to know of this machine."
    parsed = parse_flags(
        argv, [CollectEnvArguments], positional=None, program="pelton collect-env", doc=doc, engine=False, environ={}
    )
    facts = collect()
    if parsed.structs["CollectEnvArguments"].json:
        print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items()))
    return 0


def collect() -> dict[str, str]:
    """Fact to value, in the order in which they are shown."""
    facts = {
        "pelton": f"{__version__} (hook API {'.'.join(map(str, hookspecs.API_VERSION))})",
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": platform.platform(),
        "cpu": f"{_cpu_name()}, {_usable_cpus()} of {os.cpu_count()} cores usable",
        "memory": _memory(),
        "cuda driver": _cuda_driver(),
    }
    for name in [*_dependencies(), *OTHER_PACKAGES]:
        facts[name] = _version_of(name)
    facts["plugins"] = _plugins()
    for name in SHOWN_VARIABLES:
        if name in os.environ:
            facts[name] = os.environ[name]
    for variable in env.VARIABLES:
        if variable.name in os.environ:
            facts[variable.name] = "(set, not shown)" if variable is env.API_KEY else os.environ[variable.name]
    for number, line in enumerate(env.misspelt(), 1):
        facts[f"warning {number}"] = line
    return facts


def _dependencies() -> list[str]:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required if "extra ==" not in line]


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _plugins() -> str:
    try:
        return ", ".join(map(str, load_plugins().loaded))
    except PeltonError as error:
        return f"broken: {error}"


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return f"{int(match[1]) / 2**20:.1f} GiB" if match else "unknown"


def _cuda_driver() -> str:
    match = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _read("/proc/driver/nvidia/version"))
    return match[1] if match else "none"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
