"""From a profile, the environment and the command line to `Settings`, with the origin of every value.

A later one wins: defaults, the YAML file, NSA_* variables, the command line. A key that is unknown is an error that
names the nearest one; a key that the field's profiles had and that means nothing here is kept as a note.

The NSA_* variables are read once, at the edge, into a frozen `Environment`. An unknown one is an error that suggests
the nearest name.

| variable | default | what it does |
|---|---|---|
| NSA_TB_DISABLE=1 | 0 | telemetry.tensorboard = false |
| NSA_DISABLE_CSV_LOGS=1 | 0 | telemetry.csv = false |
| NSA_DISABLE_AUX_STATS=1 | 0 | telemetry.statistics = false |
| NSA_SDPA_NO_FLASH=1 | 0 | runtime.use_flash = false |
| NSA_COMMIT, NSA_IMAGE | none | what env.json names as commit and container image |

The variables of the suites and the images (CONTRIBUTING.md) have no meaning here and are no errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from nsa.config import NSAConfig
from nsa.model import OLD_NAMES, ModelConfig
from nsa.train.settings import Data, Runtime, Settings, Telemetry, Train

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "nsa": NSAConfig,
    "runtime": Runtime,
    "train": Train,
    "data": Data,
    "telemetry": Telemetry,
}
RETIRED_KEYS = {
    "runtime.use_triton_sel": "model.backend chooses the kernels of all branches",
    "runtime.sel_triton_min_L": "model.backend chooses the kernels of all branches, at any length",
}
"""Keys of the field's profiles, and what replaced them."""

RENAMED_KEYS = {f"model.{old}": f"model.{name}" for old, name in OLD_NAMES.items()}
"""Keys of the field's profiles, and what they are called here."""


class ProfileError(ValueError):
    """A profile that cannot be read; the message names the file, the key and what is wanted."""


def names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def load(
    profile: str,
    *,
    environment: Mapping[str, tuple[Any, str]] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of a profile: its name, or the path of a YAML file.

    `environment` maps dotted names to (value, variable); `overrides` are the command line's. Raises ProfileError.
    """
    name, text, where = _read(profile)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    layers = [(dotted, value, where) for dotted, value in _keys(_parse(text, where), where)]
    layers += [(dotted, value, f"environment, {variable}") for dotted, (value, variable) in (environment or {}).items()]
    layers += [(dotted, value, "command line") for dotted, value in (overrides or {}).items()]
    for given, value, origin in layers:
        dotted = RENAMED_KEYS.get(given, given)
        if dotted in RETIRED_KEYS:
            notes.append(f"{dotted} has no effect ({origin}): {RETIRED_KEYS[dotted]}")
            continue
        values[dotted], origins[dotted] = _fitting(dotted, value, origin), origin
    return _settings(name, values, origins, tuple(notes))


def flat(settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """(dotted name, value, origin) of every value, in the order of a profile."""
    for section, kind in SECTIONS.items():
        holder = settings.model.nsa if section == "nsa" else getattr(settings, section)
        for field in _own_fields(kind):
            dotted = f"{section}.{field}"
            yield dotted, getattr(holder, field), settings.origins.get(dotted, "default")


def table(settings: Settings) -> str:
    """Every value with its origin, one per line."""
    rows = [(dotted, str(value), origin) for dotted, value, origin in flat(settings)]
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{dotted:<{wide[0]}}  {value:<{wide[1]}}  {origin}" for dotted, value, origin in rows)


def _folder() -> Any:
    return resources.files("nsa.train") / "profiles"


def _read(profile: str) -> tuple[str, str, str]:
    """(name, text, where it stands)."""
    if profile in names():
        return profile, (_folder() / f"{profile}.yaml").read_text(encoding="utf-8"), f"profile {profile}"
    path = Path(profile)
    if path.suffix in (".yaml", ".yml"):
        try:
            return path.stem, path.read_text(encoding="utf-8"), str(path)
        except OSError as error:
            raise ProfileError(f"profile {profile} cannot be read: {error.strerror}") from None
    raise ProfileError(f"no profile is called {profile!r}{_nearest(profile, names())}, and it is no .yaml file")


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Mapping[str, Any]:
    try:
        found = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ProfileError(f"{where} is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise ProfileError(f"{where} must hold sections ({', '.join(SECTIONS)}); got {type(found).__name__}")
    return found


def _keys(found: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every key of a file."""
    for section, mapping in found.items():
        if section not in SECTIONS:
            raise ProfileError(f"unknown section {section!r} in {where}{_nearest(section, SECTIONS)}")
        if not isinstance(mapping, dict):
            raise ProfileError(f"{section} in {where} must hold keys; got {type(mapping).__name__}")
        for key, value in mapping.items():
            dotted = f"{section}.{key}"
            if dotted in RENAMED_KEYS and RENAMED_KEYS[dotted].partition(".")[2] in mapping:
                raise ProfileError(f"{where} gives {RENAMED_KEYS[dotted]} twice, once as {dotted}")
            yield dotted, value


def _fitting(dotted: str, value: Any, origin: str) -> Any:
    """The value in its field's type. ProfileError for a key that is unknown or a value of another type."""
    section, _, key = dotted.partition(".")
    if section not in SECTIONS or key not in _own_fields(SECTIONS[section]):
        every = [f"{name}.{field}" for name, kind in SECTIONS.items() for field in _own_fields(kind)]
        raise ProfileError(f"unknown key {dotted!r} ({origin}){_nearest(dotted, every)}")
    hint = typing.get_type_hints(SECTIONS[section])[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if (kind is type(None) and value is None) or type(value) is kind:
            return value
    if float in kinds and not isinstance(value, bool):
        try:
            return float(value)  # an int, or what YAML leaves a string, as 2e-4
        except (TypeError, ValueError):
            pass
    wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
    raise ProfileError(f"{dotted} must be {wanted}; got {value!r} ({type(value).__name__}) ({origin})")


def _settings(name: str, values: Mapping[str, Any], origins: Mapping[str, str], notes: tuple[str, ...]) -> Settings:
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        parts[section][key] = value
    needed = [f.name for f in dataclasses.fields(ModelConfig) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [key for key in needed if key not in parts["model"]]:
        raise ProfileError(f"profile {name} must give model.{', model.'.join(missing)}")
    try:
        return Settings(
            name,
            ModelConfig(**parts["model"], nsa=NSAConfig(**parts["nsa"])),
            Runtime(**parts["runtime"]),
            Train(**parts["train"]),
            Data(**parts["data"]),
            Telemetry(**parts["telemetry"]),
            origins,
            notes,
        )
    except (TypeError, ValueError) as error:
        raise ProfileError(f"profile {name}: {error}") from error


def _own_fields(kind: type) -> list[str]:
    """The keys of a section; `nsa` is one of its own, beside `model`."""
    return [field.name for field in dataclasses.fields(kind) if field.name != "nsa"]


def _nearest(key: object, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


SWITCHES = {
    "NSA_TB_DISABLE": "telemetry.tensorboard",
    "NSA_DISABLE_CSV_LOGS": "telemetry.csv",
    "NSA_DISABLE_AUX_STATS": "telemetry.statistics",
    "NSA_SDPA_NO_FLASH": "runtime.use_flash",
}
"""Variables that turn something off, and what."""

_KERNELS = "model.backend chooses the kernels; heartbeats count fallbacks"
RETIRED_VARIABLES = {
    "NSA_PREFILL_BATCHED": "training always takes all tokens in one call",
    "NSA_USE_FA2": _KERNELS,
    "NSA_USE_TRITON_SEL": _KERNELS,
    "NSA_FORCE_SEL_MASK": _KERNELS,
    "NSA_USE_SEL_MASK": _KERNELS,
    "NSA_USE_SEL_PACK": _KERNELS,
    "NSA_FORCE_PARITY": "nsa.reference is the specification, and the tests hold every backend to it",
    "CONFIG": "--profile names the profile",
}
"""What the field set, and what replaced it."""

_TOLD = ("NSA_COMMIT", "NSA_IMAGE")
_OTHERS = (
    "NSA_BASE_IMAGE", "NSA_DIRTY", "NSA_ENGINE", "NSA_EXPECT", "NSA_FAMILY", "NSA_FORCE_ARCH", "NSA_MEMORY_GB",
    "NSA_RESULTS", "NSA_WHEELS",
)  # fmt: skip
"""What the suites and the images are told; training has no use for it."""


@dataclass(frozen=True)
class Environment:
    """What the variables said."""

    values: Mapping[str, tuple[Any, str]]
    """(value, variable) by the dotted name of a setting."""
    notes: tuple[str, ...] = ()
    """Variables without an effect, and what replaced them."""
    commit: str | None = None
    image: str | None = None


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Raises ValueError naming an unknown NSA_* variable, or a switch that is neither 0 nor 1."""
    values: dict[str, tuple[Any, str]] = {}
    notes = []
    for name in sorted(variables):
        if name in SWITCHES:
            if variables[name] not in ("0", "1"):
                raise ValueError(f"{name} must be 0 or 1; got {variables[name]!r}")
            values[SWITCHES[name]] = (variables[name] == "0", f"{name}={variables[name]}")
        elif name in RETIRED_VARIABLES:
            notes.append(f"{name} has no effect (environment): {RETIRED_VARIABLES[name]}")
        elif name.startswith("NSA_") and name not in (*_TOLD, *_OTHERS):
            known = [
                *SWITCHES,
                *_TOLD,
                *_OTHERS,
                *(retired for retired in RETIRED_VARIABLES if retired.startswith("NSA_")),
            ]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(f"unknown variable {name}; " + (f"did you mean {near[0]}?" if near else ", ".join(known)))
    return Environment(values, tuple(notes), variables.get("NSA_COMMIT"), variables.get("NSA_IMAGE"))
