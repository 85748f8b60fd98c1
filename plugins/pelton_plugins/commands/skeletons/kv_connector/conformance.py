"""Conformance of this package's KV connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pelton.testing.kv_connector import KVConnectorConformance

from pelton_skeleton.connector import SkeletonConnector


class TestSkeletonConnector(KVConnectorConformance):
    connector = SkeletonConnector

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"folder": str(folder)}

    def damage(self, folder: Path) -> bool:
        files = [file for file in folder.rglob("*") if file.is_file()]
        for file in files:
            file.write_bytes(file.read_bytes()[:-7])
        return bool(files)
