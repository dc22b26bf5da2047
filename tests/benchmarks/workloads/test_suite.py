"""Which cases there are: those the issue names, each once, and each found again by its command."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import __main__ as front
from benchmarks.cases.key import NSA, Key
from benchmarks.commands import options
from benchmarks.commands.run import run_command
from benchmarks.history import run_file
from benchmarks.workloads import prepare, suite
from benchmarks.workloads.parts import SELECTING
from harness import machines
from nsa import NSAConfig

SUITES = ("cpu", "24gb", "80gb")
GIB_THERE = {"24gb": 23.5, "80gb": 79.0}
"""What PyTorch finds on an RTX 3090 and on an A100."""


def keys(name: str, quick: bool = False, backend: str = "auto") -> list[Key]:
    return suite.planned(suite.table(name), quick=quick, backend=backend, on_gpu=name != "cpu")


def tiny(**changes: Any) -> Mapping[str, Any]:
    """A suite with one prefill."""
    shape = {"heads": [4, 2], "head_dims": [16, 16], "lengths": [64, 128], "quick": [64]}
    table: dict[str, Any] = {"dtype": "float32", "baselines": ["sdpa-flash"], "recorded_baselines": []}
    table |= {"prefill": [shape], "decode": []}
    return {**table, "parts": [], "train_step": [], **changes}


def planned(table: Mapping[str, Any]) -> list[Key]:
    return suite.planned(table, quick=False, backend="torch", on_gpu=False)


@pytest.mark.parametrize("name", ["24gb", "80gb"])
def test_quick_train_steps_are_graphs_and_the_others_both(name: str) -> None:
    """The host paces a short step that is launched kernel by kernel: two quick runs of it would not agree."""
    quick, whole = ({k.launch for k in keys(name, q) if k.mode == "train-step"} for q in (True, False))
    assert (quick, whole) == ({"graph"}, {"graph", "eager"})


@pytest.mark.parametrize("name", SUITES)
def test_baselines_come_before_nsa_and_nothing_twice(name: str) -> None:
    for quick in (True, False):
        found = keys(name, quick)
        assert len({key.name for key in found}) == len(found)
        cases: dict[str, list[str]] = {}
        for key in found:
            cases.setdefault(key.case, []).append(key.implementation)
        assert list(cases) == list(dict.fromkeys(key.case for key in found))
        assert all(contenders[-1] == NSA and NSA not in contenders[:-1] for contenders in cases.values())


def test_a_large_gpu_is_measured_with_every_shape_and_length() -> None:
    found = [key for key in keys("80gb") if key.implementation == NSA]
    for mode, shortest in (("prefill-forward", 2048), ("prefill-forward-backward", 2048), ("decode", 4096)):
        lengths = {key.num_keys for key in found if key.mode == mode and key.what == "64x4x128"}
        assert (min(lengths), max(lengths)) == (shortest, 131072)
    assert {key.what for key in found} == {"64x4x128", "64x4x192:128", "32x8x128", "12x2x64", "125m"}
    drawn = {key.inputs for key in found} - {"replayed"}  # of what is stored here
    assert drawn == {"random", "recorded", "recorded-p10", "recorded-p90"}
    decode = [key for key in found if key.mode == "decode"]
    assert {key.launch for key in decode} == {"eager", "graph"}
    assert len({key.batch for key in decode if key.num_keys == 8192}) >= 3
    assert {key.cache for key in decode} == {"cold", "warm"}
    assert {key.mode for key in found} == set(suite.DEFAULT_MODES)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", SUITES)
def test_every_case_that_selects_is_measured_on_random_and_on_recorded_inputs(name: str, quick: bool) -> None:
    """Of a decode step under several launches the recorded one is under the last; parts that read the same whatever
    is chosen, and train steps, which have a text, are not of recorded inputs."""
    found = {key for key in map(_without_config, keys(name, quick)) if key.implementation == NSA}
    selecting = {key for key in found if key.mode in (*suite.PREFILLS, "decode", *SELECTING)}
    launched = {"graph"} if name != "cpu" else {"eager"}
    for key in (key for key in selecting if key.inputs == "random"):
        if key.mode != "decode" or key.launch in launched:
            assert dataclasses.replace(key, inputs="recorded") in found, key.name
    assert {key.inputs for key in found - selecting} == {"random"}
    recorded = {key.case for key in found if key.inputs == "recorded"}
    dense = {key.case for key in keys(name, quick) if key.implementation in ("sdpa-cudnn", "sdpa-flash")}
    assert {case for case in recorded if not case.startswith("part-")} <= dense


def _without_config(key: Key) -> Key:
    return dataclasses.replace(key, config=None)


def test_a_quick_run_of_a_large_gpu_can_end_within_10_minutes() -> None:
    """At the 2.1 to 2.5 seconds that a measurement takes there."""
    assert 200 <= len(suite.absent_once(keys("80gb", quick=True), "cuda")) <= 240


@pytest.mark.parametrize("name", GIB_THERE)
def test_every_quick_case_fits(name: str) -> None:
    largest_mib = max(prepare.memory_need(one).whole_mib for one in keys(name, quick=True))
    assert largest_mib < 1024 * GIB_THERE[name]


@pytest.mark.parametrize("name", SUITES)
def test_each_command_finds_its_case_alone(name: str) -> None:
    for quick in (True, False):
        found = keys(name, quick, backend="torch")
        for key in found[::7]:
            words = shlex.split(run_file.case_command(run_command("cpu", "torch", quick=quick, seed=7), key))
            assert words[:3] == ["python", "-m", "benchmarks"]
            arguments = front.parser().parse_args(words[3:])
            assert (arguments.backend, arguments.quick, arguments.gpu) == ("torch", quick, "cpu")
            assert options.chosen(found, arguments.cases) == [key]


def test_a_command_survives_a_shell_and_a_pattern() -> None:
    (key, *_) = planned(tiny())
    hostile = dataclasses.replace(key, implementation="[a]*; rm -rf 'x'")
    words = shlex.split(run_file.case_command(run_command("cpu", "auto", quick=False, seed=7), hostile))
    assert options.named(hostile, words[-1])
    assert not options.named(key, words[-1])


def test_an_entry_that_repeats_a_case_adds_its_baselines() -> None:
    (shape,) = tiny()["prefill"]
    again = {**shape, "lengths": [128], "baselines": ["sdpa-math"]}
    found = planned(tiny(prefill=[shape, again]))
    forward = [(key.num_keys, key.implementation) for key in found if key.mode == "prefill-forward"]
    assert forward == [(64, "sdpa-flash"), (64, NSA), (128, "sdpa-flash"), (128, "sdpa-math"), (128, NSA)]


def test_settings_are_in_the_key_of_whoever_has_some() -> None:
    (shape,) = tiny()["prefill"]
    dense, other, nsa = planned(tiny(prefill=[{**shape, "lengths": [64], "baselines": ["sdpa-math", "fla-nsa"]}]))[:3]
    assert (dense.config, dense.backend_asked) == (None, None)
    assert other.config is not None
    assert (NSAConfig.from_mapping(other.config).d, other.backend_asked) == (64, None)
    assert nsa.config is not None
    assert (NSAConfig.from_mapping(nsa.config), nsa.backend_asked) == (NSAConfig(), "torch")


def test_an_absent_baseline_is_asked_once() -> None:
    (shape,) = tiny()["prefill"]
    found = planned(tiny(prefill=[{**shape, "baselines": ["sdpa-cudnn", "sdpa-flash"]}]))
    kept = suite.absent_once(found, "cpu")
    assert [key.implementation for key in found].count("sdpa-cudnn") == 4
    assert [key.implementation for key in kept].count("sdpa-cudnn") == 1
    assert [key for key in found if key.implementation != "sdpa-cudnn"] == [
        key for key in kept if key.implementation != "sdpa-cudnn"
    ]
    assert suite.absent_once(found, "cuda") == found


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"baselines": ["sdpa-fast"]}, ValueError, "baselines must be of .*; got 'sdpa-fast'"),
        ({"decodes": []}, ValueError, "suite has no field 'decodes'"),
        ({"prefill": [{"heads": [4, 2]}]}, ValueError, r"suite\.prefill\[0\] must have 'head_dims'"),
        ({"dtype": 32}, TypeError, r"suite\.dtype must be str; got 32"),
    ],
)
def test_a_wrong_table_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(tiny(**changes))


def test_two_versions_meet_on_the_named_cases_of_the_quick_suite() -> None:
    machine = machines.machine("cpu", None)
    lengths = {
        quick: [key.num_keys for key in options.nsa_cases(machine, ["part-window"], quick=quick)]
        for quick in (True, False)
    }
    assert lengths == {True: [1024], False: [1024, 4096]}
    with pytest.raises(ValueError, match=r"'part-window/\*/s4096/\*' is not in the quick suite"):
        options.nsa_cases(machine, ["part-window/*/s4096/*"], quick=True)
