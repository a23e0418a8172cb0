"""Fabric Dispatch."""
