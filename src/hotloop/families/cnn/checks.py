"""What must fit together among the options of `hotloop cnn train`: an OptionError that names the option if not.

All of it needs the options alone, so it is found out before any data or device is touched; what depends on the
data, the devices or the layers of the model is checked by `settings` and `placement`. No jax.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.engine.optim_keys import check_loss_scaling, check_optimiser, check_schedule
from hotloop.errors import OptionError
from hotloop.options import did_you_mean

if TYPE_CHECKING:
    from hotloop.families.cnn.options import TrainConfig

NORMS = {
    "batch_norm": ("momentum",),
    "custom_batch_norm": ("momentum",),
    "group_norm": ("num_groups", "channels_per_group"),
}
"""--norm-layer's names -> the keys that each may have."""
ADAPTIVE_KEYS = ("eeta", "epsilon", "weight_decay")
DECAY_KEYS = ("epochs_to_total_decay", "end_learning_rate_ratio", "power", "boundaries", "values")


def check_options(config: "TrainConfig") -> None:
    """Everything in this file."""
    _pipeline(config)
    _memory(config)
    _shared_statistics(config)
    _preprocessing(config)
    check_norm(config.norm_layer)
    _automatic_scaling(config)
    check_optimiser(config.optimizer, config.optimizer_params)
    check_schedule(config.lr_schedule, config.lr_schedule_params, config.lr_warmup_params)
    check_loss_scaling(config.loss_scaling, config.auto_loss_scaling)
    if config.ckpt_all_instances and config.ckpts_per_epoch == 0:
        raise OptionError(
            "--ckpt-all-instances: --ckpts-per-epoch 0 saves no checkpoints; ask for some, or leave it out"
        )


def _pipeline(config: "TrainConfig") -> None:
    if config.recomputation and not config.pipeline_splits:
        raise OptionError("--recomputation: goes stage by stage, so it needs --pipeline-splits")
    mapping, stages = config.device_mapping, len(config.pipeline_splits) + 1
    if mapping is None:
        return
    given = f"--device-mapping {' '.join(map(str, mapping))}"
    if len(mapping) != stages:
        raise OptionError(
            f"{given}: has {len(mapping)} entries for {stages} stages (--pipeline-splits and one more)"
        )
    if set(mapping) != set(range(max(mapping) + 1)):
        raise OptionError(f"{given}: must use every device from 0 to {max(mapping)}")


def _memory(config: "TrainConfig") -> None:
    count, stages = (
        len(config.without_effect.get("available_memory_proportion", ())),
        len(config.pipeline_splits) + 1,
    )
    if count <= 1 or (count == 2 * stages and stages > 1):
        return
    if stages == 1:
        raise OptionError(
            f"--available-memory-proportion: {count} values without --pipeline-splits; give one"
        )
    raise OptionError(
        f"--available-memory-proportion: {count} values for {stages} stages; give one, or {2 * stages} "
        "(convolutions and products of each stage)"
    )


def _shared_statistics(config: "TrainConfig") -> None:
    group = config.dbn_replica_group_size
    if group == 1:
        return
    if max(config.device_mapping or (len(config.pipeline_splits),)) > 0:
        raise OptionError(
            f"--dbn-replica-group-size {group}: needs one device per replica; leave out --pipeline-splits or map "
            "every stage to device 0 with --device-mapping"
        )
    if config.num_replicas % group:
        raise OptionError(
            f"--dbn-replica-group-size {group}: does not divide --num-replicas {config.num_replicas}; "
            "give a divisor, or 1"
        )


def _preprocessing(config: "TrainConfig") -> None:
    if config.accelerator_side_preprocess:
        return
    if config.eight_bit_transfer:
        raise OptionError("--eight-bit-transfer: needs --accelerator-side-preprocess")
    if config.without_effect.get("fused_preprocessing"):
        raise OptionError("--fused-preprocessing: needs --accelerator-side-preprocess")


def check_norm(norm: Mapping[str, Any]) -> None:
    """An OptionError where --norm-layer names no norm, or keys or values that it cannot have."""
    name = norm.get("name")
    if name not in NORMS:
        given = f"name {name}" if "name" in norm else "no name"
        raise OptionError(f"--norm-layer: {given}: must be one of {', '.join(NORMS)}")
    keys = [key for key in norm if key != "name"]
    for key in keys:
        if key not in NORMS[name]:
            raise OptionError(f"--norm-layer: {name} takes no {key}{did_you_mean(key, NORMS[name])}")
    if name == "group_norm" and len(keys) != 1:
        raise OptionError(
            "--norm-layer: group_norm takes num_groups or channels_per_group, "
            f"{'not both' if keys else 'and neither is given'}"
        )
    for key in keys:
        _check_norm_value(key, norm[key])


def _check_norm_value(key: str, value: Any) -> None:
    if key == "momentum":
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        reason = "must be a number from 0 to below 1"
    else:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        reason = "must be a whole number of at least 1"
    if not good:
        raise OptionError(f"--norm-layer: {key} {value}: {reason}")


def _automatic_scaling(config: "TrainConfig") -> None:
    """The old program's rule: automatic scaling goes with plain sgd at a constant rate, and with nothing else."""
    if not config.auto_loss_scaling:
        return
    wrong = [f"--optimizer {config.optimizer}"] if config.optimizer != "sgd" else []
    if config.optimizer_params.get("momentum"):
        wrong.append(f"momentum {config.optimizer_params['momentum']} in --optimizer-params")
    wrong += [f"{key} in --optimizer-params" for key in ADAPTIVE_KEYS if key in config.optimizer_params]
    if config.lr_schedule != "const":
        wrong.append(f"--lr-schedule {config.lr_schedule}")
    wrong += [f"{key} in --lr-schedule-params" for key in DECAY_KEYS if key in config.lr_schedule_params]
    if config.lr_warmup_params is not None:
        wrong.append("--lr-warmup-params")
    if wrong:
        raise OptionError(
            f"--auto-loss-scaling: goes with sgd without momentum at a constant rate, not with {', '.join(wrong)}"
        )


def check_splits(splits: Sequence[str], layers: Sequence[str], model: str) -> None:
    """An OptionError where --pipeline-splits name no layer of the model, or not in its order."""
    for split in splits:
        if split not in layers:
            near = did_you_mean(split, layers) or ": hotloop cnn describe lists them"
            raise OptionError(f"--pipeline-splits {split}: no layer of {model}{near}")
    places = [layers.index(split) for split in splits]
    if places != sorted(set(places)):
        raise OptionError(
            f"--pipeline-splits {' '.join(splits)}: must be different layers in the model's order: "
            f"{' '.join(sorted(set(splits), key=layers.index))}"
        )
    if 0 in places:
        raise OptionError(f"--pipeline-splits {layers[0]}: the first layer opens the first stage anyway")
