"""`hotloop cache`: shows, limits and clears the cache of compiled programs. It never starts jax."""

from dataclasses import dataclass

from hotloop.cli.command import Command, Context, NoOptions, Result
from hotloop.engine import device
from hotloop.machine import cache_folder
from hotloop.options import argument


@dataclass(frozen=True)
class LimitConfig:
    size: int | None = argument(
        "The most the programs may take: 500MB, 2GB, or none.", parse=device.parse_size
    )


def show(config: NoOptions, context: Context) -> Result:
    used, most, root = device.cache_usage(), device.cache_limit(), cache_folder()
    if root is None:
        context.say("the cache is off (HOTLOOP_CACHE=off)")
    else:
        context.say(f"folder    {root}")
        context.say(f"programs  {used.entries}, {device.show_size(used.bytes)}")
        context.say(f"limit     {'none' if most is None else device.show_size(most)}")
    return {"folder": root, "entries": used.entries, "bytes": used.bytes, "limit": most}


def limit(config: LimitConfig, context: Context) -> Result:
    device.set_cache_limit(config.size)
    return show(NoOptions(), context)


def clear(config: NoOptions, context: Context) -> Result:
    freed = device.clear_cache()
    context.say(f"deleted {freed.entries} programs, freed {device.show_size(freed.bytes)}")
    return {"folder": cache_folder(), "entries": freed.entries, "freed": freed.bytes}


COMMAND = Command(
    run=show,
    children=(
        Command(
            "limit",
            "Set how much the cache may take; the least recently used goes first.",
            LimitConfig,
            limit,
        ),
        Command("clear", "Delete every compiled program; the next runs compile again.", run=clear),
    ),
    epilog="HOTLOOP_CACHE names the folder (off: no cache), HOTLOOP_CACHE_LIMIT overrides the limit.",
)
