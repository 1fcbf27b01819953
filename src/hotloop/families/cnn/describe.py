"""What a network is made of, as a table: shapes, parameters, cost, and where a pipeline stage may begin."""

from hotloop.families.cnn.network import LayerInfo, Network

_HEADINGS = ("layer", "kind", "output", "parameters", "MFLOP", "stage may begin")


def flops_per_image(network: Network) -> int:
    """Operations of one image's forward pass: two for each multiply-add of convolutions and products.

    Training takes three times as many, since each product has two gradients of the same cost.
    """
    return sum(layer.flops for layer in network.layers)


def describe(network: Network) -> str:
    """The layers in order, one a line, under a line that sums them up."""
    rows = [_HEADINGS, *(_row(layer) for layer in network.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join([_summary(network), "", *(_line(row, widths) for row in rows)])


def _summary(network: Network) -> str:
    parameters = sum(layer.parameters for layer in network.layers)
    return (
        f"{network.model} ({network.variant}), images {_size(network.shape)}, {network.classes:,} classes: "
        f"{parameters:,} parameters, {flops_per_image(network) / 1e9:.3f} GFLOP an image forward"
    )


def _row(layer: LayerInfo) -> tuple[str, ...]:
    return (
        layer.name,
        layer.kind,
        _size(layer.shape),
        f"{layer.parameters:,}" if layer.parameters else "",
        f"{layer.flops / 1e6:,.3f}" if layer.flops else "",
        "yes" if layer.may_split else "",
    )


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if heading in ("parameters", "MFLOP") else cell.ljust(width)
        for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
    ]
    return "  ".join(cells).rstrip()
