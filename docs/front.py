"""Draws the picture of README and of the site's first page: python docs/front.py [--out FILE]

Runs the first python block of README, and draws the function that it fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from pictures import blocks_and_images

from numpyro_orthgp import likelihoods, plots

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "_static" / "front" / "fit.png"


def fitted() -> dict[str, Any]:
    """What README's first block leaves behind."""
    code = next(code for code, _ in blocks_and_images((ROOT / "README.md").read_text()) if code is not None)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace


def draw(path: Path) -> None:
    fit = fitted()
    noise = fit["guide"].median(fit["fit"].params)["noise"]
    figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    observed = {"data": (fit["X"], fit["y"]), "likelihood": lambda m: likelihoods.Gaussian(m, noise)}
    plots.function(fit["f"], (-0.8, 10.8), **observed, num_paths=3, ax=ax)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="where the picture goes")
    args = parser.parse_args()
    draw(args.out)
    print(f"{args.out.stat().st_size / 1000:6.1f} kB  {args.out.name}")


if __name__ == "__main__":
    main()
