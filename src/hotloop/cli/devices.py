"""`hotloop devices`: what there is to compute on, and how fast it can be at most. No jax at import."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from platform import node
from typing import Any

from hotloop.cli.command import Command, Context, Result
from hotloop.options import option


@dataclass(frozen=True)
class DevicesConfig:
    calibrate: bool = option(False, "Measure again; use it when the machine was busy the first time.")
    kernels: bool = option(
        False, "Show which kernels of hotloop-native were measured to be faster, and stop."
    )


def run(config: DevicesConfig, context: Context) -> Result:
    if config.kernels:
        return show_kernels(context)
    chosen = context.open_device()
    from hotloop.engine import processes
    from hotloop.engine.device import describe_environment
    from hotloop.engine.measure import ceilings

    # Each process knows the memory of its own devices alone.
    members = processes.gathered(describe_process(chosen.platform))
    found = [device for member in members for device in member["devices"]]
    owners = [{**member, "devices": [device["id"] for device in member["devices"]]} for member in members]
    result = {"devices": found, "processes": owners, "environment": describe_environment()}
    if not processes.is_writer():
        return result
    show_devices(found, owners, context)
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
    return {**result, "ceilings": asdict(limits)}


def show_kernels(context: Context) -> Result:
    """The table of this machine's kernels by shape: both times, and which is taken."""
    context.open_device()
    from hotloop.layers import native

    if native.find_package() is None:
        context.say(f"hotloop-native is not installed, so XLA's own kernels are used: {native.INSTALL}")
        return {"installed": False, "kernels": []}
    if not native.is_wanted():
        context.say(
            "hotloop-native is switched off (--no-native, or HOTLOOP_NATIVE): XLA's own kernels are used"
        )
    table = native.table()
    if table is None:  # and a line has said why
        return {"installed": True, "kernels": []}
    found = []
    for key, times in sorted(table.kernels.items()):
        operation, _, shapes = key.partition(": ")
        chosen = "native" if times.is_native_faster else "plain"
        found.append({"operation": operation, "shapes": shapes, **asdict(times), "chosen": chosen})
    if found:
        context.table(
            ("operation", "shapes", "plain ms", "native ms", "chosen"),
            [
                (
                    *list(each.values())[:2],
                    *(f"{each[ms]:.3f}" for ms in ("plain_ms", "native_ms")),
                    each["chosen"],
                )
                for each in found
            ],
        )
    else:
        context.say("no shape was measured yet: that is done when a program first needs it")
    context.say(
        f"kept in {table.path or 'this process alone (HOTLOOP_CACHE=off)'}; delete it to measure anew"
    )
    return {"installed": True, "file": table.path, "kernels": found}


def describe_process(platform: str) -> dict[str, Any]:
    """This process, its machine and its own devices."""
    import jax

    from hotloop.engine import processes
    from hotloop.engine.measure import describe_device, memory_of_device

    own = [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": describe_device(device),
            "memory_bytes": memory_of_device(device),
            "process": processes.index(),
        }
        for device in jax.local_devices(backend=platform)
    ]
    return {"process": processes.index(), "host": node(), "devices": own}


def show_devices(
    found: Sequence[Mapping[str, Any]], owners: Sequence[Mapping[str, Any]], context: Context
) -> None:
    """A table of the devices; whose they are where there are several processes."""
    rows = []
    for device in found:
        size = device["memory_bytes"]
        memory = "unknown" if size is None else f"{size / 2**30:.1f} GiB"
        owner = (device["process"], owners[device["process"]]["host"]) if len(owners) > 1 else ()
        rows.append((device["id"], device["platform"], device["kind"], memory, *owner))
    columns = ("id", "platform", "kind", "memory", *(("process", "host") if len(owners) > 1 else ()))
    context.table(columns, rows)


COMMAND = Command(config=DevicesConfig, run=run)
