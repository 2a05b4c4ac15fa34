"""What wheel and sdist must hold, and README's first example where the package is installed alone: part of ``make package``.

python tests/distributions.py dist               # the files
python tests/distributions.py --run README.md    # the example, in an environment that has nothing but the wheel
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = Parser().parsestr(wheel.read(next(n for n in names if n.endswith("METADATA"))).decode())
    roots = {name.split("/")[0] for name in names}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"numpyro_orthgp"}, f"more than the package: {roots}"
    assert "numpyro_orthgp/py.typed" in names, "no py.typed"
    strange = [
        n
        for n in names
        if "test" in n.lower() or (not n.endswith((".py", "py.typed", ".mplstyle")) and ".dist-info/" not in n)
    ]
    assert not strange, f"files that do not belong there: {strange}"
    assert any(n.endswith("licenses/LICENSE") for n in names), "no license"
    assert metadata["Description-Content-Type"] == "text/markdown" and len(metadata.get_payload()) > 1000, "no README"


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for wanted in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "Makefile",
        "numpyro_orthgp/py.typed",
        "tests/conftest.py",
    ):
        assert wanted in names, f"the sdist lacks {wanted}"
    strange = [n for n in names if "__pycache__" in n or n.endswith((".pyc", ".npz", ".nc"))]
    assert not strange, f"files that do not belong there: {strange}"


def run_example(readme: Path) -> None:
    import numpyro_orthgp

    assert "site-packages" in numpyro_orthgp.__file__, "not the installed package"
    example = re.search(r"`{3}python\n(.*?)`{3}", readme.read_text(), re.S)
    assert example, "README has no example"
    exec(compile(example[1], str(readme), "exec"), {})


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run_example(Path(sys.argv[2]))
    else:
        (wheel,), (sdist,) = (list(Path(sys.argv[1]).glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
        check_wheel(wheel)
        check_sdist(sdist)
        print(f"{wheel.name} and {sdist.name} hold what they should")
