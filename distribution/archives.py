"""Build the wheel and the sdist, check both, and use the wheel where nothing else of this repository is.

    python -m distribution.archives [FOLDER] --torch-from PYTHON

Without FOLDER they are checked and not kept. PYTHON is an interpreter whose environment holds PyTorch: the fresh
environment gets the wheel alone, installed without dependencies, and borrows the rest. Exit code 1 names the check that
failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from harness.arguments import Parser
from harness.repository import ROOT

SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "nsa")
"""What the archives are made of. Of a copy: what an earlier build left in the working tree gets into none."""
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def copy_sources(folder: Path, root: Path = ROOT) -> None:
    """Copy what the archives are made of into `folder`."""
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(root / name, folder / name)


def build(folder: Path) -> tuple[Path, Path]:
    """Write the sdist, and the wheel of what it holds, into `folder`: (wheel, sdist). Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as copy:
        copy_sources(Path(copy))
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder.resolve()), copy)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """What the package index demands of them, and that the wheel holds every file of the package and no other."""
    _run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    with tempfile.TemporaryDirectory() as copy:
        copy_sources(Path(copy))
        _run(sys.executable, "-m", "check_wheel_contents", "--package", str(Path(copy, "nsa")), str(wheel))


def use(wheel: Path, torch_from: Path) -> None:
    """Install the wheel into a fresh environment, without dependencies, and call it from outside the repository."""
    borrowed = _run(str(torch_from), "-c", _PURELIB).strip()
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, "venv")
        venv.create(fresh, with_pip=False)
        python = fresh / "bin" / "python"
        _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
        Path(_run(str(python), "-c", _PURELIB).strip(), "borrowed.pth").write_text(f"{borrowed}\n")
        script = Path(__file__).with_name("installed.py")
        print(_run(str(python), "-I", str(script), cwd=folder), end="")


def _run(*command: str, cwd: str | None = None) -> str:
    """What the command prints. Raises CalledProcessError, with what it said."""
    return subprocess.run(
        command, cwd=cwd, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 where all is well, 1 where a check failed, 2 for an argument that cannot be."""
    parser = Parser(prog="python -m distribution.archives")
    parser.add_argument("folder", type=Path, nargs="?", help="for wheel and sdist; a new folder, or an empty one")
    parser.add_argument(
        "--torch-from", type=Path, required=True, metavar="PYTHON", help="whose environment has PyTorch"
    )
    arguments = parser.parse_args(words)
    if not arguments.torch_from.is_file():
        parser.error(f"--torch-from: {arguments.torch_from} is no file; name an interpreter with PyTorch")
    if arguments.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return build_and_check(Path(folder), arguments.torch_from)
    if arguments.folder.exists() and (not arguments.folder.is_dir() or any(arguments.folder.iterdir())):
        parser.error(f"folder: {arguments.folder} is there and not empty; name a new one, or empty it")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return build_and_check(arguments.folder, arguments.torch_from)


def build_and_check(folder: Path, torch_from: Path) -> int:
    """Build, check and use: the exit code."""
    try:
        wheel, sdist = build(folder)
        check(wheel, sdist)
        use(wheel, torch_from)
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout}\nfailed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    print(f"{wheel}\n{sdist}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
