"""Pictures of what a trained model believes: images drawn from its prior, and test images taken apart and rebuilt.

A reconstruction is three pictures: the image, what the decoder makes of the encoder's sample, and what it makes
of that sample after HMC. All are probabilities, not draws.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import compress, crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.engine import precision
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.progress import Console, compiling
from hotloop.errors import DataError, RunError
from hotloop.families.vcd import images, model, networks
from hotloop.families.vcd.config import PIXELS, VcdSamples
from hotloop.families.vcd.images import Bits
from hotloop.families.vcd.model import Job
from hotloop.mcmc import hmc
from hotloop.options.files import whole_file

SIDE = 28
THIN, GREY = 1, 96  # lines between pictures, of a shade that stands out from black and from white
WIDE, WHITE = 4, 255  # lines between reconstructions, so that the three pictures of one are seen as one


class Drawn(NamedTuple):
    """Probabilities [N, 784] of pixels, and for each reconstruction log p(x, z) before and after HMC."""

    prior: Array
    before: Array
    after: Array
    log_joint_z0: Array
    log_joint_zt: Array
    acceptance: Array


def draw(job: Job, prior: int, hmc_steps: int) -> Callable[[Any, Array, Array], Drawn]:
    """(state, images [N, 784], key) -> all that is shown, with the trained step size, which stays as it is."""
    # The plain sampler on every device: the same pictures, and nothing here is worth a kernel.
    settings = replace(job.model, hmc_steps=hmc_steps, adaptation="constant", sampler="plain")

    def means(decoder: Any, z: Array) -> Array:
        return jax.nn.sigmoid(networks.forward(decoder, z)[-1])

    def drawn(state: Any, images: Array, key: Array) -> Drawn:
        params = precision.parse(settings.precision).to_compute(state["params"])
        shown = images.astype(jnp.float32)
        z = jax.random.normal(stream(key, "prior", 0), (prior, settings.z_dim))
        noise = model.draw_noise(settings, stream(key, "reconstructions", 0), len(images))
        mean, spread = networks.encode(params, shown)
        start = hmc.init(mean + spread * noise.start, networks.value_and_gradient(params["decoder"], shown))
        chain = model.sample(settings, params["decoder"], shown, start, noise, state["step_size"])
        before, after = (means(params["decoder"], at.position) for at in (start, chain.end))
        log_joints = start.log_density, chain.end.log_density
        return Drawn(means(params["decoder"], z), before, after, *log_joints, chain.acceptance)

    return drawn


def run(config: VcdSamples, context: Console) -> dict[str, Any]:
    run = model.load_run(config.run, config.step)
    triples = max(1, config.columns // 3)
    originals = np.zeros((0, PIXELS), np.uint8)
    try:
        loaded = images.load_images(config.data or run.config.data, context)
    except DataError as error:
        if config.data not in (None, run.config.data):
            raise
        context.warn(f"no reconstructions: {error}; name images with --data")  # the run's own are gone
    else:
        if loaded.notice:
            context.warn(loaded.notice)
        count = min(config.rows * triples, len(loaded.test))
        chosen = np.random.default_rng(config.seed).choice(len(loaded.test), count, replace=False)
        originals = loaded.test[np.sort(chosen)]
    hmc_steps = config.hmc_steps or run.job.model.hmc_steps
    call = jax.jit(draw(run.job, config.rows * config.columns, hmc_steps))
    with context.progress("drawing"):
        with compiling():  # the call comes back before it has run
            made = call(run.state, originals, seed_key(config.seed))
        drawn = jax.device_get(made)
    folder = config.output or config.run / "samples"
    path = folder / "prior.png"
    write_png(path, enlarge(arrange_grid(make_pictures(drawn.prior), config.columns), config.scale))
    context.say(f"{path}: {len(drawn.prior)} images from the prior, after update {run.step:,}")
    result = {"run": str(config.run), "step": run.step, "seed": config.seed, "prior": str(path)}
    if not len(originals):
        return result
    path = folder / "reconstructions.png"
    parts = [make_pictures(part) for part in (originals, drawn.before, drawn.after)]
    write_png(path, enlarge(arrange_triples(parts, triples), config.scale))
    z0, zt = (float(np.mean(values)) for values in (drawn.log_joint_z0, drawn.log_joint_zt))
    context.say(
        f"{path}: {len(originals)} test images, each as it is, from the encoder's sample, and after {hmc_steps} "
        f"HMC iterations from there (log p(x, z) {z0:.1f}, then {zt:.1f} nats)"
    )
    return {
        **result,
        "reconstructions": str(path),
        "images": len(originals),
        "hmc_steps": hmc_steps,
        "log_joint_z0": z0,
        "log_joint_zt": zt,
        "acceptance": float(drawn.acceptance),
    }


def make_pictures(probabilities: Any) -> Bits:
    """Rows of 784 numbers from 0 to 1 as pictures [N, 28, 28] of bytes."""
    return np.rint(np.asarray(probabilities, np.float32) * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)


def arrange_grid(cells: Bits, columns: int, line: int = THIN, shade: int = GREY) -> Bits:
    """Pictures [N, height, width] side by side, `columns` in a line, with lines between and around them."""
    count, height, width = cells.shape
    rows = -(-count // columns)
    shape = rows * (height + line) + line, columns * (width + line) + line
    canvas = np.full(shape, shade, np.uint8)
    for place, cell in enumerate(cells):
        top = line + (place // columns) * (height + line)
        left = line + (place % columns) * (width + line)
        canvas[top : top + height, left : left + width] = cell
    return canvas


def arrange_triples(parts: Sequence[Bits], columns: int) -> Bits:
    frames = [arrange_grid(np.stack(pictures), len(parts)) for pictures in zip(*parts, strict=True)]
    return arrange_grid(np.stack(frames), columns, WIDE, WHITE)


def enlarge(pixels: Bits, scale: int) -> Bits:
    return pixels.repeat(scale, axis=0).repeat(scale, axis=1)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """The PNG file of a greyscale picture [height, width] of bytes, 0 black to 255 white; needs no image package."""
    if pixels.ndim != 2 or pixels.dtype != np.uint8 or not pixels.size:
        raise ValueError(f"a picture is [height, width] bytes, not {pixels.dtype} {pixels.shape}")
    height, width = pixels.shape
    depth, grey = 8, 0
    # Every line begins with the number of its filter; 0 is none.
    lines = np.pad(pixels, ((0, 0), (1, 0))).tobytes()
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, grey, 0, 0, 0)),
        (b"IDAT", compress(lines, 9)),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc32(kind + body))
    return content


def write_png(path: str | Path, pixels: NDArray[np.uint8]) -> None:
    """Whole or not at all, making the folder if need be."""
    path, content = Path(path), encode_png(pixels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
