"""Benchmarks. Each states ratios of one run: the machine's speed drifts, so a lone figure says little."""
