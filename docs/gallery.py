"""Run the examples and keep what they print and draw for the documentation.

    python docs/gallery.py [--cards] [NAME ...]

Each script of ``examples/`` is run with its defaults, one after another. What it prints goes to ``docs/examples/tables/NAME.txt``
and its picture to ``docs/_static/examples/NAME.png``, reduced to what a page needs. The pages of ``docs/examples/`` show both as
they are. A part of the picture goes to ``docs/_static/cards/NAME.png``, for the cards of the first page; ``--cards`` cuts these
from the pictures that are there, without running anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image, ImageOps

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples"
TABLES = ROOT / "docs" / "examples" / "tables"
PICTURES = ROOT / "docs" / "_static" / "examples"
CARDS = ROOT / "docs" / "_static" / "cards"

MAX_WIDTH = 1400  # pixels: twice what a page shows
MAX_BYTES = 150_000
NO_BAR = "--no-progress-bar"

CARD = (480, 300)  # pixels
# Which part of a picture its card shows, mostly one of its panels: left, top, right, bottom, as shares of the whole.
PARTS = {
    "areal_counts": (0.0, 0.036, 0.61, 0.487),
    "classification": (0.0, 0.34, 0.86, 0.645),
    "convolutional": (0.0, 0.08, 0.30, 0.92),
    "counts": (0.0, 0.0, 0.53, 1.0),
    "dates": (0.47, 0.1, 1.0, 1.0),
    "deep": (0.345, 0.0, 0.655, 1.0),
    "deep_kernel": (0.68, 0.49, 1.0, 1.0),
    "demo": (0.5, 0.515, 1.0, 1.0),
    "digits": (0.03, 0.08, 0.343, 1.0),
    "gplvm": (0.0, 0.0, 0.53, 0.5),
    "large": (0.0, 0.0, 1.0, 1.0),
    "multitask": (0.0, 0.0, 0.63, 0.49),
    "neighbors": (0.52, 0.5, 1.0, 1.0),
    "nuts": (0.5, 0.52, 1.0, 1.0),
    "one_call": (0.0, 0.0, 0.505, 1.0),
    "regression": (0.0, 0.0, 0.5, 1.0),
    "seasons": (0.0, 0.0, 0.66, 0.47),
    "snelson": (0.35, 0.03, 0.667, 0.42),
    "spatial": (0.63, 0.0, 0.97, 0.49),
    "spectral": (0.0, 0.0, 0.485, 1.0),
    "streaming": (0.0, 0.0, 1.0, 1.0),
    "survey": (0.0, 0.0, 0.424, 1.0),
    "survival": (0.52, 0.0, 1.0, 1.0),
    "thompson": (0.0, 0.0, 0.53, 1.0),
}


def names() -> list[str]:
    """Names of all examples."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def run(name: str) -> str:
    """What a script prints."""
    script = SCRIPTS / f"{name}.py"
    options = [NO_BAR] * (NO_BAR in script.read_text())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, str(script), "--out", "out", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def machine_facts() -> str:
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(
        f"{package} {importlib.metadata.version(name)}" for package, name in (("JAX", "jax"), ("NumPyro", "numpyro"))
    )
    device = f"{cores} CPU cores" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    return f"{device}, {versions}"


def keep_picture(source: Path, target: Path) -> None:
    """A copy that is no wider than a page needs; with fewer colours, then smaller, where it has too many bytes."""
    with Image.open(source) as file:
        picture = Image.new("RGB", file.size, "white")
        picture.paste(file, mask=file.getchannel("A") if file.mode == "RGBA" else None)
    width = min(picture.width, MAX_WIDTH)
    while True:
        small = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
        # Colours that are far from others, however rare: a bar of colours must keep its ends.
        few = small.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2)
        for candidate in (small, few):
            candidate.save(target, optimize=True)
            if target.stat().st_size < MAX_BYTES:
                return
        width = int(0.9 * width)


def keep_card(name: str) -> None:
    """The part of a kept picture that its card shows, on white, all of one size."""
    with Image.open(PICTURES / f"{name}.png") as file:
        box = [round(share * side) for share, side in zip(PARTS[name], 2 * file.size, strict=True)]
        part = file.convert("RGB").crop(box)
    CARDS.mkdir(parents=True, exist_ok=True)
    card = ImageOps.pad(part, CARD, Image.Resampling.LANCZOS, color="white")
    card.quantize(128, Image.Quantize.MAXCOVERAGE, kmeans=2).save(CARDS / f"{name}.png", optimize=True)


def keep(name: str, printed: str) -> None:
    TABLES.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    (TABLES / f"{name}.txt").write_text(f"$ make {name}\n{printed.rstrip()}\n({machine_facts()})\n")
    keep_picture(ROOT / "out" / f"{name}.png", PICTURES / f"{name}.png")
    keep_card(name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to run; by default all")
    parser.add_argument(
        "--cards", action="store_true", help="cut the cards from the pictures that are there, and run nothing"
    )
    args = parser.parse_args(argv)
    chosen = args.names or names()
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(names())}")
    if args.cards:
        for name in args.names or PARTS:
            keep_card(name)
        return
    for name in chosen:
        print(f"{name} ...", end=" ", flush=True)
        start = time.perf_counter()
        keep(name, run(name))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
