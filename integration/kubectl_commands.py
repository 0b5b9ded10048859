"""What a guide says to do with kubectl, compared with the manifests of deploy/kubernetes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "kubernetes"
NAMESPACE = "rl-dataplane"
TLS = {"tls.crt", "tls.key"}
"""Keys of a Secret that `create secret tls` makes."""


def manifests() -> list[dict[str, Any]]:
    """Everything that is in the files of ``base`` and ``run``."""
    files = sorted(path for name in ("base", "run") for path in (DEPLOY / name).glob("*.yaml"))
    return [one for path in files for one in yaml.safe_load_all(path.read_text()) if "kind" in one]


def templates(told: Any) -> Iterator[dict[str, Any]]:
    """Specifications of pods, wherever they are in an object."""
    if isinstance(told, dict):
        if "containers" in told:
            yield told
        told = list(told.values())
    if isinstance(told, list):
        for each in told:
            yield from templates(each)


def secret_keys() -> dict[str, set[str]]:
    """The Secrets that pods ask for, each with the keys that something reads."""
    found: dict[str, set[str]] = defaultdict(set)
    config = (DEPLOY / "run" / "config.yaml").read_text()
    for spec in templates(manifests()):
        text = yaml.safe_dump(spec) + config
        names = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in spec["volumes"]
            if "secret" in volume
        }
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    found[reference["name"]].add(reference["key"])
            for mount in container["volumeMounts"]:
                if mount["name"] in names:
                    folder = re.escape(mount["mountPath"])
                    found[names[mount["name"]]] |= set(re.findall(rf"{folder}/([\w.-]+)", text))
    return dict(found)


def check_kubectl(words: list[str], copies: Mapping[str, str]) -> None:
    """Its namespace, folders, objects and Secrets are those of the manifests.

    Args:
        words: of the command.
        copies: what the page has copied so far: from where, by where to.
    """
    given = words[1:]
    if "-n" in given:
        at = given.index("-n")
        assert given[at + 1] == NAMESPACE, words
        del given[at : at + 2]
    for option, folder in pairwise(given):
        if option == "-k":
            assert (ROOT / copies.get(folder, folder) / "kustomization.yaml").is_file(), folder
    kinds = {
        (one["kind"].lower(), one["metadata"]["name"]) for one in manifests() if "metadata" in one
    }
    for word in given:
        if re.fullmatch(r"(job|raycluster|statefulset)/[\w-]+", word):
            assert tuple(word.split("/")) in kinds, word
    if given[:2] == ["create", "namespace"]:
        assert given[2] == NAMESPACE
    if given[:2] == ["create", "secret"]:
        check_secret(given[2:])


def check_secret(words: list[str]) -> None:
    """It has the keys that pods read, of files that docker/secrets makes."""
    kind, name, *options = words
    made = (ROOT / "docker" / "secrets").read_text()
    pairs = [word.partition("=")[2] for word in options if word.startswith("--from-file=")]
    files = [pair.partition("=")[2] for pair in pairs]
    keys = {pair.partition("=")[0] for pair in pairs}
    if kind == "tls":
        keys = TLS
        files = [word.partition("=")[2] for word in options if re.match("--(cert|key)=", word)]
        assert len(files) == len(TLS), words
    assert keys == secret_keys()[name], f"{name}: {keys}"
    chmod = re.findall(r"^chmod 0644 (.+)$", made, re.MULTILINE)[0].split()
    assert set(files) <= set(chmod), files
