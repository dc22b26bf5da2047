"""What every test shares: the device, the backends, and how many examples Hypothesis draws.

Environment (read here only): HYPOTHESIS_PROFILE is `ci` (the default: the same few examples each time), `quick` (three
of them, as `--quick` takes) or `nightly` (many, new ones each time, and the tests that take minutes). Without a GPU the
Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

from harness import forced, triton_interpreter
from tests import quick
from tests.laws.parts import Parts, why_absent
from tests.nsa.parallel.pool import Pool

_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=24, derandomize=True, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("quick", max_examples=quick.EXAMPLES, derandomize=True, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("nightly", max_examples=400, **_COMMON)  # type: ignore[arg-type]
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(_PROFILE)

_MOST_GPU_WORKERS = 14
_GIB_PER_WORKER = 8

torch.set_num_threads(1)  # these calls are too small to share: threads that wait for a busy core cost 50 times more


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is slow, but for one test of each law")
    parser.addoption(
        "--force-arch",
        choices=forced.ARCHITECTURES,
        help="run the tables and kernels of this architecture; a report (--junitxml) ends its name in -forced-sm86",
    )
    parser.addoption("--memory-gb", type=int, metavar="N", help="with --force-arch: memory of the GPU for each worker")


def pytest_configure(config: pytest.Config) -> None:
    """What tests need of their process, wherever it was started.

    Triton's interpreter computes in NumPy, which warns of the NaN and Inf that a GPU takes in silence.
    """
    if config.getoption("numprocesses", None):
        # Of the workers, which share the cores: a thread that spins holds one of them. They are not started yet; in a
        # process that runs already it would be a setting that benches find changed, and refuse.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        asked = forced.enter(config.getoption("--force-arch"), config.getoption("--memory-gb"))
        forced.require_gpu(asked, there=torch.cuda.is_available())
        forced.require_report(config.getoption("xmlpath", None), asked)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    forced.cap_memory()
    if config.getoption("--quick"):
        settings.load_profile("quick")  # before any test is imported
        config.pluginmanager.register(quick.plugin())
    if os.environ.get("TRITON_INTERPRET") == "1":
        triton_interpreter.prepare()
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # in the background of a shell; all that tests start inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", r"ignore::RuntimeWarning:triton\.runtime\.interpreter")


def _freeze_what_lives() -> None:
    """Modules, tests and compiled graphs live as long as the process: without this each full garbage collection looks
    through all of them, for a second and more."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze_what_lives()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Behind the last test of a file, whose fixtures are gone then."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze_what_lives()


@pytest.hookimpl(optionalhook=True)  # without xdist, nobody asks
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto` on a GPU: as many as it holds, each with a CUDA context and its tensors; elsewhere one per core."""
    if not torch.cuda.is_available():
        return None
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30  # of all workers together, capped or not
    return max(1, min(os.cpu_count() or 1, _MOST_GPU_WORKERS, int(gib // _GIB_PER_WORKER)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda finds none"))
        if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="needs Triton's interpreter, which is off where there is a GPU"))
        if item.get_closest_marker("nightly") and _PROFILE != "nightly":
            item.add_marker(pytest.mark.skip(reason="takes minutes; HYPOTHESIS_PROFILE=nightly runs it"))


@pytest.fixture(autouse=True)
def no_plans_of_earlier_tests() -> None:
    """Tests change what kernels and their launches do, which a plan has recorded."""
    if plans := sys.modules.get("nsa.triton_backend.launching.plans"):
        plans.forget_all()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Eight CPU processes over Gloo, started once."""
    started = Pool(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="session", params=["reference", "torch", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each backend by name; one that cannot run here skips its tests and says why."""
    name: str = request.param
    if reason := why_absent(name, device):
        pytest.skip(f"backend {name}: {reason}")
    return name


@pytest.fixture(scope="session")
def parts(backend: str, device: torch.device) -> Parts:
    """The public parts of each backend in turn."""
    return Parts(backend, device)
