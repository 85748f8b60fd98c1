"""Run every causal language model that transformers can build, and print what each answers: equal ids, a refusal, or worse.

    python tests/tools/sweep_transformers.py [--models TYPE ...] [--impl auto|transformers] [--save found.json]
    python tests/tools/sweep_transformers.py --habits --models phi ... --impl transformers   # ropes, heads, biases, forms of files
    python tests/tools/sweep_transformers.py --table found.json --page docs/transformers_models.md

Each model type gets a small random checkpoint and a process of its own, which a limit of processor time ends. transformers says what
follows each prompt (float32, one row, no cache); Pelton is asked alone, batched, in chunks and with hits of the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from pelton_sweep import CRASH, EQUAL, HANG, LENGTHS, REFERENCE, REFUSED, UNCLEAR, WRONG, compare, one_line, reference  # noqa: E402

OUTCOMES = (WRONG, HANG, CRASH, UNCLEAR, REFERENCE, REFUSED, EQUAL)
"""Worst first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="TYPE", help="instead of all")
    parser.add_argument("--readers", action="store_true", help="models that read images or sound, too: their text")
    parser.add_argument(
        "--habits", action="store_true", help="each model in the variants of pelton_small_models.HABITS"
    )
    parser.add_argument("--impl", default="auto", help="model_impl")
    parser.add_argument("--limit-s", type=int, default=150, help="of processor time for one model")
    parser.add_argument("--save", type=Path, help="JSON of what was found; what it has of other models stays")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of what was saved, and run nothing")
    parser.add_argument("--page", type=Path, help="with --table: the page to write it into, in place of printing it")
    arguments = parser.parse_args()
    if arguments.table:
        made = table(json.loads(arguments.table.read_text()))
        if arguments.page:
            write(arguments.page, made)
        else:
            print(made)
        return 0
    found = json.loads(arguments.save.read_text()) if arguments.save and arguments.save.exists() else {}
    prepare()
    for name, model_type, changes in questions(arguments):
        began = time.monotonic()
        one = in_own_process(model_type, arguments.impl, arguments.limit_s, changes)
        found[f"{name}/{arguments.impl}"] = one
        print(f"{name:32} {one['outcome']:18} {time.monotonic() - began:5.0f} s  {one['line'][:300]}", flush=True)
        if arguments.save:
            arguments.save.write_text(json.dumps(found, indent=1))
    print(Counter(one["outcome"] for one in found.values()))
    return 0


def model_types(*, reads_more: bool) -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    readers = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return list(readers if reads_more else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def questions(arguments: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Names, model types and what is changed in their checkpoints."""
    from pelton_small_models import HABITS, has_habit

    for model_type in arguments.models or model_types(reads_more=arguments.readers):
        if arguments.readers:
            yield f"{model_type}+", model_type, {"reads_more": True}
        elif not arguments.habits:
            yield model_type, model_type, {}
        else:
            for habit in (one for one in HABITS if has_habit(model_type, one)):
                yield f"{model_type}: {habit}", model_type, HABITS[habit]


def prepare() -> None:
    """Import what each process needs, once: they are forks."""
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from pelton import LLM, SamplingParams  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


def in_own_process(model_type: str, implementation: str, limit_s: int, changes: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    folder = tempfile.mkdtemp(prefix="sweep_")
    process = context.Process(target=_child, args=(theirs, folder, model_type, implementation, limit_s, changes))
    process.start()
    theirs.close()
    stage, found = "start", None
    try:
        while ours.poll(6 * limit_s):
            kind, value = ours.recv()
            if kind == "found":
                found = value
                break
            stage = value
    except EOFError:
        pass
    if found is None:
        is_alive = process.is_alive()
        process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)
    if found is None:
        outcome = HANG if is_alive or process.exitcode in (-24, -9) else CRASH
        return {
            "outcome": REFERENCE if stage == "transformers" else outcome,
            "line": f"ended while {stage}: {process.exitcode}",
        }
    return found


def _child(pipe: Any, folder: str, model_type: str, implementation: str, limit_s: int, changes: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    with open(os.devnull, "w") as nowhere:
        if not os.environ.get("SWEEP_LOUD"):
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        found = ask(pipe, folder, model_type, implementation, **changes)
    pipe.send(("found", found))
    os._exit(0)


def ask(pipe: Any, folder: str, model_type: str, implementation: str, **changes: Any) -> dict[str, Any]:
    from pelton_e2e import make_prompts
    from pelton_small_models import VOCAB_SIZE, make_small

    pipe.send(("stage", "transformers"))
    prompts = make_prompts(changes.get("vocab_size", VOCAB_SIZE), LENGTHS)
    try:
        make_small(folder, model_type, **changes)
        outputs, gaps = reference(folder, prompts)
    except BaseException as error:
        return {"outcome": REFERENCE, "line": one_line(error), "traceback": traceback.format_exc()[-3000:]}
    pipe.send(("stage", "Pelton"))
    architecture = json.loads((Path(folder) / "config.json").read_text()).get("architectures", ["?"])[0]
    return {"architecture": architecture, "varied": len({one for row in outputs for one in row})} | compare(
        folder, implementation, prompts, outputs, gaps
    )


def table(found: dict[str, Any]) -> str:
    """Return Markdown: what runs, what is refused and why, what transformers itself could not be asked."""
    from pelton.plugins import load_plugins

    own = {name for entry in load_plugins(only=[]).entries("pelton_models") for name in entry.architectures}
    equal: dict[str, list[str]] = defaultdict(list)
    rest: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, one in sorted(found.items()):
        model_type, reads_more = name.split("/")[0].removesuffix("+"), "+" in name
        if one["outcome"] == EQUAL:
            kind = "Pelton's own models" if one["architecture"] in own else "on transformers' modules"
            equal[f"{kind}, text of models that read more" if reads_more else kind].append(f"`{model_type}`")
        else:
            why = "" if one["outcome"] == REFERENCE else reason(one["line"])
            rest[one["outcome"], why].append(f"`{model_type}`")
    lines = ["| equal ids | model types |", "| --- | --- |"]
    lines += [f"| {kind} ({len(names)}) | {', '.join(names)} |" for kind, names in sorted(equal.items())]
    lines += ["", "| | why | model types |", "| --- | --- | --- |"]
    for (outcome, why), names in sorted(rest.items(), key=lambda one: (OUTCOMES.index(one[0][0]), one[0])):
        lines.append(f"| {SHOWN.get(outcome, outcome)} | {why} | {', '.join(dict.fromkeys(names))} |")
    return "\n".join(lines)


SHOWN = {REFERENCE: "not asked: transformers does not run the small model, or not on text alone"}


def reason(line: str) -> str:
    """Return why a model is refused, without its module's name and values of its own."""
    why = line.split(" cannot run on transformers' modules: ")[-1].split(". Use a model")[0]
    why = re.sub(r"shapes alone \(.*", "shapes alone", why)
    why = re.sub(
        r"^transformers has no causal.*",
        "transformers has no causal language model under the type that the checkpoint states",
        why,
    )
    return re.sub(
        r"^The checkpoint does not fit.*",
        "its tensors have other names than those of Pelton's model of that architecture "
        "(`--model-impl transformers` runs it)",
        why,
    )


def write(page: Path, made: str) -> None:
    """Put what was made between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")


BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
