"""Time the sum over ranks with residual and norm, in a captured chain, one GPU a rank, beside NCCL's sum.

    python tests/tools/sums_of_ranks.py --ranks 4 --width 4096 --rows 1 2 4 8 16 32 64 128

Words with a flag each in one shot and, of more than two ranks, in two, and rows with a flag each (the many rows' kernels). Prints us a
call: the median over replays, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH, REPLAYS = 100, 15


def of_rank(rank: int, size: int, store: str, width: int, all_rows: list[int]) -> None:
    import torch

    from pelton.ops.interface import AllReduceNeeds, AllReduceTensors, NormSpec
    from pelton.parallel.communicator import CommunicatorContext, GroupContext
    from pelton_platforms.gpu.peers import add_norm, communicator

    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    context = CommunicatorContext(rank=rank, size=size, device=device, store=store, timeout_s=20.0)
    group = communicator.PeerCommunicator(context)
    needs = AllReduceNeeds(dtype="bfloat16", hidden_size=width, tp_size=size)
    reduce = add_norm.PeerAllReduce.bind(needs, AllReduceTensors(GroupContext(group)))
    spec, norm = NormSpec(size=width, eps=1e-5), torch.ones(width, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream()

    def timed(call, rows: int) -> float:
        given = torch.randn(rows, width, device=device).bfloat16()
        residual = torch.zeros_like(given)
        with torch.cuda.stream(stream):
            for _ in range(3):
                call(given, residual)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(LENGTH):
                    call(given, residual)
            times = []
            for _ in range(REPLAYS):
                group.all_reduce(torch.ones(1, device=device))
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / LENGTH)
        return sorted(times)[REPLAYS // 2]

    def fused(given, residual):
        if reduce.add_norm(given, residual, norm, spec, None, None) is None:
            raise LookupError

    never = 1 << 40
    kinds = {"one shot": (never, never), "two shots": (0, never), "a flag a row": (0, 0)}
    if size == 2:
        del kinds["two shots"]
    group.nccl_from_bytes = never
    for rows in all_rows:
        found = {"rows": rows}
        for kind, (add_norm.TWO_SHOTS_FROM_BYTES, many_from) in kinds.items():
            add_norm.MANY_FROM_BYTES = add_norm.MANY_FROM_BYTES_OF_MORE = many_from
            if kind == "a flag a row" or rows * width <= 1 << 20:
                found[kind] = timed(fused, rows)
        if group.nccl is not None:
            found["NCCL's sum"] = timed(lambda given, _: group.nccl.all_reduce(given), rows)
        print(json.dumps(found), flush=True)
    group.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        of_rank(arguments.rank, arguments.ranks, arguments.store, arguments.width, arguments.rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--store", str(Path(folder) / "store")]
        began = time.perf_counter()
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(arguments.ranks)
        ]
        for lines in zip(*[rank.stdout for rank in ranks], strict=False):
            of_all = [json.loads(line) for line in lines]
            print(
                f"{of_all[0]['rows']:>6} rows",
                *[f"{kind} {max(one[kind] for one in of_all):7.2f} us" for kind in of_all[0] if kind != "rows"],
                sep="   ",
                flush=True,
            )
        print(f"{arguments.ranks} ranks, {arguments.width} wide, bfloat16, {time.perf_counter() - began:.0f} s")
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
