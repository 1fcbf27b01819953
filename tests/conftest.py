"""Every test runs on four virtual CPU devices (or the platform that JAX_PLATFORMS names) with a cache of its own."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu" and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
if "HOTLOOP_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="hotloop-test-cache-")
    os.environ["HOTLOOP_CACHE"] = _cache.name
