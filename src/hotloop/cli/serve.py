"""`hotloop serve`: answer requests from folders that `hotloop export` wrote. jax and the HTTP libraries wait."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hotloop.cli.command import Command, Context, Result
from hotloop.engine.device import parse_size
from hotloop.engine.interrupt import Stopped, note_stops
from hotloop.errors import MissingExtra, OptionError
from hotloop.options import argument, between, non_negative, option, positive
from hotloop.rehearsal import begin_work

EPILOG = """Examples:
  hotloop serve models                              every model in it, on http://127.0.0.1:8000
  hotloop serve models --watch 5 --max-delay-ms 2   new versions take over; requests wait 2 ms for company
  curl -H 'Content-Type: image/jpeg' -T cat.jpg -X POST http://127.0.0.1:8000/v2/models/NAME/infer

It speaks the Open Inference Protocol v2 and TensorFlow Serving's REST API; a page is at /, figures at /metrics. A
model's program is trusted: serve only folders that you made."""
GRPC_PORT = 8001
SERVE_MODULES = ("starlette", "uvicorn", "httptools", "prometheus_client", "flatbuffers", "safetensors")
GRPC_MODULES = ("grpc", "grpc_health", "open_inference")  # of the extra `grpc`
_limit = partial(option, group="Limits")
_end = partial(option, group="Ending")


@dataclass(frozen=True)
class ServeConfig:
    folder: tuple[Path, ...] = argument("Folder of models, or of one model.", metavar="DIR")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every one of this machine.")
    port: int = option(8000, "Port to listen on; 0 is a free one, which is printed.", check=between(0, 65535))
    grpc_port: int | None = option(
        GRPC_PORT,
        "Port for gRPC (extra grpc); 0 is a free one, which is printed, as it is with --port 0; none is no gRPC.",
        check=between(0, 65535),
    )
    max_delay_ms: float = option(
        0.0,
        "Milliseconds that a request waits for company; 0 joins only what came while the device was busy.",
        check=non_negative,
    )
    watch: float | None = option(
        None, "Look for new, changed and removed versions every so many seconds.", check=positive
    )
    access_log: Path | None = option(
        None, "A line of JSON for each request goes to this file; - is standard error.", metavar="FILE"
    )
    titles: Path | None = option(
        None,
        "Titles of items for the page of a recommender, as MovieLens' u.item or movies.csv.",
        metavar="FILE",
    )
    ssl_certfile: Path | None = option(None, "Certificate for HTTPS, with --ssl-keyfile.", metavar="FILE")
    ssl_keyfile: Path | None = option(None, "Key of that certificate.", metavar="FILE")
    queue: int = _limit(256, "Requests of a model that may wait; one more gets 429.", check=positive)
    max_bytes: int | None = _limit(
        64_000_000,
        "Largest body of a request; one that is larger gets 413.",
        parse=parse_size,
        check=positive,
    )
    token_file: Path | None = _limit(
        None,
        "File of a token that all requests but health must have; nobody else may read it.",
        metavar="FILE",
    )
    grace: float = _end(30.0, "Seconds for the accepted requests after SIGTERM.", check=non_negative)
    drain_delay: float = _end(
        0.0,
        "Seconds from SIGTERM, when it is no longer ready, until it takes no connection any more.",
        check=non_negative,
    )


def run(config: ServeConfig, context: Context) -> Result:
    """Serve until a signal comes; status 0 when every accepted request has been answered."""
    if config.max_bytes is None:
        raise OptionError("--max-bytes none: a server needs a limit; give a size such as 64M")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise OptionError("--ssl-certfile and --ssl-keyfile: give both, or neither")
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is not None and not path.is_file():
            raise OptionError(f"--{name.replace('_', '-')} {path}: no such file")
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)
    check_extra("serve", SERVE_MODULES, "hotloop serve")
    grpc_port = choose_grpc_port(config, context)
    from hotloop.data.titles import read_titles
    from hotloop.engine.model_folder import read_about
    from hotloop.serve import gate, models, server, watch
    from hotloop.serve.app import Limits

    token = None if config.token_file is None else gate.read_token(config.token_file)
    titles = {} if config.titles is None else read_titles(config.titles)
    for folder in watch.find_versions(config.folder).values():
        read_about(folder)
    if grpc_port and grpc_port == config.port:
        raise OptionError(
            f"--grpc-port {grpc_port}: is the --port of HTTP; choose another, or none for no gRPC"
        )
    if grpc_port:
        server.bind(config.host, grpc_port, "--grpc-port").close()
    listening = server.bind(config.host, config.port)
    port = listening.getsockname()[1]
    begin_work(f"serving on port {port}")
    models.share_memory()
    context.open_device()
    service = server.Service(
        folders=config.folder,
        limits=Limits(config.max_bytes, token),
        delay=config.max_delay_ms / 1000,
        queue=config.queue,
        watch=config.watch,
        grace=config.grace,
        drain_delay=config.drain_delay,
        access_log=config.access_log,
        certificate=config.ssl_certfile,
        key=config.ssl_keyfile,
        grpc_port=grpc_port,
        titles=titles,
    )
    try:
        with note_stops(lambda text: None) as stop:
            server.serve(service, listening, stop, context.say)
    except Stopped:
        pass  # as it was asked to
    return {"port": port}


def choose_grpc_port(config: ServeConfig, context: Context) -> int | None:
    """The port for gRPC, None for none of it; MissingExtra where somebody asked for one and the extra is not there."""
    is_chosen = "grpc_port" in context.given | context.configured
    if config.grpc_port is None:
        return None
    if is_chosen:
        check_extra("grpc", GRPC_MODULES, "--grpc-port")
        return config.grpc_port
    if not all(map(find_spec, GRPC_MODULES)):
        context.say("no gRPC: the extra grpc is not installed (pip install 'hotloop[grpc]')")
        return None
    return config.grpc_port if config.port else 0


def check_certificate(certificate: Path, key: Path) -> None:
    """OptionError where they cannot be read, are not each other's, or the key has a password (nobody could type it)."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--ssl-certfile {certificate}: cannot be used with --ssl-keyfile {key} ({error.args[-1]})"
        ) from None


def check_extra(extra: str, modules: tuple[str, ...], purpose: str) -> None:
    """MissingExtra where a module of the extra is not installed."""
    for name in modules:
        if find_spec(name) is None:
            raise MissingExtra(name.replace("_", "-"), extra, purpose)


COMMAND = Command(config=ServeConfig, run=run, epilog=EPILOG)
