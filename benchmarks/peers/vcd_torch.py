"""The vcd update as one would write it in torch: modules, autograd, foreach optimiser steps, float32, eager.

Same method, different derivation: the gradient in z comes from autograd, the encoder's from the surrogate loss, so
that agreement with ours checks both. Nothing is left out and nothing is done twice: the gradient at the current state
is cached (41 evaluations an update), and autograd is asked for no gradient that is not used. It knows nothing of jax.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from hotloop.families.vcd.config import VcdModel

GROUPS = ("mean", "spread", "decoder")


class Noise(NamedTuple):
    """eta [B, z], momenta [T, B, z], uniforms [T, B]."""

    start: Tensor
    momenta: Tensor
    uniforms: Tensor


class Numbers(NamedTuple):
    """All that an update changes: weights [in, out] and biases in turn, by parameter group."""

    params: dict[str, list[np.ndarray]]
    slots: dict[str, list[np.ndarray]]
    variate: np.ndarray
    step_size: float
    updates: int


class Report(NamedTuple):
    """What one update tells: means over the batch, and each decision's probability [T, B]."""

    vcd: Tensor
    log_joint_zt: Tensor
    acceptance: Tensor
    probabilities: Tensor


def network(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def log_joint(decoder: nn.Module, images: Tensor, z: Tensor) -> Tensor:
    logits = decoder(z)
    likelihood = -binary_cross_entropy_with_logits(logits, images, reduction="none").sum(-1)
    return likelihood - 0.5 * (z.square().sum(-1) + z.shape[-1] * np.log(2 * np.pi))


@dataclass
class Chains:
    """Where the chains stand, with what is known there."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class Trainer:
    """Networks, optimiser slots, control variate and step size, and the update that moves them."""

    def __init__(self, model: VcdModel, images: np.ndarray, device: str, dtype: torch.dtype = torch.float32):
        self.model, self.dtype = model, dtype
        self.images = torch.from_numpy(images).to(device)
        encoder = (images.shape[1], *model.hidden, model.z_dim)
        sizes = {"mean": encoder, "spread": encoder, "decoder": encoder[::-1]}
        self.networks = {name: network(sizes[name]).to(device, dtype) for name in GROUPS}
        self.params = {name: list(self.networks[name].parameters()) for name in GROUPS}
        self.slots = {name: [torch.zeros_like(p) for p in self.params[name]] for name in GROUPS}
        self.variate = torch.zeros(len(images), device=device, dtype=dtype)
        self.step_size = torch.tensor(model.step_size, device=device, dtype=dtype)
        self.updates = 0
        self.order = torch.empty(0, dtype=torch.int64)

    def load(self, numbers: Numbers) -> None:
        """Begin with these weights, slots, variates, step size and number of updates."""
        with torch.no_grad():
            for name in GROUPS:
                for mine, given in ((self.params, numbers.params), (self.slots, numbers.slots)):
                    for tensor, value in zip(mine[name], given[name], strict=True):
                        tensor.copy_(torch.from_numpy(value.T.copy()))
            self.variate.copy_(torch.from_numpy(numbers.variate.copy()))
            self.step_size.fill_(float(numbers.step_size))
        self.updates = numbers.updates

    def numbers(self) -> Numbers:
        """The state as arrays of the host."""

        def lists(tensors: dict[str, list[Tensor]]) -> dict[str, list[np.ndarray]]:
            return {name: [t.detach().cpu().numpy().T.copy() for t in tensors[name]] for name in GROUPS}

        variate, size = self.variate.cpu().numpy().copy(), self.step_size.item()
        return Numbers(lists(self.params), lists(self.slots), variate, size, self.updates)

    def draw(self) -> Noise:
        rows, like = self.model.micro_batch_size, {"device": self.variate.device, "dtype": self.dtype}
        normals = torch.randn(self.model.hmc_steps + 1, rows, self.model.z_dim, **like)
        return Noise(normals[0], normals[1:], torch.rand(self.model.hmc_steps, rows, **like))

    def next_batch(self) -> Tensor:
        """The next images of a shuffled pass; the benchmark's number of images is a multiple of the batch."""
        if not len(self.order):
            self.order = torch.randperm(len(self.images), device=self.images.device)
        index, self.order = (
            self.order[: self.model.micro_batch_size],
            self.order[self.model.micro_batch_size :],
        )
        return index

    @torch.enable_grad()
    def value_and_gradient(self, images: Tensor, position: Tensor) -> Chains:
        z = position.detach().requires_grad_()
        value = log_joint(self.networks["decoder"], images, z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        return Chains(position, value.detach(), gradient)

    @torch.no_grad()
    def sample(self, images: Tensor, start: Chains, noise: Noise) -> tuple[Chains, Tensor, Tensor]:
        """HMC from the encoder's samples; the step size moves after every iteration."""
        model, state, accepted, probabilities = self.model, start, [], []
        for momentum, uniform in zip(noise.momenta, noise.uniforms, strict=True):
            new, size = state, self.step_size
            p = momentum + 0.5 * size * new.gradient
            for number in range(model.leapfrog_steps):
                new = self.value_and_gradient(images, new.position + size * p)
                p = p + (1.0 if number < model.leapfrog_steps - 1 else 0.5) * size * new.gradient
            before = 0.5 * momentum.square().sum(-1) - state.log_density
            after = 0.5 * p.square().sum(-1) - new.log_density
            probability = torch.exp(torch.clamp(before - after, max=0.0))
            accept = uniform < probability  # false for nan
            row = accept[:, None]
            state = Chains(
                torch.where(row, new.position, state.position),
                torch.where(accept, new.log_density, state.log_density),
                torch.where(row, new.gradient, state.gradient),
            )
            share = accept.to(self.dtype).mean()
            self.step_size *= 1 + model.adaptation_rate * (share / model.target_acceptance - 1)
            accepted.append(share)
            probabilities.append(probability)
        return state, torch.stack(accepted).mean(), torch.stack(probabilities)

    def update(self, index: Tensor, noise: Noise) -> Report:
        """One weight update on the images `index`."""
        images = self.images[index].to(self.dtype)
        mean = self.networks["mean"](images)
        spread = 1e-4 + softplus(self.networks["spread"](images) - 1e-4)
        z0 = mean + spread * noise.start
        start = self.value_and_gradient(images, z0.detach())
        end, acceptance, probabilities = self.sample(images, start, noise)
        distance = ((end.position - mean) / spread).square().sum(-1)
        f = end.log_density + 0.5 * distance.detach()
        standard = (z0.detach() - mean) / spread
        log_q = -0.5 * standard.square().sum(-1) - spread.log().sum(-1)
        through = -(start.gradient * z0).sum()  # has the gradient of -log p(x, z0), which is known already
        encoder_loss = through + 0.5 * distance.sum() + ((f - self.variate[index]) * log_q).sum()
        decoder_loss = binary_cross_entropy_with_logits(
            self.networks["decoder"](end.position), images, reduction="sum"
        )
        self.descend(
            torch.autograd.grad(encoder_loss + decoder_loss, [p for g in GROUPS for p in self.params[g]])
        )
        self.move_variate(index, f)
        self.updates += 1
        vcd = (f - start.log_density).mean() - 0.5 * self.model.z_dim
        return Report(vcd, end.log_density.mean(), acceptance, probabilities)

    @torch.no_grad()
    def descend(self, gradients: tuple[Tensor, ...]) -> None:
        """RMSProp with epsilon 1 outside the root; the first update takes the square itself."""
        model, left = self.model, list(gradients)
        factor = model.rate_decay ** (self.updates // model.decay_period(len(self.images)))
        decay = 0.9 if self.updates else 0.0
        for name, rate in model.rates().items():
            params, slots = self.params[name], self.slots[name]
            grads, left = left[: len(params)], left[len(params) :]
            torch._foreach_mul_(slots, decay)
            torch._foreach_addcmul_(slots, grads, grads, 1 - decay)
            below = torch._foreach_sqrt(slots)
            torch._foreach_add_(below, 1.0)
            torch._foreach_addcdiv_(params, grads, below, -rate * factor)

    @torch.no_grad()
    def move_variate(self, index: Tensor, f: Tensor) -> None:
        keep = self.model.variate_decay
        if self.updates < self.model.shared_updates:
            self.variate.mul_(keep).add_(f.mean(), alpha=1 - keep)
        else:
            self.variate[index] = keep * self.variate[index] + (1 - keep) * f


def graphed(trainer: Trainer) -> Callable[[], None]:
    """An update as the replay of a CUDA graph: draws, gathering and everything else are in it.

    Python's part is captured as it stands, so the phase of the variate and the rates are those of the capture; a real
    run would capture again when they change, which is seldom.
    """
    index = trainer.next_batch().clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.update(index, trainer.draw())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trainer.update(index, trainer.draw())

    def one() -> None:
        index.copy_(trainer.next_batch())
        graph.replay()

    return one
