"""The only package that knows Valkey."""
