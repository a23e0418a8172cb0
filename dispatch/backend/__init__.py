"""Calling OpenAI-compatible endpoints, and a simulated one."""
