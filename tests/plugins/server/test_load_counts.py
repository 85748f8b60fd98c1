"""Counts that API processes share."""

from __future__ import annotations

import os

from pelton_plugins.server.processes.load_counts import MOST_ENGINES, LoadCounts


def test_each_process_sees_what_engines_have_of_the_others():
    file = LoadCounts.make_file(3)
    counts = [LoadCounts(file, 3) for _ in range(3)]
    for index, count in enumerate((7, 20, 100)):
        counts[index].tell(index, count)
    assert counts[0].share(0, 0, 2) == 0
    assert counts[1].share(1, 0, 5) == 2
    assert counts[2].share(2, MOST_ENGINES - 1, 9) == 0
    assert counts[2].share(2, 0, 1) == 7
    assert counts[0].share(0, MOST_ENGINES - 1, 0) == 9
    assert counts[1].share(1, 0, 4) == 3  # in place of the 5 before
    assert counts[0].share(0, MOST_ENGINES, 3) == counts[1].share(1, MOST_ENGINES, 0) == 0
    assert counts[1].total() == 127
    counts[0].clear(2)  # the process is gone
    assert counts[1].total() == 27
    assert counts[0].share(0, MOST_ENGINES - 1, 0) == 0 and counts[0].share(0, 0, 2) == 4
    for one in counts:
        one.close()
    os.close(file)
