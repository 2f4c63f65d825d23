"""Trains a GPT under a budget, and compares it with the same run without one, like `torchstorm train --compare`.

python examples/train_gpt.py [--steps 6]
"""

import argparse
import tempfile
from pathlib import Path

from torchstorm.train.job import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on this file's own text, within a memory budget.")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(Path(__file__).read_text() * 8)
        result = train(
            {
                "model": "gpt-nano",
                "data": str(text),
                "device": "cpu",
                "steps": options.steps,
                "batch": 8,
                "seq": 128,
                "warmup": 2,
                "sample_chars": 40,
                "ram": "16MiB",
                "disk": str(Path(folder, "spill")),
                "compare": True,
                "out": str(Path(folder, "run")),
            }
        )
    print(f"losses and weights bit-identical: {result.bit_identical}")


if __name__ == "__main__":
    main()
