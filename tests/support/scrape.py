"""Scraping `/metrics` and reading what stands there."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """The samples of one page: value by name and labels; `helps` and `kinds` by family."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sample with exactly these labels, None if there is none."""
        return self.samples.get((name, frozenset(labels.items())))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels among theirs."""
        wanted = labels.items()
        return sum(
            value for (found, has), value in self.samples.items() if found == name and wanted <= dict(has).items()
        )

    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {name for name, _ in self.samples}

    def of(self, prefix: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return the samples whose names begin so."""
        return {key: value for key, value in self.samples.items() if key[0].startswith(prefix)}

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of one label."""
        return {dict(has).get(label, "") for found, has in self.samples if found == name}


def read_page(text: str) -> Scrape:
    """Read a page in the text format; a sample that stands there twice is a fault."""
    scrape = Scrape()
    for family in text_string_to_metric_families(text):
        scrape.helps[family.name] = family.documentation
        scrape.kinds[family.name] = family.type
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in scrape.samples, key
            scrape.samples[key] = sample.value
    return scrape


async def scrape(url: str, token: str = "") -> Scrape:
    """Scrape a gateway."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return read_page(answer.text)
