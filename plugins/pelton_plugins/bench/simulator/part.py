"""One process of a simulation: a job as JSON on standard input, its figures as JSON on standard output."""

from __future__ import annotations

import json
import sys

from pelton_plugins.bench.simulator.command import Job, to_plain


def main() -> None:
    job = json.load(sys.stdin)
    print(json.dumps(to_plain(Job(job["argv"]).simulate(range(*job["servers"])))))


if __name__ == "__main__":
    main()
