"""The folder for Hugging Face's hub: made of the sources, loaded as its loader does, two versions side by side."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest
import torch

import nsa
from distribution import hub_kernel
from harness.repository import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_kernel.write(tmp_path_factory.mktemp("hub") / "nsa")


def load(variant: Path) -> ModuleType:
    """By the rule that `kernels` documents: the module `__init__.py` of the variant under the metadata's id."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget(name: str) -> None:
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]


def outputs(module: ModuleType) -> torch.Tensor:
    """A call with the same inputs whichever copy of the code serves it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, heads, 8, generator=generator) for heads in (4, 2, 2))
    config = module.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=8)
    found: torch.Tensor = module.nsa_attention(q, k, v, torch.ones(1, 40, 4, 3), config)
    return found


def test_a_variant_computes_what_the_package_does(folder: Path) -> None:
    module = load(folder / "build" / "torch-cpu")
    try:
        assert module is not nsa
        assert Path(module.attention.__file__).is_relative_to(folder)
        assert torch.equal(outputs(module), outputs(nsa))
        assert module.__all__ == nsa.__all__
        assert all(hasattr(module, name) for name in module.__all__)
    finally:
        forget(module.__name__)


def test_operators_of_two_versions_do_not_meet(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: an operator stays registered as long as its process lives."""
    pytest.importorskip("triton")
    second = hub_kernel.sources(ROOT / "nsa")
    second[PurePosixPath("geometry.py")] += "\n# another version\n"
    for path, text in hub_kernel.variant(second, "cpu").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    script = (
        "import importlib, sys, torch, nsa.triton_backend\n"
        "from pathlib import Path\n"
        "from tests.distribution.test_hub_kernel import load\n"
        "for folder in sys.argv[1:]:\n"
        "    name = load(Path(folder)).__name__\n"
        "    kernels = importlib.import_module(f'{name}.triton_backend')\n"
        "    print(Path(kernels.__file__).is_relative_to(folder) and hasattr(getattr(torch.ops, name), 'gated_sum'))\n"
    )
    command = [sys.executable, "-c", script, str(folder / "build" / "torch-cpu"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_no_file_imports_the_package_by_its_name(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        text = path.read_text()
        assert "from nsa" not in text.replace("`from nsa", ""), path
        assert '"nsa::' not in text, path
    tables = {path.name for path in (ROOT / "nsa" / "triton_backend" / "tables").glob("*.json")}
    assert {path.name for path in (folder / "build/torch-cuda/triton_backend/tables").iterdir()} == tables
    assert (folder / "build/torch-cuda/triton_backend/hopper/selected.py").is_file()
    assert not (folder / "build/torch-cuda/train").exists()


def test_kernels_of_hugging_face_loads_it(folder: Path) -> None:
    """With its own check of the digests. `nox -s package` runs this where `kernels` is installed."""
    kernels = pytest.importorskip("kernels", reason="needs kernels 0.17 (nox -s package)")
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    for backend in hub_kernel.BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert str(metadata.backend.backend_type).lower() == backend
    module = kernels.get_local_kernel(folder, backend="cpu")
    assert torch.equal(outputs(module), outputs(nsa))
    forget(module.__name__)


def test_build_toml_says_what_kernel_builder_needs(folder: Path) -> None:
    found = tomllib.loads((folder / "build.toml").read_text())
    assert found["general"] == {
        "name": "nsa", "version": 0, "edition": 5, "license": "Apache-2.0", "backends": ["cpu", "cuda"],
    }  # fmt: skip
    assert found["torch-noarch"] == {"pyext": ["json", "py"]}
    assert not (folder / "torch-ext/nsa/_ops.py").exists()


def test_what_cannot_be_made_relative_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from nsa import a\n")
    (tmp_path / "a.py").write_text("import nsa.b\n")
    with pytest.raises(ValueError, match=r"a\.py:1: write `from nsa import"):
        hub_kernel.reachable(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"has no triton_backend/tables"):
        hub_kernel.reachable(tmp_path)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert hub_kernel.main([str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(new: str, folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        hub_kernel.write(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
