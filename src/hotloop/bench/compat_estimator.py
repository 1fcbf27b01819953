"""Options of the three later estimator scripts (`cifar10_ipu_*estimator*.py`) that mean something together: what they
called a batch was a replica's or a part's, and is that of a whole weight update now."""

import re
from collections.abc import Mapping, Sequence

from hotloop.bench.option_groups import CompatError, OptionGroup, group_options

TF2_USUAL = {"--batch-size": 16, "--epochs": 150}


def combine_tf2(groups: Sequence[OptionGroup]) -> tuple[list[OptionGroup], list[str]]:
    """Options under their whole names: one that was enough of a name then need not be enough now."""
    values, rest = _read_numbers(groups, TF2_USUAL)
    return _write_numbers(values) + rest, []


def combine_replicas(groups: Sequence[OptionGroup]) -> tuple[list[OptionGroup], list[str]]:
    """The batch was each replica's, and is that of all now; so is an epoch, which each replica had for itself."""
    values, rest = _read_numbers(groups, {**TF2_USUAL, "--ipus": 2})
    batch, replicas = values["--batch-size"], values["--ipus"]
    values["--batch-size"] = batch * replicas
    each = f"--batch-size {batch} was each replica's, and so was an epoch: {batch * replicas} is that of all {replicas}"
    return _write_numbers(values) + rest, [f"{each}, and an epoch one pass over the images"]


def combine_stages(groups: Sequence[OptionGroup]) -> tuple[list[OptionGroup], list[str]]:
    """The batch was that of one part, and the gradients of all parts were added up; here it is the mean of them."""
    usual = {"--ipus": 2, "--gradient-accumulation-count": 8, "--model-shard-position": 7}
    values, rest = _read_numbers(groups, {**TF2_USUAL, **usual})
    batch, parts = values["--batch-size"], values["--gradient-accumulation-count"]
    values["--batch-size"] = batch * parts
    rate = f"{0.01 * parts:g}"
    notice = (
        f"--batch-size {batch} was that of one of {parts} parts, whose gradients were added up: {batch * parts} is "
        f"that of all, and --learning-rate {rate} the same step by the mean"
    )
    return [*_write_numbers(values), *group_options(["--learning-rate", rate]), *rest], [notice]


def _read_numbers(
    groups: Sequence[OptionGroup], usual: Mapping[str, int]
) -> tuple[dict[str, int], list[OptionGroup]]:
    """The numbers of options that may be typed in part, and all other options; what is no number is an OptionError."""
    found, rest = dict(usual), []
    for group in groups:
        names = [name for name in usual if group.name and name.startswith(group.name)]
        if len(names) != 1:
            rest.append(group)
            continue
        value = " ".join(group.values)
        if not re.fullmatch(r"\+?0*[1-9][0-9]{0,9}", value):
            raise CompatError(f"{names[0]} {value}: must be a whole number from 1")
        found[names[0]] = int(value)
    return found, rest


def _write_numbers(values: Mapping[str, int]) -> list[OptionGroup]:
    return [group for name, value in values.items() for group in group_options([name, str(value)])]
