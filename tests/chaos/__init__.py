"""The chaos harness: real processes, a seeded plan of faults, and a verdict on what must hold whatever happens."""
