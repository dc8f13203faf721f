"""The lists that go with a release: a software bill of materials, and checksums.

Source: CycloneDX 1.6, JSON; sha256sum(1).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import tomllib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["checksums", "software_bill"]


def software_bill(tree: Path, version: str, files: Sequence[Path]) -> str:
    """The bill of a release as CycloneDX JSON: aionn, its files, and the packages that it requires.

    The files contain no code of others: the extension links to the C library alone. So all other components are requirements, with
    the range of versions instead of a version; those of extras are optional. The same files give the same text.

    Args:
        tree: The source tree, for pyproject.toml.
        version: Of the release.
        files: The sdist and the wheels.
    """
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
    own = f"pkg:pypi/{project['name']}@{version}"
    requirements = [(text, "required", "") for text in project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        requirements += [(text, "optional", extra) for text in texts]
    components: dict[str, dict[str, Any]] = {}
    for text, scope, extra in requirements:
        component = _component(text, scope)
        known = components.setdefault(component["bom-ref"], component)
        if extra:
            known["properties"].append({"name": "aionn:extra", "value": extra})
    hashes = [
        {
            "type": "distribution",
            "url": path.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        for path in files
    ]
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, hashes]))
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {
            "tools": {"components": [_tool(name) for name in ("setuptools", "ziglang")]},
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
                "externalReferences": hashes,
            },
        },
        "components": list(components.values()),
        "dependencies": [{"ref": own, "dependsOn": sorted(components)}],
    }
    return json.dumps(bill, indent=2) + "\n"


def _component(requirement: str, scope: str) -> dict[str, Any]:
    found = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;\s*(.*))?$", requirement)
    assert found is not None, requirement
    name = re.sub(r"[-_.]+", "-", found[1]).lower()
    properties = [{"name": "aionn:versions", "value": found[2].strip()}]
    if found[3]:
        properties.append({"name": "aionn:marker", "value": found[3]})
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "scope": scope,
        "purl": f"pkg:pypi/{name}",
        "properties": properties,
    }


def _tool(name: str) -> dict[str, str]:
    return {"type": "application", "name": name, "version": importlib.metadata.version(name)}


def checksums(files: Sequence[Path]) -> str:
    """The lines that `sha256sum --check` reads."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
