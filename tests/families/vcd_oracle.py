"""The whole vcd update once more, in float64 numpy, row by row from the formulas of the paper: the tests' oracle.

It shares no code with the family: networks, backward passes, HMC that keeps no gradient, the control variate
as a vector with an entry for every image, and RMSProp are written out here. Only the random numbers come from
outside.
"""

import numpy as np

FLOOR = 1e-4


def wide(tree):
    """The arrays of a state in float64."""
    if isinstance(tree, dict):
        return {name: wide(value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return [wide(value) for value in tree]
    return np.asarray(tree, np.float64)


def sigmoid(x):
    return np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x)))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def layers(network, x):
    """The inputs of each layer, and the output."""
    inputs = []
    for number, layer in enumerate(network):
        inputs.append(x)
        x = x @ layer["w"] + layer["b"]
        if number < len(network) - 1:
            x = np.maximum(x, 0)
    return inputs, x


def backward(network, inputs, back):
    """Gradients of the weights, and of the input, for the gradient of the output."""
    gradients = []
    for layer, x in zip(reversed(network), reversed(inputs), strict=True):
        gradients.append({"w": x.T @ back, "b": back.sum(0)})
        back = back @ layer["w"].T
        if x is not inputs[0]:
            back = back * (x > 0)
    return gradients[::-1], back


class Target:
    """log p(x, z) and its gradient in z."""

    def __init__(self, decoder, images):
        self.decoder, self.images = decoder, images

    def value(self, z):
        logits = layers(self.decoder, z)[1]
        likelihood = (self.images * logits - softplus(logits)).sum(1)
        return likelihood - (z**2).sum(1) / 2 - z.shape[1] * np.log(2 * np.pi) / 2

    def gradient(self, z):
        inputs, logits = layers(self.decoder, z)
        return backward(self.decoder, inputs, self.images - sigmoid(logits))[1] - z

    def decoder_gradient(self, z):
        """Of -log p(x | z), summed over the batch."""
        inputs, logits = layers(self.decoder, z)
        return backward(self.decoder, inputs, sigmoid(logits) - self.images)[0]


def hmc(target, z, momentum, uniform, size, leapfrogs):
    """One iteration; the decisions, and how far each was from the other one."""
    q, p = z, momentum
    for _ in range(leapfrogs):
        p = p + size / 2 * target.gradient(q)
        q = q + size * p
        p = p + size / 2 * target.gradient(q)
    ratio = np.exp(target.value(q) - target.value(z) + ((momentum**2).sum(1) - (p**2).sum(1)) / 2)
    accepted = uniform < ratio
    return np.where(accepted[:, None], q, z), accepted, np.abs(np.log(ratio / uniform)).min()


def encoder_pull(method, z0, zt, mean, spread, target, control):
    """d loss / d mean, d loss / d spread, and f(zT)."""
    eta = (z0 - mean) / spread
    through = -target.gradient(z0)
    f = target.value(zt) + (((zt - mean) / spread) ** 2).sum(1) / 2
    if method in ("kl", "hoffman"):
        return through, through * eta - 1 / spread, f
    score = (f - control)[:, None]
    by_mean = through + score * eta / spread - (zt - mean) / spread**2
    by_spread = through * eta + score * (eta**2 - 1) / spread - (zt - mean) ** 2 / spread**3
    return by_mean, by_spread, f


def moved(control, index, f, kind, decay, shared):
    """The vector of control variates after an update; of an image that comes twice the later row counts."""
    control = control.copy()
    if kind == "none":
        return control
    if kind == "global" or shared:
        return decay * control + (1 - decay) * f.mean()
    old = control.copy()
    for i, value in zip(index, f, strict=True):
        control[i] = decay * old[i] + (1 - decay) * value
    return control


def descended(network, gradients, slots, rate, first):
    """RMSProp: epsilon 1 outside the root, and v = g^2 in the very first update."""
    new_network, new_slots = [], []
    for layer, gradient, slot in zip(network, gradients, slots, strict=True):
        kept = 0.0 if first else 0.9
        v = {k: kept * slot[k] + (1 - kept) * gradient[k] ** 2 for k in layer}
        new_slots.append(v)
        new_network.append({k: layer[k] - rate * gradient[k] / (1 + np.sqrt(v[k])) for k in layer})
    return new_network, new_slots


def update(model, period, state, images, index, noise):
    """One weight update of {params, slots, control, step_size, updates}; also f, decisions and their margin."""
    params, count = state["params"], state["updates"]
    mean_inputs, mean = layers(params["mean"], images)
    raw_inputs, raw = layers(params["spread"], images)
    spread = FLOOR + softplus(raw - FLOOR)
    target = Target(params["decoder"], images)
    z0 = zt = mean + spread * noise.start
    size, decisions, margin = state["step_size"], [], np.inf
    for momentum, uniform in zip(noise.momenta, noise.uniforms, strict=True):
        if model.method == "kl":
            break
        zt, accepted, distance = hmc(target, zt, momentum, uniform, size, model.leapfrog_steps)
        if model.adaptation == "ruiz":
            aim = model.target_acceptance
            size = size * (1 + model.adaptation_rate * (accepted.mean() - aim) / aim)
        decisions.append(accepted)
        margin = min(margin, distance)
    by_mean, by_spread, f = encoder_pull(model.method, z0, zt, mean, spread, target, state["control"][index])
    gradients = {
        "mean": backward(params["mean"], mean_inputs, by_mean)[0],
        "spread": backward(params["spread"], raw_inputs, by_spread * sigmoid(raw - FLOOR))[0],
        "decoder": target.decoder_gradient(zt),
    }
    new = {"updates": count + 1, "step_size": size, "params": {}, "slots": {}}
    base = {
        "mean": model.encoder_mean_rate,
        "spread": model.encoder_spread_rate,
        "decoder": model.decoder_rate,
    }
    for name, rate in base.items():
        rate *= model.rate_decay ** (count // period)
        new["params"][name], new["slots"][name] = descended(
            params[name], gradients[name], state["slots"][name], rate, count == 0
        )
    shared, kind = count < model.shared_updates, model.control_variate if model.method == "vcd" else "none"
    new["control"] = moved(state["control"], index, f, kind, model.variate_decay, shared)
    vcd = f - target.value(z0) - z0.shape[1] / 2
    entropy = (np.log(spread) + (np.log(2 * np.pi) + 1) / 2).sum(1)
    seen = {
        "vcd": vcd.mean(),
        "elbo": (target.value(z0) + entropy).mean(),
        "log_joint_z0": target.value(z0).mean(),
        "log_joint_zt": target.value(zt).mean(),
        "f": f.mean(),
        "control_variate": state["control"].mean(),
        "acceptance": np.mean(decisions) if decisions else 0.0,
        "step_size": size,
        "learning_rate": model.decoder_rate * model.rate_decay ** (count // period),
    }
    return new, seen, margin
