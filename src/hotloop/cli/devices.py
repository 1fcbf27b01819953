"""`hotloop devices`: what there is to compute on, and how fast it can be at most. No jax at import."""

from dataclasses import asdict, dataclass

from hotloop.cli.command import Command, Context, Result
from hotloop.options import option


@dataclass(frozen=True)
class DevicesConfig:
    calibrate: bool = option(False, "Measure again; use it when the machine was busy the first time.")


def run(config: DevicesConfig, context: Context) -> Result:
    chosen = context.open_device()
    import jax

    from hotloop.engine.device import describe_environment
    from hotloop.engine.measure import ceilings, describe_device, memory_of_device

    found, rows = [], []
    for device in jax.devices(chosen.platform):
        about = {"id": device.id, "platform": device.platform, "kind": describe_device(device)}
        size = memory_of_device(device)
        rows.append((*about.values(), "unknown" if size is None else f"{size / 2**30:.1f} GiB"))
        found.append({**about, "memory_bytes": size})
    context.table(("id", "platform", "kind", "memory"), rows)
    with context.progress("measuring the device"):
        limits = ceilings(chosen, config.calibrate)
    context.say(f"\nmeasured {limits.measured} with jax {limits.jax} (--calibrate measures again)")
    products = [(f"{kind} product", f"{rate:.4g}", "TFLOP/s") for kind, rate in limits.matmul_tflops.items()]
    copy = ("copy (read + write)", f"{limits.copy_gbps:.4g}", "GB/s")
    context.table(("limit", "rate", "unit"), [*products, copy])
    if limits.float32_uses != "float32":
        context.say(
            f"float32 products use {limits.float32_uses}; float32_highest is with precision='highest'"
        )
    return {"devices": found, "ceilings": asdict(limits), "environment": describe_environment()}


COMMAND = Command(config=DevicesConfig, run=run)
