"""`pelton bench serve --client-processes`: several clients that begin together, each with its share of the requests.

`python -m pelton_plugins.bench.serve_clients PLACE ARGUMENTS` is one of them. It says when it is ready, and is told when to begin, by the
clock that all processes of a host share.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import msgspec

from pelton.errors import EngineError, PeltonError
from pelton_plugins.bench.metrics import RequestTimes
from pelton_plugins.bench.serve import measure, read_arguments, target_of

LEAD_S = 0.05
"""Between the moment when the last client is ready and the time of the first request."""


class _Told(msgspec.Struct, frozen=True):
    """Measurements of one client; seconds: until its last request ended."""

    requests: list[RequestTimes]
    seconds: float


def measure_in_processes(argv: list[str], count: int) -> tuple[list[RequestTimes], float]:
    """Return the times of all requests, in order, and the seconds until the last has ended. argv: of `bench serve`. Raises `EngineError`
    when a client ends without them."""
    command = [sys.executable, "-m", __name__]
    clients = [
        subprocess.Popen([*command, str(place), *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for place in range(count)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != b"ready\n":
                raise EngineError("A client's process failed; its message is above.")
        begins = time.perf_counter() + LEAD_S
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"%.9f\n" % begins)
            client.stdin.flush()
        parts = [msgspec.msgpack.decode(client.communicate()[0], type=_Told) for client in clients]
    except (BrokenPipeError, msgspec.DecodeError) as error:
        raise EngineError("A client's process failed; its message is above.") from error
    finally:
        for client in clients:
            client.kill()
            client.wait()
    done = [RequestTimes()] * sum(len(part.requests) for part in parts)
    for place, part in enumerate(parts):
        done[place :: len(parts)] = part.requests
    return done, max(part.seconds for part in parts)


def main() -> int:
    place, arguments = int(sys.argv[1]), read_arguments(sys.argv[2:])

    def begins() -> float:
        print("ready", flush=True)
        return float(sys.stdin.readline())

    try:
        done, seconds = asyncio.run(measure(target_of(arguments), arguments, place, begins))
    except PeltonError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(_Told(done, seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
