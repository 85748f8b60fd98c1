"""Which cases of a grid are run."""

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
