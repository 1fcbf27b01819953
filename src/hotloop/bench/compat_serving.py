"""Options of the older scripts that exported a model for serving and sent requests, as `hotloop export` and `hotloop
request` have them."""

from collections.abc import Sequence

from hotloop.bench.option_groups import CompatError, OptionGroup, group_options
from hotloop.options import FALSE

WITHOUT_NEED = ("--iterations", "--use-serving-api", "--pytest", "--serving-bin-path")
"""What belonged to the machines and the server of old."""
RENAMED = {"--export-dir": "--output"}
CHECKPOINT, IN_STAGES, SPLITS = "--checkpoint-input-path", "--pipeline-serving-model", "--pipeline-splits"
OF_EXPORT = ("--output", "--device", "--json", "--debug")
_KNOWN = (*WITHOUT_NEED, *RENAMED, CHECKPOINT, IN_STAGES)
OLD_CLIENT = {"--num-threads": "2", "--port": "8500"}
"""What the older client took where nothing was given, and `hotloop request` does not."""
_OF_CLIENT = (*WITHOUT_NEED, *OLD_CLIENT, "--use-async", "--num-images", "--num-epochs")


def combine_export(groups: Sequence[OptionGroup]) -> tuple[list[OptionGroup], list[str]]:
    """A checkpoint becomes the run that is exported, which has the network's options itself; stages are merged."""
    kept: list[OptionGroup] = []
    run: list[str] = []
    dropped: list[str] = []
    in_stages = False
    for group in groups:
        name = _whole_name(group.name)
        if name in WITHOUT_NEED:
            dropped.append(name)
        elif name == CHECKPOINT:
            if not group.values:
                raise CompatError(f"{CHECKPOINT}: needs a folder of checkpoints")
            run = list(group.values[:1])
        elif name == IN_STAGES:
            in_stages = not group.values or group.values[0].lower() not in FALSE
        elif name in RENAMED:
            kept += group_options([RENAMED[name], *group.values])
        else:
            kept.append(group)
    notices = _explain_stages(kept) if in_stages else []
    if dropped:
        notices.append(
            f"options of export_for_serving.py that no longer exist are left out: {', '.join(dropped)}"
        )
    if run:
        others = [group for group in kept if group.name not in OF_EXPORT]
        kept = [*group_options(run), *(group for group in kept if group.name in OF_EXPORT)]
        if others:
            named = ", ".join(group.name or " ".join(group.words) for group in others)
            notices.append(f"the checkpoint knows its network, so that other options are left out: {named}")
    return kept, notices


def combine_request(groups: Sequence[OptionGroup]) -> tuple[list[OptionGroup], list[str]]:
    """The older client's defaults are added where a network is named, but for a file of options, which may have its
    own; what belonged to its server goes."""
    names = [_whole_name(group.name, _OF_CLIENT) for group in groups]
    kept = [group for group, name in zip(groups, names, strict=True) if name not in WITHOUT_NEED]
    if "--config-path" not in names and {"--config", "--model-name", "--model"} & set(names):
        for option, value in OLD_CLIENT.items():
            if option not in names:
                kept += group_options([option, value])
    dropped = dict.fromkeys(name for name in names if name in WITHOUT_NEED)
    notices = [f"options of send_request.py that no longer exist are left out: {', '.join(dropped)}"]
    return kept, notices if dropped else []


def _whole_name(name: str, known: Sequence[str] = _KNOWN) -> str:
    """An option that may be typed in part, under its whole name; others as they are."""
    found = [each for each in known if name and each.startswith(name) and len(name) > len("--c")]
    return found[0] if len(found) == 1 else name


def _explain_stages(groups: Sequence[OptionGroup]) -> list[str]:
    """The old warning where there were no splits; where there may be some, that they are merged."""
    names = [group.name for group in groups]
    if SPLITS in names:
        return [f"{IN_STAGES}: the model is exported with its stages merged"]
    if any(name in ("--config", "--config-path") for name in names):
        return [f"{IN_STAGES}: stages that the configuration has are exported merged"]
    return [f"{IN_STAGES}: there are no {SPLITS}, so it is off"]
