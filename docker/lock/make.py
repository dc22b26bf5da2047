"""Lock what the images install, each package with the hashes of its files: `nox -s lock`.

    python docker/lock/make.py --wheels DIR

`cuda.txt` and `hopper.txt` come from uv; `cpu.txt` is `cuda.txt` without CUDA's packages and with the PyTorch that lies
in DIR. Versions are constraints.txt's.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OLDEST_PYTHON = "3.11"
_CUDA_ONLY = re.compile(r"(nvidia-(?!ml-py)|cuda-)")  # nvidia-ml-py asks the driver, and says where there is none
HEADER = "# Made by `nox -s lock`; edit constraints.txt or pyproject.toml and make it again.\n"


def compiled(*sources: str) -> str:
    """uv's lock of these sources, for every Python from the oldest on."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate", "--no-header"]
    command += ["--python-version", OLDEST_PYTHON, "--constraint", "constraints.txt", *sources]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def packages(lock: str) -> dict[str, str]:
    """Name -> its lines; a package that differs by Python's version stands once per version."""
    blocks = re.split(r"(?m)^(?=\S)", lock)
    return {block.split("\n", 1)[0].rstrip(" \\"): block for block in blocks if block.strip()}


def for_cpu(lock: str, wheels: Path) -> str:
    """The lock without CUDA, its PyTorch being the CPU builds in `wheels`. ValueError where there is none."""
    found = sorted(wheels.glob("torch-*+cpu-*.whl"))
    if not found:
        raise ValueError(f"--wheels must hold PyTorch's CPU build, torch-*+cpu-*.whl; {wheels} has none")
    hashes = " \\\n".join(f"    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found)
    version = found[0].name.split("-")[1].partition("+")[0]
    blocks = {name: block for name, block in packages(lock).items() if not _CUDA_ONLY.match(name)}
    blocks = {name: block for name, block in blocks.items() if not name.startswith("torch==")}
    return "".join([*blocks.values(), f"torch=={version} \\\n{hashes}\n"])


def main() -> None:
    """Write every lock."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR", help="where PyTorch's CPU build lies")
    wheels: Path = parser.parse_args().wheels
    extras = ("pyproject.toml", "--extra", "bench", "--extra", "train", "--extra", "transformers", "--extra", "dev")
    cuda = compiled(*extras, "docker/lock/cuda.in")
    written = {
        "cuda": cuda,
        "hopper": compiled(*extras, "docker/lock/cuda.in", "docker/lock/hopper.in"),
        "cpu": for_cpu(cuda, wheels),
        "flash-attn": compiled("--no-deps", "docker/lock/flash-attn.in"),
        "flash-attn-build": compiled("docker/lock/flash-attn-build.in"),
    }
    for name, lock in written.items():
        (HERE / f"{name}.txt").write_text(HEADER + lock)
        print(f"{name}.txt: {len(packages(lock))} packages")


if __name__ == "__main__":
    main()
