"""hotloop: models trained, measured and served as whole programs compiled for the device.

Importing the package costs nothing: no jax, no numpy. Each room (`engine`, `layers`, `families`, ...) is imported
by name when it is needed.
"""

__version__ = "0.1.0"
