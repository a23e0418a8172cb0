"""Where the metrics of an endpoint's engine are, and how they are asked for."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote_to_bytes

import httpx

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.engine_metrics import PRESETS, MetricNames
from dispatch.errors import ConfigurationError

PAGE_MAX_BYTES = 2 * 1024 * 1024
"""Largest page that is read; those of engines have some 100 KiB."""

_PATH = "/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """The metrics page of one endpoint. `endpoint` has the page's own bounds.

    `authorization` is the endpoint's where the page has the same origin; its key goes to no other.
    """

    endpoint: Endpoint
    names: MetricNames
    url: httpx.URL = field(repr=False)
    authorization: str = field(repr=False)

    @classmethod
    def from_config(cls, document: Mapping[str, Any], endpoint: Endpoint) -> Self | None:
        """Make the gauge of one item of a config document's `endpoints`, None where it has no gate.

        Raises:
            ConfigurationError: `gate_url` is no URL of a page.
        """
        preset = PRESETS.get(document.get("gate", "none"))
        if preset is None:
            return None
        waiting, token = document.get("gate_waiting_metric"), document.get("gate_token_metric")
        url = _page(document.get("gate_url") or "", endpoint)
        own = base64.b64encode(unquote_to_bytes(url.userinfo)).decode() if url.userinfo else ""
        return cls(
            endpoint=dataclasses.replace(endpoint, max_response_bytes=PAGE_MAX_BYTES),
            names=MetricNames((waiting,) if waiting else preset.waiting, (token,) if token else preset.token),
            url=url.copy_with(username=None, password=None),
            authorization=f"Basic {own}" if own else endpoint.authorization if _same_origin(url, endpoint) else "",
        )

    def request(self) -> httpx.Request:
        """Return the request for the page."""
        headers = {"accept": "text/plain;version=0.0.4", "user-agent": "fabric-dispatch"}
        if self.authorization:
            headers["authorization"] = self.authorization
        connect_s = self.endpoint.connect_timeout_ms / 1000
        timeouts = {"connect": connect_s, "pool": connect_s}
        return httpx.Request("GET", self.url, headers=headers, extensions={"timeout": timeouts})


def _page(text: str, endpoint: Endpoint) -> httpx.URL:
    if not text:
        return httpx.URL(endpoint.url).copy_with(path=_PATH)
    wrong = ConfigurationError(
        f"endpoint {endpoint.endpoint_id!r}: gate_url must be http(s)://host[:port]/path, as the engine's metrics have"
    )
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, UnicodeError):
        raise wrong from None  # the parser's text may quote a password
    if url.scheme not in ("http", "https") or not url.host:
        raise wrong
    return url if url.path.strip("/") else url.copy_with(path=_PATH)


def _same_origin(url: httpx.URL, endpoint: Endpoint) -> bool:
    own = httpx.URL(endpoint.url)
    return (url.scheme, url.host, url.port) == (own.scheme, own.host, own.port)  # a default port is None in both
