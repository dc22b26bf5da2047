"""The folder from which Hugging Face's `kernels` loads NSA: `python -m distribution.hub_kernel FOLDER`.

FOLDER gets `build.toml` with `torch-ext/nsa` (edition 5, torch-noarch: what kernel-builder builds from), and
`build/torch-cpu` and `build/torch-cuda` with `metadata.json` (what `kernels.get_local_kernel` and `get_kernel` load).
All of it is made of the modules that `import nsa` can reach. The format is that of kernels 0.17,
https://huggingface.co/docs/kernels/kernel-requirements.

A hub's kernel may be loaded beside another version of itself, so imports become relative, and operators are registered
under a name with a hash of the files.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import nsa
from harness.arguments import Parser
from harness.repository import ROOT
from nsa.io import to_json

NAME = "nsa"
LICENSE = "Apache-2.0"
BACKENDS = ("cpu", "cuda")
DATA = ("triton_backend/tables/*.json",)
"""Files beside the modules that these read."""
FUTURE = "from __future__ import annotations\n"
_OPERATOR = re.compile(rf'"{NAME}::(\w+)"')

Files = dict[PurePosixPath, str]
"""Texts by their path within the package."""


def reachable(package: Path) -> Files:
    """The modules that importing `package` can reach, also from within functions, and their data files."""
    found: Files = {}
    waiting = [PurePosixPath("__init__.py")]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = (package / path).read_text()
        for name in _imported(found[path], str(path)):
            waiting += [file for file in _files(package, name) if file not in found]
    for pattern in DATA:
        data = sorted(package.glob(pattern))
        if not data:
            raise ValueError(f"{package} has no {pattern}, which its kernels read")
        found |= {PurePosixPath(file.relative_to(package).as_posix()): file.read_text() for file in data}
    return dict(sorted(found.items()))


def _imported(source: str, path: str) -> Iterator[str]:
    """The dotted names of this package that a module imports, `nsa` left off. ValueError for `import nsa...`."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == NAME for alias in node.names):
            raise ValueError(f"{path}:{node.lineno}: write `from {NAME} import ...`, which can be made relative")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == NAME:
            inner = (node.module or "").removeprefix(NAME).lstrip(".")
            yield inner
            yield from (f"{inner}.{alias.name}".lstrip(".") for alias in node.names)


def _files(package: Path, name: str) -> list[PurePosixPath]:
    """The files that importing `name` runs: those of the packages around it, and its own where it is a module."""
    parts = [part for part in name.split(".") if part]
    paths = [PurePosixPath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    if parts:
        paths.append(PurePosixPath(*parts).with_suffix(".py"))
    return [path for path in paths if (package / path).is_file()]


def relative(path: PurePosixPath, source: str) -> str:
    """A module with its imports of this package relative, its operators registered under the kernel's own name."""
    lines = source.splitlines(keepends=True)
    dots = "." * len(path.parts)
    for node in ast.walk(ast.parse(source, str(path))):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != NAME:
            continue
        line, inner = lines[node.lineno - 1], (node.module or "").removeprefix(NAME).lstrip(".")
        before, after = line[: node.col_offset], line[node.col_offset :]
        lines[node.lineno - 1] = before + after.replace(f"from {node.module} ", f"from {dots}{inner} ", 1)
    text = "".join(lines)
    if _OPERATOR.search(text):
        text = _OPERATOR.sub(r'add_op_namespace_prefix("\1")', text)
        text = text.replace(FUTURE, f"{FUTURE}\nfrom {dots}_ops import add_op_namespace_prefix\n", 1)
    return text


def sources(package: Path) -> Files:
    """The kernel's files, as kernel-builder takes them; the module `_ops` is its to write."""
    return {path: relative(path, text) if path.suffix == ".py" else text for path, text in reachable(package).items()}


def unique_id(files: Files, backend: str) -> str:
    """A module name that no other version has."""
    digest = hashlib.sha256(repr([(str(path), text) for path, text in files.items()]).encode())
    return f"_{NAME}_{backend}_{digest.hexdigest()[:10]}"


def variant(files: Files, backend: str) -> Files:
    """The files of a build variant, `metadata.json` among them."""
    name = unique_id(files, backend)
    built = dict(files)
    built[PurePosixPath("_ops.py")] = (
        '"""The name under which this version registers its operators."""\n\n\n'
        "def add_op_namespace_prefix(op_name: str) -> str:\n"
        f'    return f"{name}::{{op_name}}"\n'
    )
    digests = {str(path): _digest(text) for path, text in sorted(built.items())}
    metadata = {
        "name": NAME,
        "id": name,
        "version": major_version(),
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    built[PurePosixPath("metadata.json")] = f"{to_json(metadata, indent=2)}\n"
    return built


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def major_version() -> int:
    """The hub counts major versions; 0 is what may still change."""
    return int(nsa.__version__.split(".")[0])


def build_toml() -> str:
    """What kernel-builder is told."""
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    return (
        f'[general]\nname = "{NAME}"\nversion = {major_version()}\nedition = 5\nlicense = "{LICENSE}"\n'
        f'backends = [{backends}]\n\n[torch-noarch]\npyext = ["json", "py"]\n'
    )


def write(folder: Path, package: Path = ROOT / "nsa") -> Path:
    """Make the folder, all of it or nothing. FileExistsError if it is there and not empty; OSError."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder, or empty this one")
    files = sources(package)
    content: dict[PurePosixPath, str] = {PurePosixPath("build.toml"): build_toml()}
    content |= _below(PurePosixPath("torch-ext", NAME), files)
    for backend in BACKENDS:
        content |= _below(PurePosixPath("build", f"torch-{backend}"), variant(files, backend))
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent))
    try:
        for path, text in content.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(text)
        new.chmod(0o755)
        os.replace(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return folder


def _below(folder: PurePosixPath, files: Mapping[PurePosixPath, str]) -> Files:
    return {folder / path: text for path, text in files.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where the folder cannot be written."""
    parser = Parser(prog="python -m distribution.hub_kernel")
    parser.add_argument("folder", type=Path, help="a new folder, or an empty one")
    folder = parser.parse_args(words).folder
    try:
        write(folder)
    except OSError as error:
        print(f"folder: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: build.toml, torch-ext/{NAME}, {', '.join(f'build/torch-{backend}' for backend in BACKENDS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
