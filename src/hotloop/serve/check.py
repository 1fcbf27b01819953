"""`python -m hotloop.serve.check FOLDER PLATFORM`: load a model folder as a server would, and compare its examples.

It is what an export ends with, in a process that has nothing from training: the families cannot even be imported.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.engine.device import setup
from hotloop.engine.model_folder import NO_DEVICE
from hotloop.errors import DeviceError, HotloopError, first_line

if TYPE_CHECKING:
    from hotloop.engine.exportable import Arrays

WRONG = 1
NO_MEMORY = "RESOURCE_EXHAUSTED"


def check(folder: str) -> str | None:
    """What is wrong with the answers, if anything: of all examples in one batch, and of each by itself."""
    from hotloop.serve.artefact import Artefact, find_disagreement, in_rungs

    artefact = Artefact.open(folder)
    inputs, expected = artefact.examples()
    call = artefact.load()
    for ladder in (artefact.ladder, artefact.ladder[:1]):
        found = in_rungs(call, ladder, inputs)
        if reason := find_disagreement(expected, found, artefact.tolerance):
            return f"in batches of {ladder[0] if len(ladder) == 1 else ladder}: {reason}"
    return compare_saved_model(Path(folder), inputs, expected, artefact.tolerance)


def compare_saved_model(folder: Path, inputs: "Arrays", expected: "Arrays", tolerance: float) -> str | None:
    """What TensorFlow answers otherwise, where the folder has the model for it as well."""
    from hotloop.serve import saved_model
    from hotloop.serve.artefact import find_disagreement

    if not (folder / saved_model.FILE).exists():
        return None
    reason = find_disagreement(expected, saved_model.answer_by_tensorflow(folder, inputs), tolerance)
    return f"by TensorFlow: {reason}" if reason else None


def main(argv: Sequence[str]) -> int:
    sys.modules["hotloop.families"] = None  # type: ignore[assignment]
    folder, platform = argv
    status = WRONG
    try:
        setup(platform, warn=lambda text: None)
        reason = check(folder)
    except DeviceError as error:
        reason, status = str(error), NO_DEVICE
    except HotloopError as error:
        reason = str(error)
    except RuntimeError as error:  # jax's errors of a device
        reason = first_line(error)
        status = NO_DEVICE if NO_MEMORY in reason else WRONG
    if reason:
        print(reason, file=sys.stderr)
    return status if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
