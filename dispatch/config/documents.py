"""Config documents of a fabric group: the default one, and those that people write as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispatch.config.files import read_mapping
from dispatch.errors import ConfigurationError

DEFAULT_WEIGHTS = {"interactive": 4, "document-extract": 2, "backfill": 1, "default": 1}
"""Pools of the default config with their quantum (shown to operators as weight)."""


def default_document(endpoint_url: str, api_key_env: str = "") -> dict[str, Any]:
    """Return the config a group gets when it was never configured: four pools, one endpoint.

    `api_key_env` is the name of the environment variable that holds the endpoint's key ("" = no key).
    """
    return {
        "policy": "drr",
        "default_endpoint": "default",
        "pools": [{"pool_id": pool, "quantum": quantum} for pool, quantum in DEFAULT_WEIGHTS.items()],
        "endpoints": [{"endpoint_id": "default", "url": endpoint_url, "api_key_env": api_key_env}],
    }


def load_document(path: str | Path) -> dict[str, Any]:
    """Read a group's config document from a .yaml, .yml, .toml or .json file.

    Only the form is checked here; `group_configure` judges the content and names the field.

    Raises:
        ConfigurationError: the file cannot be read or parsed; names it, the line and what is wrong.
    """
    return read_mapping(Path(path))


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a config document as the JSON that `group_configure` takes.

    Raises:
        ConfigurationError: it holds something that JSON cannot (a YAML file may).
    """
    try:
        return json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the document cannot be JSON: {error}") from error
