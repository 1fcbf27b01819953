"""hotloop-native's convolutions as plain calls, for its tests, and the same mathematics in float64."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

hotloop_native = pytest.importorskip(
    "hotloop_native", reason="hotloop-native is not installed: make native, and install the wheel"
)
for target in hotloop_native.TARGETS:
    handler = getattr(hotloop_native.load(), target)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


@dataclass(frozen=True)
class Convolution:
    """What the handlers are told besides the arrays; `pads` are top, bottom, left, right."""

    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1

    def size_of_result(self, x_shape, kernel_shape):
        top, bottom, left, right = self.pads
        rows = (x_shape[1] + top + bottom - kernel_shape[0]) // self.strides[0] + 1
        columns = (x_shape[2] + left + right - kernel_shape[1]) // self.strides[1] + 1
        return (x_shape[0], rows, columns, kernel_shape[3])

    def call(self, target, shape, *arrays, **more):
        """The handler `hotloop_conv_<target>`, whose result has this shape."""
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.ffi.ffi_call(f"hotloop_conv_{target}", result)(
            *arrays,
            strides=np.array(self.strides, np.int64),
            pads=np.array(self.pads, np.int64),
            groups=np.int64(self.groups),
            **more,
        )

    def forward(self, x, kernel):
        return self.call("forward", self.size_of_result(x.shape, kernel.shape), x, kernel)

    def bias(self, x, kernel, bias, relu):
        return self.call("bias", self.size_of_result(x.shape, kernel.shape), x, kernel, bias, relu=relu)

    def bias_sum(self, x, kernel, bias, residual, relu):
        return self.call("bias_sum", residual.shape, x, kernel, bias, residual, relu=relu)

    def gradients(self, x, kernel, dy):
        return (
            self.call("input_gradient", x.shape, dy, kernel),
            self.call("kernel_gradient", kernel.shape, x, dy),
        )

    def _taps(self, x_shape, kernel_shape):
        """Each place (i, j) of the kernel with the padded image's pixels that it meets."""
        _, rows, columns, _ = self.size_of_result(x_shape, kernel_shape)
        for i, j in itertools.product(*map(range, kernel_shape[:2])):
            down = slice(i, i + (rows - 1) * self.strides[0] + 1, self.strides[0])
            across = slice(j, j + (columns - 1) * self.strides[1] + 1, self.strides[1])
            yield (i, j), (slice(None), down, across)

    def reference(self, x, kernel, dy):
        """y, dx and dkernel in float64, tap by tap; channels are split as (groups, channels of a group)."""
        g, (top, bottom, left, right) = self.groups, self.pads
        edges = ((0, 0), (top, bottom), (left, right), (0, 0))
        image = np.pad(np.float64(x), edges).reshape(
            len(x), x.shape[1] + top + bottom, -1, g, x.shape[3] // g
        )
        taps = np.float64(kernel).reshape(*kernel.shape[:3], g, -1)
        dy = np.float64(dy).reshape(*dy.shape[:3], g, -1)
        y, dimage, dtaps = np.zeros_like(dy), np.zeros_like(image), np.zeros_like(taps)
        for place, seen in self._taps(x.shape, kernel.shape):
            y += np.einsum("nhwgc,cgo->nhwgo", image[seen], taps[place])
            dimage[seen] += np.einsum("nhwgo,cgo->nhwgc", dy, taps[place])
            dtaps[place] = np.einsum("nhwgc,nhwgo->cgo", image[seen], dy)
        dx = dimage[:, top : top + x.shape[1], left : left + x.shape[2]]
        return y.reshape(*y.shape[:3], -1), dx.reshape(x.shape), dtaps.reshape(kernel.shape)


def draw(seed, *shapes):
    """float32 arrays of these shapes, normally distributed."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def child(code, **environment):
    """What `code` prints in a process of its own, where these helpers and the tests of the package can be imported."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here / "native"), str(here), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
