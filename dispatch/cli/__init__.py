"""The `dispatch` command."""
