"""Generated photographs, and folders of them, for tests of everything that reads images."""

import io

import numpy as np
import pytest

from hotloop.data import jpeg_rows

DECODERS = ("simplejpeg", "pillow")


def use_decoder(monkeypatch, name):
    """Decode JPEGs by one of DECODERS; skips the test where it is not installed."""
    if name == "pillow":
        monkeypatch.setattr(jpeg_rows, "find_simplejpeg", lambda: None)
    else:
        pytest.importorskip(name)


def picture(width, height, seed=0, mode="RGB"):
    """A smooth picture with some grain, as a pillow image."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = generator.integers(-8, 9, smooth.shape)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).convert(mode)


def encoded(width, height, seed=0, mode="RGB", kind="JPEG", **options):
    """The bytes of such a picture; the options are those of pillow's encoder."""
    out = io.BytesIO()
    picture(width, height, seed, mode).save(out, kind, **options)
    return out.getvalue()


def image_folder(root, parts, *, size=(40, 30)):
    """Files root/PART/CLASS/CLASS_k.JPEG for parts {"train": {"n02": 3, ...}, ...}; no two pictures alike."""
    seed = 0
    for part, classes in parts.items():
        for name, count in classes.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                seed += 1
                data = encoded(size[0] + seed % 3, size[1] + seed % 2, seed)
                (folder / f"{name}_{number}.JPEG").write_bytes(data)
    return root
