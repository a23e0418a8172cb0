"""Claiming and running requests."""
