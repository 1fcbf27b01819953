"""`hotloop request`: send load to a server, one that runs or one of its own, and say how fast and how right it is."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotloop.cli.command import Command, Context, Result
from hotloop.cli.own_server import own_models
from hotloop.cli.parser import scan
from hotloop.cli.serve import GRPC_MODULES, SERVE_MODULES, check_extra
from hotloop.errors import DataError, HotloopError, OptionError, WrongResult
from hotloop.families.cnn.options import FOLDER, TrainConfig
from hotloop.families.cnn.presets import NETWORK_FILE, PRESETS, RUN_CONFIG, find_run
from hotloop.options import argument, between, non_negative, option, positive
from hotloop.rehearsal import begin_work
from hotloop.serve.address import Address

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hotloop.serve.artefact import Artefact
    from hotloop.serve.client import AnyClient, RemoteModel
    from hotloop.serve.load import Outcome, Sender

    Images = NDArray[np.uint8]

PORT = 8502  # of the older examples
THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Every address of this machine, which a server listens on and no client can ask; this command's own is for itself."""
CONNECT_SECONDS = 2.0
_request = partial(option, group="Requests")
EPILOG = """Examples:
  hotloop request http://127.0.0.1:8000 --num-threads 8 --batch-size 4
  hotloop request http://127.0.0.1:8000 --folder models/cifar_resnet8/1 --check     every answer is compared
  hotloop request --run results/cifar_resnet8-... --check                          export, serve, ask, end
  hotloop request --config resnet50_infer_bs16 --synthetic-data host --rate 200    random weights, open loop"""


@dataclass(frozen=True)
class RequestConfig(TrainConfig):
    """Whom to ask and how much; the options of `hotloop cnn train` are for a network without a checkpoint."""

    url: str | None = argument("A server that runs: http://HOST:PORT.", default=None, metavar="URL")
    run: Path | None = _request(
        None, "Export this run's newest checkpoint, and serve it meanwhile.", metavar="RUN"
    )
    name: str | None = _request(None, "The model to ask by its name; left out, the only one.")
    model_version: int | None = _request(None, "Its version; left out, the newest.", check=positive)
    best: bool = _request(False, "Of the run, the checkpoint that validated best.")
    step: int | None = _request(None, "Of the run, the checkpoint after so many updates.", check=non_negative)
    host: str = _request("127.0.0.1", "Where a server runs, or is started; 0.0.0.0 is this machine.")
    port: int | None = _request(
        None,
        f"Port of a server that runs already, which is asked, else to start one on, such as {PORT}; left out, "
        "a free one.",
        check=between(0, 65535),
    )
    batch_size: int = _request(1, "Rows of a request.", check=positive)
    num_threads: int = _request(1, "Clients at once.", check=positive)
    num_images: int = _request(
        1000, "Rows that each client sends, rounded up to whole requests.", check=positive
    )
    use_async: bool = _request(False, "Each client has 8 requests under way, not one.")
    rate: float | None = _request(
        None,
        "Requests a second of all clients together, each sent when it is due, or late, once a client is free.",
        check=positive,
    )
    protocol: Literal["v2", "v2-json", "grpc", "tf"] = _request(
        "v2",
        "v2: bytes; v2-json: the same in JSON; grpc: over gRPC, whose port is meant then; tf: as TensorFlow Serving.",
    )
    timeout: float = _request(10.0, "Seconds to wait for an answer.", check=positive)
    check_answers: bool = _request(False, "Compare every answer with local inference.", aliases=("--check",))
    folder: Path | None = _request(None, "Folder DIR/NAME/VERSION of the model, for --check.", metavar="DIR")
    token_file: Path | None = _request(None, "File of the server's token.", metavar="FILE")
    ca_file: Path | None = _request(
        None, "Certificate to trust, for a server of https with one of its own.", metavar="FILE"
    )
    verbose: bool = _request(False, "Say how long each request took.")


OF_DATA = frozenset({"dataset_path", "synthetic_data"})
"""Options of the network's that choose what is sent, whoever trained it."""
OWN = frozenset(each.name for each in fields(RequestConfig)) - {each.name for each in fields(TrainConfig)}


class Target(NamedTuple):
    """Whom to ask: an address, the model's folder if there is one here, and a --port that a server was found at."""

    url: str
    folder: Path | None = None
    found_at: int | None = None


def run(config: RequestConfig, context: Context) -> Result:
    """Send the load and report it; WrongResult where an answer was wrong, HotloopError where requests failed."""
    check_choices(config, context)
    check_packages(config, context)
    images, told = choose_images(config, context)
    begin_work("sending requests")
    with ExitStack() as stack:
        target = find_server(config, context, stack)
        if told:
            context.say(f"images: {told}")
        sender = prepare(config, target, images, context)
        try:
            with context.progress("sending", sender.load.rows) as bar:
                sender.run(bar.advance)
        except KeyboardInterrupt as stopped:
            stopped.result = show(sender.outcome, config, context)  # type: ignore[attr-defined]
            raise
    return report(sender.outcome, config, context)


def is_exported(config: RequestConfig, context: Context) -> bool:
    """Whether the model is exported and served here, for this command alone."""
    return config.run is not None or context.config is not None or "model_name" in context.given


def check_choices(config: RequestConfig, context: Context) -> None:
    """OptionError where nobody, or more than one, is to be asked."""
    asked = {
        "URL": config.url is not None,
        "--run": config.run is not None,
        "--config": context.config is not None,
    }
    named = [name for name, is_given in asked.items() if is_given]
    if len(named) > 1:
        raise OptionError(f"{' and '.join(named)}: give one of them")
    is_own = is_exported(config, context)
    if not is_own and config.url is None and not config.port:
        raise OptionError(
            "URL is needed: a server such as http://127.0.0.1:8000; or --run RUN, or --config NAME"
        )
    if config.url is not None and {"host", "port"} & context.given:
        raise OptionError("--host and --port: the URL has them already")
    if config.folder is not None and is_own:
        raise OptionError("--folder: the model is exported for this command alone; leave it out")
    if config.run is None and (config.best or config.step is not None):
        raise OptionError("--best and --step choose a checkpoint: they need --run RUN")
    common = {"device", "only_accelerator", "json", "debug", "config_path"}
    of_network = sorted(context.given - OWN - common - (OF_DATA if config.run else set()))
    if of_network and (config.run or not is_own):
        other = f"the run {config.run}" if config.run else "the server"
        raise OptionError(f"--{of_network[0].replace('_', '-')}: {other} has its own network; leave it out")
    if config.check_answers and config.folder is None and not is_own:
        raise OptionError("--check: needs --folder DIR/NAME/VERSION, the folder that the server has it from")
    if config.ca_file is not None and not (config.url or "").startswith("https://"):
        raise OptionError("--ca-file: is for a URL that begins with https://")


def check_packages(config: RequestConfig, context: Context) -> None:
    """MissingExtra where a package is lacking that a server of its own, a comparison, or the protocol will need."""
    if is_exported(config, context):
        if config.check_answers or not is_listening(*place_of(config)):
            check_extra("serve", SERVE_MODULES, "a server of this command's own")
    elif config.folder is not None:
        check_extra("serve", ("flatbuffers", "safetensors"), "--folder")
    if config.protocol == "grpc":
        check_extra("grpc", GRPC_MODULES, "--protocol grpc")


def find_server(config: RequestConfig, context: Context, stack: ExitStack) -> Target:
    """Whom to ask; what was started for it ends with `stack`.

    With --run or --config and --port a server that runs there is asked; where there is none, one is started there.
    """
    host, port = place_of(config)
    url = config.url or str(Address("http", host, port))
    if not is_exported(config, context):
        return Target(url, config.folder)
    is_there = is_listening(host, port)
    if is_there and not config.check_answers:
        context.say(f"{url}: a server runs there and is asked; nothing is exported")
        return Target(url, found_at=port)
    models = stack.enter_context(own_models())
    device = ["--device", context.device] if context.device != "auto" else []
    with context.progress("exporting"):
        exported = models.export([*device, *export_words(config, context)])
    for line in exported["warnings"]:
        context.warn(line)
    folder = Path(exported["folder"])
    if is_there:
        context.say(f"{url}: a server runs there and is asked; its answers are compared with this model's")
        return Target(url, folder, found_at=port)
    http, grpc = ("0", str(port)) if config.protocol == "grpc" else (str(port), "none")
    ports = ["--port", http, "--grpc-port", grpc]
    with context.progress("starting a server"):
        return Target(models.serve(["--host", host, *ports, *device]), folder)


def place_of(config: RequestConfig) -> tuple[str, int]:
    """Host and port where a server runs or is started; port 0 is a free one."""
    return THIS_MACHINE.get(config.host, config.host), config.port or 0


def is_listening(host: str, port: int) -> bool:
    """Whether somebody takes connections there; nobody does at port 0."""
    if not port:
        return False
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def export_words(config: RequestConfig, context: Context) -> list[str]:
    """The words by which `hotloop export` makes the model that this command line names."""
    named = {"--name": config.name, "--version": config.model_version, "--step": config.step}
    words = [f"{name}={value}" for name, value in named.items() if value is not None]
    if config.run is not None:
        return [*words, *(["--best"] if config.best else []), "--", str(config.run)]
    given = scan([word for word in context.argv[1:] if word != "--"], COMMAND.options)
    for name, text in given.items():
        if name not in OWN and name not in ("json", "debug", "print_config", "device"):
            words.append(f"--{name.replace('_', '-')}={','.join(text) if isinstance(text, list) else text}")
    return words


def choose_images(config: RequestConfig, context: Context) -> tuple["Images | None", str]:
    """The data set's images that are sent, and which those are in words; None where there are none, and random bytes
    are.

    DataError where --dataset-path has not the set.
    """
    from hotloop.serve.load import DISTINCT
    from hotloop.serve.request_images import find_validation_images

    if not is_exported(config, context):
        return None, ""
    dataset, folder = (config.dataset, config.dataset_path) if config.run is None else data_of_run(config.run)
    if is_path_given := "dataset_path" in context.given:
        folder = config.dataset_path
    folder = None if folder == Path() else folder
    if dataset is None or dataset == FOLDER or config.synthetic_data is not None:
        return None, ""
    try:
        found = find_validation_images(dataset, folder, DISTINCT * config.batch_size)
    except DataError as error:
        if is_path_given:
            raise
        gone = (
            f"{dataset} is not here, nor is the folder {folder}" if folder and not folder.exists() else error
        )
        return None, f"random bytes, since {gone}; --dataset-path names its folder"
    where = "" if folder is None else f" in {folder}"
    if found is None:
        return None, f"random bytes, since {dataset} is not here; --dataset-path names its folder"
    return found, f"{len(found):,} of {dataset}'s validation images{where}, in turn"


def data_of_run(run: Path) -> tuple[str | None, Path | None]:
    """The set of images that a run has been trained with, and its folder; None where there is none, or none is known.

    CheckpointError where it is no run.
    """
    from hotloop.cli.export import ExportConfig, find_checkpoint, find_family
    from hotloop.engine.run import read_json

    run = find_checkpoint(ExportConfig(run=run)).run or run
    family, place = find_family(run), find_run(run)
    had = read_json(place / RUN_CONFIG if place else run / NETWORK_FILE) if place or family == "cnn" else {}
    had = {**had, **(had.get("params") or {})}  # an estimator's own
    folder = Path(had["dataset_path"]) if had.get("dataset_path") else None
    if had.get("synthetic_data") or had.get("generated_data"):
        return None, None
    if family == "vcd":
        return data_of_vcd(str(had.get("data")))
    return {"cnn": had.get("dataset"), "estimator": "cifar10"}.get(family), folder


def data_of_vcd(data: str) -> tuple[str, Path | None]:
    """The set that `hotloop vcd train --data` names, as bytes, and its folder where that is what was named."""
    from hotloop.families.vcd.images import NAMES

    if data in NAMES:
        return {"binarised_mnist": "mnist"}.get(data, data), None
    return "fashion_mnist" if "fashion" in Path(data).name.lower() else "mnist", Path(data)


def prepare(config: RequestConfig, target: Target, images: "Images | None", context: Context) -> "Sender":
    """Ask the server for its model, and make the load for it."""
    from hotloop.serve.artefact import Artefact
    from hotloop.serve.load import WINDOW, Load, Sender, make_batches

    token = None if config.token_file is None else read_token_file(config.token_file)
    connect = partial(
        client_class(config.protocol),
        Address.parse(target.url),
        token=token,
        timeout=config.timeout,
        ca_file=config.ca_file,
    )
    model = describe_model(config, target, connect)
    url, folder = target.url, target.folder
    if folder is not None:
        context.open_device()
    artefact = None if folder is None else Artefact.open(folder)
    if artefact is not None and artefact.signature != model.signature:
        raise OptionError(f"--folder {folder}: holds another model than {url} has as {model.name}")
    examples = None if artefact is None else artefact.examples()[0]
    batches = make_batches(model.signature, config.batch_size, examples, images)
    window = WINDOW if config.use_async else 1
    load = Load(
        config.batch_size, config.num_threads, config.num_images, window, config.rate, config.protocol
    )
    expected = local_answers(artefact, batches) if artefact is not None and config.check_answers else None
    tolerance = 1e-5 if artefact is None else artefact.tolerance
    sender = Sender(connect, model, load, batches, expected, tolerance)
    context.say(
        f"{url}: {sender.load.rows:,} rows to {model.name}, {load.threads} clients, {load.batch_size} rows a request"
    )
    return sender


def read_token_file(file: Path) -> str:
    """The token in a file that nobody else can read."""
    check_extra("serve", ("starlette", "prometheus_client"), "--token-file")
    from hotloop.serve.gate import read_token

    return read_token(file).decode()


def describe_model(
    config: RequestConfig, target: Target, connect: Callable[[], "AnyClient"]
) -> "RemoteModel":
    """The model to ask: by --name, by its folder's name, else by the network's, else the only one."""
    from hotloop.serve.client import ServerError

    name = config.name or (None if target.folder is None else target.folder.absolute().parent.name)
    if name is None and target.found_at and config.run is None:
        name = config.model_name
    version = None if config.model_version is None else str(config.model_version)
    with connect() as client:
        try:
            return client.describe(name, version)
        except ServerError as error:
            if target.found_at is None:
                raise
            raise OptionError(
                f"--port {target.found_at}: who listens there has no such model ({error}); leave it out for a "
                "server on a free port"
            ) from None


def client_class(protocol: str) -> "type[AnyClient]":
    """The client that speaks this protocol."""
    if protocol == "grpc":
        from hotloop.serve.grpc_client import GrpcClient

        return GrpcClient
    from hotloop.serve.client import Client

    return Client


def local_answers(artefact: "Artefact", batches: list[Any]) -> list[Any]:
    """What this process itself computes for the batches."""
    from hotloop.serve.artefact import in_rungs

    call = artefact.load()
    return [in_rungs(call, artefact.ladder, batch) for batch in batches]


def show(outcome: "Outcome", config: RequestConfig, context: Context) -> Result:
    """The figures as lines; the older client's wording where benchmark files look for it."""
    if config.verbose:
        for seconds in outcome.latencies.get("total", []):
            context.say(f"-- Latency for batch: {1000 * seconds:.3f} ms.")
    context.say(
        f"sent {outcome.sent:,}, answered {outcome.answered:,}, failures {len(outcome.failures)} "
        f"in {outcome.seconds:.3f} s"
    )
    if outcome.retries:
        context.say(f"retries after 429: {outcome.retries}")
    rows = [
        (phase, *(f"{value:.3f}" for value in values.values()))
        for phase, values in outcome.percentiles().items()
    ]
    if rows:
        context.table(("ms", "p50", "p90", "p99", "max"), rows)
    context.say(f"Average throughput: {outcome.throughput:.2f} samples/sec")
    if config.check_answers:
        context.say(f"compared with local inference: {len(outcome.wrong)} of {outcome.answers:,} wrong")
    return outcome.as_dict()


def report(outcome: "Outcome", config: RequestConfig, context: Context) -> Result:
    """Show the figures; the errors of failed requests and wrong answers have them, too."""
    result, error = show(outcome, config, context), None
    if outcome.failures:
        error = HotloopError(f"{len(outcome.failures)} requests failed; the first: {outcome.failures[0]}")
    if outcome.silence:
        error = HotloopError(
            f"the server answers no more ({outcome.silence}): "
            f"{outcome.answered:,} of {outcome.sent:,} rows sent were answered"
        )
    if outcome.wrong:
        error = WrongResult(
            f"{len(outcome.wrong)} answers are not those of local inference: {outcome.wrong[0]}"
        )
    if error is not None:
        error.result = result
        raise error
    return result


COMMAND = Command(config=RequestConfig, run=run, presets=PRESETS, epilog=EPILOG, first_group="Requests")
