"""The speedrun's network and updates once more, in PyTorch and float64, from the facts of the public programs."""

from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from hotloop.families.cnn.speedrun.config import rescaled_updates


def tensor(array):
    return torch.tensor(np.asarray(array, np.float64))


def kernel(array):
    """HWIO -> OIHW."""
    return tensor(array).permute(3, 2, 0, 1).contiguous()


class InTorch:
    """Parameters as leaves, running statistics, and what SGD and Muon remember."""

    def __init__(self, recipe, images, params, statistics, filters):
        self.recipe, self.images, self.done = recipe, images, 0
        self.filters = torch.cat([kernel(filters), -kernel(filters)])
        self.bias = tensor(params["whitening"]["bias"]).requires_grad_()
        self.kernels = {name: kernel(each).requires_grad_() for name, each in params["kernel"].items()}
        self.offsets = {name: tensor(each).requires_grad_() for name, each in params["offset"].items()}
        self.head = tensor(params["head"]["weight"]).requires_grad_()
        self.running = {
            name: [tensor(each["mean"]), tensor(each["variance"])] for name, each in statistics.items()
        }
        self.velocity = {name: torch.zeros_like(each) for name, each in self.kernels.items()}
        decay, rate, head = recipe.decay * recipe.batch_size, recipe.offset_rate, recipe.head_rate
        self.sgd = torch.optim.SGD(
            [
                {"params": [self.bias], "lr": rate, "weight_decay": decay / rate},
                {"params": list(self.offsets.values()), "lr": rate, "weight_decay": decay / rate},
                {"params": [self.head], "lr": head, "weight_decay": decay / head},
            ],
            momentum=recipe.momentum,
            nesterov=True,
        )

    def logits(self, images_NHWC, train):
        x = F.gelu(F.conv2d(tensor(images_NHWC).permute(0, 3, 1, 2), self.filters, self.bias))
        for group in range(3):
            for layer in ("first", "second"):
                name = f"group{group}_{layer}"
                x = F.conv2d(x, self.kernels[name], padding=1)
                x = F.max_pool2d(x, 2) if layer == "first" else x
                kept = 1 - self.recipe.kept_statistics
                x = F.batch_norm(x, *self.running[name], None, self.offsets[name], train, kept, 1e-12)
                x = F.silu(x)
        features = F.max_pool2d(x, x.shape[-1]).flatten(1)
        return features @ self.head / features.shape[1]

    def step(self, images_NHWC, labels):
        """One update, and its loss."""
        recipe, total = self.recipe, self.recipe.updates(self.images)
        warm = recipe.whitening_updates(self.images)
        loss = F.cross_entropy(
            self.logits(images_NHWC, True),
            torch.tensor(labels, dtype=torch.long),
            label_smoothing=recipe.smoothing,
            reduction="sum",
        )
        self.sgd.zero_grad()
        for each in self.kernels.values():
            each.grad = None
        loss.backward()
        if self.done >= warm:
            self.bias.grad = None
        falling = 1 - self.done / total
        factors = (1 - self.done / warm, falling, falling)
        rates = (recipe.offset_rate, recipe.offset_rate, recipe.head_rate)
        for group, rate, factor in zip(self.sgd.param_groups, rates, factors, strict=True):
            group["lr"] = rate * factor
        self.sgd.step()
        self._muon(recipe.kernel_rate * falling, list(rescaled_updates(total))[self.done])
        self.done += 1
        return loss.item() / len(labels)

    @torch.no_grad()
    def _muon(self, rate, is_rescaled):
        momentum = self.recipe.kernel_momentum
        for name, weight in self.kernels.items():
            buffer = self.velocity[name].mul_(momentum).add_(weight.grad)
            x = (weight.grad + momentum * buffer).flatten(1)
            x = x / (x.norm() + 1e-7)
            for _ in range(3):
                square = x @ x.T
                x = 3.4576 * x + (-4.7391 * square + 2.0843 * square @ square) @ x
            if is_rescaled:
                weight.mul_(len(weight) ** 0.5 / (weight.norm() + 1e-7))
            weight.add_(x.view_as(weight), alpha=-rate)
            weight.mul_(1 - rate * self.recipe.decay * self.recipe.batch_size)

    def parameters(self):
        """By the names and in the layout of the network here."""
        kernels = {name: each.permute(2, 3, 1, 0) for name, each in self.kernels.items()}
        found = {"whitening": {"bias": self.bias}, "kernel": kernels, "offset": self.offsets,
                 "head": {"weight": self.head}}  # fmt: skip
        return {
            (group, name): each.detach().numpy()
            for group, name, each in chain.from_iterable(
                [(group, name, each) for name, each in members.items()] for group, members in found.items()
            )
        }
