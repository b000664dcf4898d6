"""YAML files of settings, and settings in one word of the command line; both are read by the same rules."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.forward_keywords import REPLACED

MANY = 20
"""Names from which a message does not list them all."""


class _Loader(yaml.SafeLoader):
    """Reads YAML whose numbers are those of JSON and Python: YAML 1.1 takes 1e-5 for a word and 1:30 for 90, a day for a date."""


_LEFT_OUT = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _LEFT_OUT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"[-+]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT})\Z"), list("-+0123456789."))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value)  # 010 is 10, as everywhere else


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str) -> Any:
    """Read YAML, and so JSON too.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_yaml(path: str | Path, inheriting: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file's settings over those of its `base`; mappings are merged, null takes a setting back.

    Args:
        path: the file.
        inheriting: the files that have it as their base.

    Raises:
        ValueError: the file cannot be read, holds something else, or is its own base.
    """
    path = Path(path)
    if path.resolve() in inheriting:
        raise ValueError(f"{path} is its own base: {' -> '.join(file.name for file in inheriting)}")
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {settings!r}, not 'argument: value' lines")
    inherited = read_yaml(path.parent / settings.pop("base"), (*inheriting, path.resolve())) if "base" in settings else {}
    for key, value in settings.items():
        merge = isinstance(value, dict) and isinstance(inherited.get(key), dict)
        inherited[key] = inherited[key] | value if merge else value
    return {key: value for key, value in inherited.items() if value is not None}


def parse_mapping(name: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Read `key=value,...`, JSON or YAML's `{key: value, ...}`; a mapping is returned as it is.

    Commas within a value, as in `cutoffs=[10,20],dropout=0.1`, do not end it.

    Args:
        name: the argument, for the message.
        given: its value.

    Raises:
        ValueError: the value is none of these.
    """
    if not given or isinstance(given, dict):
        return given or {}
    try:
        if given.lstrip().startswith("{"):
            found = parse_yaml(given)
        else:
            pairs = [pair.split("=", 1) for pair in re.split(r",(?=\s*\w+\s*=)", given)]
            found = {key.strip(): parse_yaml(value) for key, value in pairs}
    except ValueError as error:
        raise ValueError(f"{name}={given!r} is neither JSON nor key=value,...: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}={given!r} is neither JSON nor key=value,...")
    return found


def parse_list(name: str, given: str) -> list[Any]:
    """Read a list as JSON or YAML, with or without quotes around its words.

    Raises:
        ValueError: the value is no list.
    """
    try:
        found = parse_yaml(given)
    except ValueError as error:
        raise ValueError(f"{name}={given!r} is not a list: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"{name}={given!r} is not a list")
    return found


def refuse_unknown(names: Iterable[str], allowed: Iterable[str], where: str = "") -> None:
    """Raise a ValueError for the first name that is not allowed, with the names that are close to it.

    Args:
        names: what was given.
        allowed: what there is.
        where: the beginning of the message, such as the file.
    """
    known = sorted(set(allowed))
    for name in names:
        if name not in known:
            if name in REPLACED:
                raise ValueError(f"{where}unknown argument {name!r}; what replaced it is {REPLACED[name]}")
            close = difflib.get_close_matches(name, known, n=3) or (known if len(known) < MANY else [])
            remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "--help lists all"
            if not close and name in RelPosDecoderConfig.__dataclass_fields__:
                remedy = f"it is a field of the model's configuration: --config_overrides {name}=..."
            raise ValueError(f"{where}unknown argument {name!r}; {remedy}")
