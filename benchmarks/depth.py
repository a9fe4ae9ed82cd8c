"""Latency of draft models with equal parameters, from deep and narrow to shallow and wide, with random weights.

    python benchmarks/depth.py [--parameters 1e8] [--depths 48,24,12,6,3] [--repeats 9] [--device cpu] [--threads N]

A pass reads the same weights whatever the depth, so the floor is the same; only the overhead of each layer differs. The last
line is one JSON object; its depth_share is the R^2 of latency as a linear function of depth, null for fewer than three depths.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch

from foresay.cli.typed_errors import as_typed
from foresay.errors import ForesayError
from foresay.lab.measure.depth_study import DEPTHS, depth_share, study


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e8, help="of each model, embeddings not counted")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="numbers of layers, separated by commas")
    parser.add_argument("--repeats", type=int, default=9, help="passes of each model; the median is shown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="processor threads")
    given = parser.parse_args(args)
    try:
        depths = [int(part) for part in given.depths.split(",")]
    except ValueError:
        parser.error(f"--depths {given.depths!r} must be integers separated by commas, such as 48,24,12")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    try:
        timed = study(given.parameters, depths=depths, device=given.device, repeats=given.repeats)
    except ForesayError as error:
        parser.error(as_typed(str(error), {"device": "--device", "parameters": "--parameters", "depth": "--depths"}))
    best = min(shape.seconds for shape in timed)
    for shape in timed:
        print(
            f"{shape.layers:3} layers, width {shape.hidden:5}, {shape.parameters / 1e6:.0f} M parameters: "
            f"{1e3 * shape.seconds:.2f} ms per token, {shape.seconds / best:.2f}x the fastest"
        )
    share = depth_share(timed) if len(timed) > 2 else None
    print(json.dumps({"shapes": [asdict(shape) for shape in timed], "depth_share": share}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
