"""Draws the pictures of a page from scratch: python docs/pictures.py [--page PAGE] [--out FOLDER]

Runs the page's python blocks in order, as one script. An image that follows a block is the last figure which that block drew. The
blocks have fixed seeds, so pictures change only where the code, or a library beneath, does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BLOCK_OR_IMAGE = re.compile(r"^```python\n(?P<code>.*?)^```$|!\[[^\]]*\]\((?P<image>[^)]+\.png)\)", re.M | re.S)


def blocks_and_images(page: str) -> Iterator[tuple[str | None, str | None]]:
    for found in BLOCK_OR_IMAGE.finditer(page):
        yield found["code"], found["image"]


def draw(page: Path, out: Path | None) -> list[Path]:
    """Run the page and write each image where the page looks for it, or under its own name into ``out``."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    written = []
    for code, image in blocks_and_images(page.read_text()):
        if code is not None:
            plt.close("all")
            exec(compile(code, str(page), "exec"), namespace)
            continue
        if not plt.get_fignums():
            raise SystemExit(f"{page}: no figure was drawn before the image {image}.")
        path = (page.parent / image).resolve() if out is None else out / Path(image).name
        path.parent.mkdir(parents=True, exist_ok=True)
        plt.savefig(path, dpi=100, metadata={"Software": None})
        written.append(path)
    plt.close("all")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=HERE / "guide" / "pictures.md")
    parser.add_argument("--out", type=Path, help="folder for all pictures, instead of where the page looks for them")
    args = parser.parse_args()
    for path in draw(args.page, args.out):
        print(f"{path.stat().st_size / 1000:6.1f} kB  {path.name}")


if __name__ == "__main__":
    main()
