"""Processes data on a disk block by block, in several rounds: NVMe -> GPU -> compute -> NVMe.

    python examples/through_disk.py [FILE] [--device cuda] [--rounds 3] [--blocks 16] [--rows 1024]

Only a few blocks are in memory at a time: the next block is read and the previous one written while one is computed.
Without a GPU it runs on the CPU. At the end, the data on the disk must be bit-identical to the same rounds in memory.
"""

import argparse
import tempfile
import time
from collections import deque
from pathlib import Path

import torch

from torchstorm import Kind, Volume

WIDTH = 512


def advance(block: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes one round of one block."""
    return torch.tanh(block @ weight)


def run(path: Path, device: torch.device, *, rounds: int, blocks: int, rows: int) -> None:
    """Creates a volume, processes it, and checks it."""
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH).div(WIDTH**0.5).to(device)
    start = torch.randn(blocks, rows, WIDTH)
    kind = Kind(dtype=torch.float32, shape=(rows, WIDTH), length=blocks)
    with Volume.create(path, {"state": kind}, replace=True, device=device) as volume:
        state = volume["state"]
        state.write(0, start)
        volume.flush()
        begin = time.perf_counter()
        for _ in range(rounds):
            coming = state.read_async(0)
            leaving = deque()
            for number in range(blocks):
                (block,) = coming.result()  # on a GPU, only the current stream waits
                if number + 1 < blocks:
                    coming = state.read_async(number + 1)
                leaving.append(state.write_async(number, advance(block, weight)))
                if len(leaving) > 2:
                    leaving.popleft().wait()
            while leaving:  # the next round reads these blocks
                leaving.popleft().wait()
        volume.flush()  # makes the writes durable
        seconds = time.perf_counter() - begin
        moved = 2 * rounds * kind.nbytes
        info = volume.info()
        print(f"{rounds} rounds of {kind.nbytes / 1e6:.0f} MB: {moved / seconds / 1e9:.2f} GB/s, path {info.path}")

    with Volume.open(path, read_only=True) as volume:
        for number in range(blocks):
            expected = start[number].to(device)
            for _ in range(rounds):
                expected = advance(expected, weight)
            if not torch.equal(volume["state"][number], expected.cpu()):
                raise SystemExit(f"Block {number} is not what the same rounds in memory give.")
    print(f"{blocks} blocks are bit-identical to the same rounds in memory")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="where the volume is made (default: a temporary file)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(
            given.file or Path(folder) / "state.storm",
            torch.device(given.device),
            rounds=given.rounds,
            blocks=given.blocks,
            rows=given.rows,
        )


if __name__ == "__main__":
    main()
