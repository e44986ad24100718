"""JSON files that state the digest of their content, read and written as any other program would."""

import hashlib
import json
from pathlib import Path
from typing import Any


def digest(content: dict[str, Any]) -> str:
    """The SHA-256 of an object's JSON, with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """The object in a file, whose digest has to be right."""
    content = json.loads(path.read_text())
    assert content.pop("digest") == digest(content)
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Write an object with its digest."""
    path.write_text(json.dumps(content | {"digest": digest(content)}))
