"""What a first start compiles for compute capability 9.0, with a GPU or without: all that later steps launch, and only once. The compiler
takes these kernels as far as its first representation."""

from __future__ import annotations

from pathlib import Path

import pytest
from pelton_programs import run_program
from pelton_stages import digest_of_stages
from triton import knobs

from pelton.testing.models import make_tiny_checkpoint


def starts(count: int, cache: Path, *arguments: str) -> list[dict[str, int]]:
    read = Path(knobs.cache.dir, f"read_{digest_of_stages()}")  # by all families, and by runs before
    read.mkdir(parents=True, exist_ok=True)
    refused = cache.parent / f"{cache.name}_refused"
    refused.mkdir()
    environment = {
        "TRITON_CACHE_DIR": str(cache),
        "PELTON_TEST_READ_KERNELS": str(read),
        "PELTON_TEST_REFUSED_KERNELS": str(refused),
        "OPENBLAS_NUM_THREADS": "1",
    }  # else numpy starts threads, which no fork has
    found = run_program("pelton_rehearsed.py", str(count), *arguments, **environment)
    assert [path.read_text() for path in refused.iterdir()] == []
    assert len(found) == count
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("script_forks")
@pytest.mark.timeout(900)  # two first starts, a minute each on a slow machine
@pytest.mark.parametrize(
    "arguments, config",
    [
        (("llama", "NONE", "fp8_e4m3"), {}),
        (("gemma3", "PIECEWISE"), {}),
        (
            ("qwen3_moe", "FULL_AND_PIECEWISE"),
            {"mlp_only_layers": [0], "num_hidden_layers": 4},
        ),  # the first as Qwen3's, others with experts
    ],
    ids=["llama", "gemma3", "qwen3_moe"],
)
def test_steps_of_any_size_find_their_kernels_and_so_does_a_second_start(tmp_path, tmp_path_factory, arguments, config):
    family, *rest = arguments
    model = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model") / family, family, head_dim=64, max_position_embeddings=4096, **config
    )
    arguments = (str(model), *rest)
    nothing = {"of_the_last_two": 0, "of_all": 0, "of_all_layers": 0, "of_odd_steps": 0}
    first, *second = starts(1 if "PIECEWISE" in arguments else 2, tmp_path, *arguments)
    if "NONE" in arguments:
        assert first.pop("of_the_last_two") > 0 and first.pop("of_all") > 20
    else:
        # The pass before the weights leaves over what attention behind a common prefix launches in eager decode steps (PIECEWISE).
        # The pass behind them, still before the engine is ready, compiles it.
        assert first.pop("early") > 20 and first.pop("of_all") <= (3 if "PIECEWISE" in arguments else 0)
    assert first.items() <= nothing.items()
    # Graphs of pieces alone change nothing for a second start.
    assert second == ([] if "PIECEWISE" in arguments else [nothing])
