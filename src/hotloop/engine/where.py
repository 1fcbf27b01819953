"""Which kind of device computes by default, for the few choices that depend on it."""


def platform() -> str:
    """cpu, gpu or tpu: that of the default device, which need not be the default backend's."""
    import jax

    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(chosen, "platform", chosen) or jax.default_backend())
