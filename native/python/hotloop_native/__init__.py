"""oneDNN's convolutions, with norms, recurrences and more of our own, as handlers of XLA's foreign function interface.

It knows neither jax nor hotloop: `load()` gives the library, `TARGETS` the names of the handlers in it, and whoever
calls them registers them. `load_images()` gives the functions for images on the host, which need no other library.
"""

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

VERSION = "0.4.3"
__version__ = VERSION

TARGETS = (
    "hotloop_bernoulli_gradient",
    "hotloop_conv_forward",
    "hotloop_conv_bias",
    "hotloop_conv_bias_sum",
    "hotloop_conv_input_gradient",
    "hotloop_conv_kernel_gradient",
    "hotloop_norm_forward",
    "hotloop_norm_backward",
    "hotloop_recurrent_pack",
    "hotloop_recurrent_infer_packed",
    "hotloop_recurrent_forward",
    "hotloop_recurrent_backward",
    "hotloop_tied_forward",
    "hotloop_tied_refeed",
    "hotloop_tied_gradient",
)

# In the order in which they need one another. A library that is loaded is found again by its name, wherever it lies:
# so the wheels need not be on the loader's path.
RUNTIME_LIBRARIES = (
    ("intel-cmplr-lib-rt", "libintlc.so.5"),
    ("intel-cmplr-lib-rt", "libimf.so"),
    ("tbb", "libtbb.so.12"),
    ("onednn-cpu-tbb", "libdnnl.so.3"),
)


@cache
def load() -> ctypes.CDLL:
    """The handlers' library, with oneDNN and TBB loaded before it.

    Raises ImportError where a package of theirs is not installed, OSError where a file is missing or does not load.
    """
    for package, name in RUNTIME_LIBRARIES:
        _open(_path_in(package, name))
    return _open(Path(__file__).with_name("libhotloop_native.so"))


@cache
def load_images() -> ctypes.CDLL:
    """The library with `hotloop_resample` (resample.h); OSError where it is missing or does not load."""
    return _open(Path(__file__).with_name("libhotloop_images.so"))


def _path_in(package: str, name: str) -> Path:
    try:
        listed = files(package) or ()
    except PackageNotFoundError:
        raise ImportError(f"hotloop-native needs the package {package}: pip install {package}") from None
    for file in listed:
        if file.name == name:
            return Path(file.locate()).resolve()
    raise OSError(f"{name} is not in the installed package {package}: install it again")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{path.name} of hotloop-native cannot be loaded: {error}") from None
