"""Settings of jax in one place, because jax's own `config.update` carries no types."""

from typing import Any


def configure(**settings: Any) -> None:
    """Set jax's options by name: `configure(jax_platforms="cpu")`."""
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
