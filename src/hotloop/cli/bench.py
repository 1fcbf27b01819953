"""`hotloop bench ...`: run benchmark files, compare results, make a page of them, time peers.

Each subcommand has a module of its own; what they do is in `hotloop.bench`.
"""

from hotloop.cli import bench_compare, bench_peers, bench_report, bench_run
from hotloop.cli.command import Command

COMMAND = Command(
    "bench",
    "Run benchmark files, compare results, show them on a page.",
    children=(bench_run.COMMAND, bench_compare.COMMAND, bench_report.COMMAND, bench_peers.COMMAND),
)
