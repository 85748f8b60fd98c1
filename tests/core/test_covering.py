"""Which cases of a grid are run."""

import subprocess
import sys
from itertools import combinations, product

import pytest
from pelton_covering import covering


@pytest.mark.parametrize("sizes", [(2, 6, 5, 2, 6), (3, 3), (1, 4, 2), (7,)])
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_values_is_met(sizes, strength):
    grid = list(product(*map(range, sizes)))
    chosen = [grid[index] for index in covering(grid, strength)]
    count = min(strength, len(sizes))
    for places in combinations(range(len(sizes)), count):
        met = {tuple(case[place] for place in places) for case in chosen}
        assert met == set(product(*(range(sizes[place]) for place in places)))
    largest = sorted(sizes)[-count:]
    least = (
        largest[0] * largest[1] * largest[2] if count == 3 else largest[0] * largest[-1] if count == 2 else largest[0]
    )
    assert least <= len(chosen) <= 1.6 * least


def test_combinations_that_no_case_has_are_not_asked_for():
    assert covering([(0, 0), (1, 1)], 2) == [0, 1]
    assert covering([], 2) == []


def test_cases_with_no_new_pair_are_left_out():
    assert len(covering(list(product(range(2), repeat=3)), 2)) == 4


@pytest.fixture(params=range(4))
def first(request):
    return request.param


@pytest.mark.covering(2)
@pytest.mark.parametrize("second, third", [(1, {}), (2, {}), (3, {})])
@pytest.mark.parametrize("fourth", [1.5, None, "x"])
def test_a_grid(first, second, third, fourth):
    assert first in range(4) and second in (1, 2, 3) and third == {} and fourth in (1.5, None, "x")


@pytest.mark.usefixtures("script_forks")
def test_a_marked_grid_is_thinned():
    """What pytest says of a case differs between its versions."""
    common = ["--collect-only", "-q", "-p", "no:cacheprovider", f"{__file__}::test_a_grid"]
    code = (
        f"import pytest\nfor flag in ([], ['--covering=1'], ['--covering=0']):\n    pytest.main([*flag, *{common!r}])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    counts = [part.count("::test_a_grid[") for part in found.split(" in ")[:3]]  # "12/36 tests collected in 0.02s"
    assert 12 <= counts[0] <= 16 and counts[1:] == [4, 36], found
