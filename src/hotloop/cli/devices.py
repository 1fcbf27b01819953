"""`hotloop devices`: what there is to compute on, and how fast it can be at most. No jax at import."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hotloop.cli.command import Command, Context
from hotloop.options import option

if TYPE_CHECKING:
    import jax

    from hotloop.engine.measure import Ceilings


@dataclass(frozen=True)
class DevicesConfig:
    calibrate: bool = option(False, "Measure again; use it when the machine was busy the first time.")


def run(config: DevicesConfig, context: Context) -> Mapping[str, Any]:
    """Show every device of the chosen platform and the limits of the first one."""
    chosen = context.open_device()
    import jax

    from hotloop.engine.device import describe_environment
    from hotloop.engine.measure import ceilings

    found = [describe_device(device) for device in jax.devices(chosen.platform)]
    context.table(("id", "platform", "kind", "memory"), [device_row(each) for each in found])
    with context.progress("measuring the device"):
        limits = ceilings(chosen, config.calibrate)
    show_limits(context, limits)
    return {"devices": found, "ceilings": asdict(limits), "environment": describe_environment()}


def describe_device(device: "jax.Device") -> dict[str, Any]:
    from hotloop.engine.measure import describe_device, memory_of_device

    kind = describe_device(device)
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": kind,
        "memory_bytes": memory_of_device(device),
    }


def device_row(found: Mapping[str, Any]) -> tuple[Any, ...]:
    size = found["memory_bytes"]
    shown = "unknown" if size is None else f"{size / 2**30:.1f} GiB"
    return found["id"], found["platform"], found["kind"], shown


def show_limits(context: Context, limits: "Ceilings") -> None:
    context.say(f"\nmeasured {limits.measured} with jax {limits.jax} (--calibrate measures again)")
    rows = [(f"{dtype} product", f"{rate:.4g}", "TFLOP/s") for dtype, rate in limits.matmul_tflops.items()]
    context.table(
        ("limit", "rate", "unit"), [*rows, ("copy (read + write)", f"{limits.copy_gbps:.4g}", "GB/s")]
    )
    if limits.float32_uses != "float32":
        context.say(
            f"float32 products use {limits.float32_uses}; float32_highest is with precision='highest'"
        )


COMMAND = Command(
    "devices", "Show devices, their memory and their measured speed limits.", DevicesConfig, run
)
