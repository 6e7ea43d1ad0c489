"""Run a benchmark with a network link of limited bandwidth for each rank. It needs Linux, root, and iproute2.

    unshare --net --mount python benchmarks/links.py --mbit 200 benchmarks/weight_updates.py --rounds 3

Ranks of one host share memory, and a loopback without cost. Here each rank has a network namespace, which a bridge connects
with the others. Like a host's network card, it sends and receives at most ``--mbit`` each (``tc``, a token bucket).
``FLATSHARD_SHARED_MEMORY=0`` sends all payloads by it. ``unshare`` leaves the machine's own network and mounts as they are,
and everything is gone when the command ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from suite import arguments


def tool(*command: str) -> None:
    """Run an iproute2 command."""
    subprocess.run(command, check=True)


def limit(device: str, mbit: float, *inside: str) -> None:
    """Limit the bandwidth of packets that leave by ``device``. A burst of 5 ms passes at once; 200 ms may queue."""
    burst = str(max(16_000, int(mbit * 1e6 / 8 * 0.005)))
    tool(
        *inside,
        "tc",
        "qdisc",
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        burst,
        "latency",
        "200ms",
    )


def join(rank: int, mbit: float) -> None:
    """Make a namespace for a rank, and its link to the bridge."""
    space, outside = f"rank{rank}", f"link{rank}"
    tool("ip", "netns", "add", space)
    tool("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
    tool("ip", "link", "set", outside, "master", "bridge", "up")
    tool("ip", "-n", space, "addr", "add", f"10.9.0.{rank + 1}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        tool("ip", "-n", space, "link", "set", device, "up")
    limit(outside, mbit)
    limit("eth0", mbit, "ip", "netns", "exec", space)


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--mbit", type=float, required=True, help="of each link, in each direction")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a benchmark's file, and its options")
    args = parser.parse_args()
    Path("/run/netns").mkdir(exist_ok=True)
    tool("mount", "-t", "tmpfs", "none", "/run/netns")
    tool("ip", "link", "add", "bridge", "type", "bridge")
    tool("ip", "link", "set", "bridge", "up")
    for rank in range(args.ranks):
        join(rank, args.mbit)
    common = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29500"}
    common |= {"GLOO_SOCKET_IFNAME": "eth0", "FLATSHARD_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"rank{rank}", sys.executable, *args.command],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(args.ranks)
    ]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    raise SystemExit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
