"""Command line: one thin module a command. No jax at import."""
