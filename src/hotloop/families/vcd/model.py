"""The whole weight update of the family: `init`, `update` and `evaluate`, as the engine wants them.

Where the two reference programs differ, this follows the paper's authors (docs/vcd.md lists the points).

The objective (appendix C of the paper): with f(z) = log p(x, z) + |(z - mean) / spread|^2 / 2 the divergence of one
image is -log p(x, z0) - d/2 + f(zT). Its gradient in mean and spread has three parts: through z0, by the score of q0
(less a control variate), and explicit in f. Nothing flows through the sampler. Losses are summed over the batch, so a
row's pull is its own.

The control variate, which keeps gradients calm, is a running mean of f(zT), one for all images or one for each. It is
kept as `shared` + `own[image]`, so that an update touches a batch's entries and nothing else, whatever the number of
images: while it is shared, `own` is zero and `shared` moves; afterwards `shared` rests and `own` moves.

Of several replicas each has a share of the images. What rows have in common (gradients, the acceptance that moves the
step size) is of the whole batch, and every replica writes the control variates of all its images: all keep the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from hotloop.engine import optim, precision
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.device import mesh_of_replicas, platform
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.precision import (
    SPLIT,
    average_replicas,
    count_replicas,
    first_row,
    gather_replicas,
    on_replicas,
    sum_replicas,
)
from hotloop.errors import CheckpointError
from hotloop.families.vcd import fused, networks
from hotloop.families.vcd.config import FAMILY, VcdModel, VcdTrain, read_run_options
from hotloop.layers import paths
from hotloop.mcmc import hmc
from hotloop.options import build

State = Any
Variate = dict[str, Array]
Batch = Mapping[str, Array]


@dataclass(frozen=True)
class Job:
    model: VcdModel
    images: int  # in training
    replicas: int = 1  # devices that share the images of an update

    @cached_property
    def mesh(self) -> Mesh | None:
        """Of the replicas; None for one."""
        return mesh_of_replicas(self.replicas)

    @property
    def sharding(self) -> NamedSharding | None:
        """Of a batch over the replicas."""
        return None if self.mesh is None else NamedSharding(self.mesh, SPLIT)

    @cached_property
    def optimiser(self) -> optim.Transformation:
        """Without a rate: each group of parameters has its own."""
        return optim.make(*self.model.optimiser())

    @property
    def variate(self) -> str:
        """The kind of control variate that the method really has."""
        return self.model.control_variate if self.model.method == "vcd" else "none"


def make_job(options: VcdModel, images: int, replicas: int = 1) -> Job:
    """The part of the options, of a training say, that a state depends on, the number of training images, and that of
    devices that share a batch, on which it does not depend."""
    own = VcdModel(**{each.name: getattr(options, each.name) for each in fields(VcdModel)})
    return Job(own, images, replicas)


def init(job: Job, key: Array) -> State:
    """Random networks, optimisers that have seen nothing, variates of zero, the first step size."""
    policy = precision.parse(job.model.precision)
    variate = init_variate(job.variate, job.images)
    params = policy.to_update(networks.init(key, job.model.z_dim, job.model.hidden))
    return {
        "params": params,
        "slots": precision.start_state(policy, job.optimiser, params),
        "variate": variate,
        "step_size": jnp.float32(job.model.step_size),
        "update": jnp.zeros((), jnp.int32),
    }


class Chain(NamedTuple):
    end: hmc.State
    step_size: Array
    acceptance: Array


def update(job: Job) -> Callable[[State, Batch, Array], tuple[State, dict[str, Array]]]:
    model, rates, optimiser = job.model, job.model.rates(), job.optimiser
    schedule, per_epoch = model.schedule(job.images)
    factor_at = optim.learning_rate(
        model.lr_schedule, schedule, global_batch_size=1, updates_per_epoch=per_epoch
    )
    policy = precision.parse(model.precision)

    def update_on_share(
        axis: str | None, batch: Batch, state: State, key: Array
    ) -> tuple[State, dict[str, Array]]:
        images = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32)
        noise = draw_noise(model, key, len(images), first_row(len(images), axis))
        params = policy.to_compute(state["params"])
        encoder = {name: params[name] for name in ("mean", "spread")}
        (mean, spread), back = jax.vjp(lambda nets: networks.encode(nets, images), encoder)
        z0 = mean + spread * noise.start
        start = hmc.State(z0, *networks.value_and_gradient(params["decoder"], images)(z0))
        chain = Chain(start, state["step_size"], jnp.float32(0))
        if model.method != "kl":
            chain = sample(model, params["decoder"], images, start, noise, state["step_size"], axis)
        decoder_gradient = jax.grad(
            lambda net: -networks.log_likelihood(networks.forward(net, chain.end.position)[-1], images).sum()
        )(params["decoder"])
        old, index, count = state["variate"], batch["index"], state["update"]
        drawn = Draw(mean, spread, noise.start, start, chain.end)
        pull = encoder_pull(model.method, drawn, read_variate(old, index, start.log_density))
        f, vcd = drawn.f, drawn.vcd.mean()
        seen = gather_replicas((index, f), axis)
        variate = move_variate(old, *seen, model.variate_decay, count < model.shared_updates)
        elbo = start.log_density.mean() + drawn.entropy.mean()
        factor = factor_at(count)
        means = {
            **({"loss": vcd} if model.method.startswith("vcd") else {"loss": -elbo, "vcd": vcd}),
            "elbo": elbo,
            "log_joint_z0": start.log_density.mean(),
            "log_joint_zt": chain.end.log_density.mean(),
            "f": f.mean(),
        }
        metrics = {
            **average_replicas(means, axis),
            "acceptance": chain.acceptance,
            "step_size": chain.step_size,
            "learning_rate": rates["decoder"] * factor,
            "control_variate": mean_variate(old),
        }
        params, slots = precision.optimise(
            policy,
            optimiser,
            sum_replicas({**back(pull)[0], "decoder": decoder_gradient}, axis),
            state["slots"],
            state["params"],
            stream(key, "rounding", 0),
            rate={name: rate * factor for name, rate in rates.items()},
        )
        new = {"params": params, "slots": slots, "variate": variate}
        return {**new, "step_size": chain.step_size, "update": count + 1}, metrics

    def one(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        made: tuple[State, dict[str, Array]] = on_replicas(update_on_share, job.mesh)(batch, state, key)
        return made

    return one


class Noise(NamedTuple):
    """All that an update draws, row by row: eta [B, z], momenta [T, B, z], uniforms [T, B]."""

    start: Array
    momenta: Array
    uniforms: Array


def draw_noise(model: VcdModel, key: Array, rows: int, first: ArrayLike = 0) -> Noise:
    """Each row's numbers depend on the key and the row's place alone, which is `first` for the first one."""
    steps, latent = model.hmc_steps, model.z_dim

    def row(key: Array) -> tuple[Array, Array]:
        normals, uniforms = jax.random.split(key)
        return jax.random.normal(normals, (steps + 1, latent)), jax.random.uniform(uniforms, (steps,))

    normals, uniforms = jax.vmap(row, out_axes=1)(sample_keys(key, first, rows))
    return Noise(normals[0], normals[1:], uniforms)


def sample(
    model: VcdModel,
    decoder: Any,
    images: Array,
    start: hmc.State,
    noise: Noise,
    step_size: Array,
    axis: str | None = None,
) -> Chain:
    """The chains of this replica's images, and a step size that follows the chains of all."""
    sampler = choose_sampler(model, len(images), count_replicas(axis))
    if sampler == "hopper":
        return sample_on_hopper(model, decoder, images, start, noise, step_size)
    rate, rows = adaptation_rate(model), len(images) * count_replicas(axis)
    kernel = fused.FusedSampler(decoder, images, model.leapfrog_steps) if sampler == "fused" else None
    transition: hmc.Transition
    if kernel:
        transition, start = kernel.transition, kernel.enter(start)
        noise = noise._replace(momenta=kernel.wide(noise.momenta), uniforms=kernel.wide_line(noise.uniforms))
    else:
        transition = hmc.transition(networks.value_and_gradient(decoder, images), model.leapfrog_steps)

    def step(carry: tuple[hmc.State, Array], numbers: tuple[Array, Array]) -> Any:
        state, size = carry
        state, info = transition(state, *numbers, size)
        accepted = info.accepted[: len(images)]  # rows that only fill up a tile have no say
        # Counted, and divided once: any split of the batch has the same share.
        share = sum_replicas(accepted.sum(dtype=jnp.float32), axis) / rows
        size = hmc.adaptation(size, share[None], model.target_acceptance, rate)
        return (state, size), share

    # Written out on an accelerator: 2,201 updates a second instead of 1,889 on an H200; a CPU only compiles longer.
    unroll = 1 if platform() == "cpu" else model.hmc_steps
    (end, size), accepted = lax.scan(step, (start, step_size), (noise.momenta, noise.uniforms), unroll=unroll)
    return Chain(kernel.leave(end) if kernel else end, size, accepted.mean())


def sample_on_hopper(
    model: VcdModel, decoder: Any, images: Array, start: hmc.State, noise: Noise, step_size: Array
) -> Chain:
    """The same in one kernel, or in one for each iteration where there are too many tiles to wait for each other."""
    from hotloop.families.vcd import hopper

    is_whole = model.hmc_steps > 1 and hopper.can_wait(
        len(images)
    )  # the kernel of one iteration does not adapt
    sampler = hopper.Sampler(model, decoder, images, model.hmc_steps if is_whole else 1)
    tiles, numbers = sampler.enter(start), sampler.noise(noise.momenta, noise.uniforms)
    if is_whole:
        tiles, size, moved = sampler.advance(tiles, numbers, step_size)
        return Chain(sampler.leave(tiles), size, moved.mean())
    rate = adaptation_rate(model)

    def step(carry: tuple[Any, Array], numbers: Array) -> Any:
        tiles, size = carry
        tiles, _, moved = sampler.advance(tiles, numbers[None], size)
        share = moved.mean()
        return (tiles, hmc.adaptation(size, share[None], model.target_acceptance, rate)), share

    (tiles, size), shares = lax.scan(step, (tiles, step_size), numbers, unroll=model.hmc_steps)
    return Chain(sampler.leave(tiles), size, shares.mean())


def adaptation_rate(model: VcdModel) -> float:
    return model.adaptation_rate if model.adaptation == "ruiz" else 0.0


def choose_sampler(model: VcdModel, rows: int, replicas: int = 1) -> str:
    """plain, fused or hopper: as asked, else what was the fastest for so many images on each of the devices.

    Updates a second on an H200, plain, fused and hopper: 949, 2,161 and 1,900 at batch 100; 679, 808 and not measured
    at 512; 506, 477 and 1,114 at 1,024; 350, 191 and 600 at 3,072. In 16 bits, where plain products are faster, hopper
    was not measured.
    """
    if model.sampler != "auto":
        return model.sampler
    if platform() != "gpu":
        return "plain"
    if rows <= fused.LARGEST_BATCH:
        return "fused" if fused.fits(model) else "plain"
    from hotloop.families.vcd import hopper

    is_for_this = replicas == 1 and model.precision == "32.32" and hopper.fits(model)
    has_card = is_for_this and paths.has_card_for(hopper.count_blocks(rows), "vcd's sampler")
    return "hopper" if has_card else "plain"


class Draw(NamedTuple):
    mean: Array
    spread: Array
    eta: Array
    start: hmc.State
    end: hmc.State

    @property
    def f(self) -> Array:
        distance = jnp.square((self.end.position - self.mean) / self.spread).sum(-1)
        return self.end.log_density + 0.5 * distance

    @property
    def vcd(self) -> Array:
        """The divergence by one sample; single values may be negative, the mean is not."""
        return self.f - self.start.log_density - self.mean.shape[-1] / 2

    @property
    def entropy(self) -> Array:
        """Of q0, exactly."""
        return jnp.log(self.spread).sum(-1) + 0.5 * self.mean.shape[-1] * (networks.LOG_TWO_PI + 1)


def encoder_pull(method: str, draw: Draw, control: Array) -> tuple[Array, Array]:
    """d loss / d mean and d loss / d spread of each row."""
    mean, spread, eta = draw.mean, draw.spread, draw.eta
    through = -draw.start.gradient
    if method in ("kl", "hoffman"):
        return through, through * eta - 1 / spread
    weight = (draw.f - control)[:, None]
    away = (draw.end.position - mean) / spread
    pull_mean = through + (weight * eta - away) / spread
    pull_spread = through * eta + (weight * (eta * eta - 1) - away * away) / spread
    return pull_mean, pull_spread


def init_variate(kind: str, images: int) -> Variate:
    if kind == "none":
        return {}
    shared = {"shared": jnp.zeros(())}
    return shared if kind == "global" else {**shared, "own": jnp.zeros(images)}


def read_variate(state: Variate, index: Array, like: Array) -> Array:
    """The variate of each row's image, as it stands before the update."""
    if not state:
        return jnp.zeros_like(like)
    if "own" in state:
        return state["shared"] + state["own"][index]
    return jnp.broadcast_to(state["shared"], like.shape)


def move_variate(state: Variate, index: Array, f: Array, decay: float, shared_phase: Any) -> Variate:
    """The variate after an update: c <- decay c + (1 - decay) f, with the batch's mean while it is shared.

    A batch that runs over the end of a pass may hold an image twice. Both rows start from the same value; the
    later one is kept, on every device.
    """
    if not state:
        return {}
    moved_shared = decay * state["shared"] + (1 - decay) * f.mean()
    if "own" not in state:
        return {"shared": moved_shared}
    shared = jnp.where(shared_phase, moved_shared, state["shared"])
    target = decay * (state["shared"] + state["own"][index]) + (1 - decay) * f - state["shared"]
    rows, own = jnp.where(shared_phase, 0.0, target), state["own"]
    if len(own) % len(index) == 0:  # batches fill a pass exactly, and no image comes twice
        return {"shared": shared, "own": own.at[index].set(rows, unique_indices=True)}
    places = jnp.arange(len(index), dtype=jnp.int32)
    last = jnp.zeros(len(own), jnp.int32).at[index].max(places)
    # A write past the end is dropped.
    written = jnp.where(last[index] == places, index, len(own))
    return {"shared": shared, "own": own.at[written].set(rows, mode="drop")}


def mean_variate(state: Variate) -> Array:
    if not state:
        return jnp.zeros(())
    return state["shared"] + state["own"].mean() if "own" in state else state["shared"]


def evaluate(job: Job) -> Callable[[State, Batch], dict[str, Array]]:
    """The ELBO of each image by one encoder sample that belongs to the image's number: cheap, unbiased."""
    policy = precision.parse(job.model.precision)

    def values(state: State, batch: Batch) -> dict[str, Array]:
        images = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32)
        params = policy.to_compute(state["params"])
        mean, spread = networks.encode(params, images)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), batch["index"])
        eta = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:]))(keys)
        z = mean + spread * eta
        elbo = networks.log_joint(params["decoder"], images, z) - networks.log_normal(z, mean, spread)
        return {"elbo": elbo, "elbo_squared": elbo * elbo}

    return values


class TrainedRun(NamedTuple):
    """A run's folder read back: its options, its model and the weights of a checkpoint."""

    config: VcdTrain
    job: Job
    state: State
    step: int


def load_run(folder: str | Path, step: int | None = None) -> TrainedRun:
    """The newest whole checkpoint of a run, or that of a step; what the run was, its config.json alone says."""
    folder = Path(folder)
    options = read_run_options(folder)
    images = options.pop("images")
    config = build(VcdTrain, options)
    job = make_job(config, images)
    if not config.save_checkpoints and not (folder / "checkpoints").exists():
        raise CheckpointError(
            f"{folder}: trained with --no-save-checkpoints, as by -c test, so its weights are gone; "
            "train with --save-checkpoints to keep them"
        )
    like = jax.eval_shape(lambda key: init(job, key), jax.random.key(0))
    restored = Checkpoints(folder / "checkpoints", family=FAMILY, config=options).restore(like, step).warn()
    return TrainedRun(config, job, restored.state, restored.step)
