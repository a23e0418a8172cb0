"""The contributor's interface: setup, dev, test, check, bench."""
