"""Log folders as `hotloop bench run` leaves them, made up: for the tests of what reads them."""

import json


def record(variant, value, repeat=0, **more):
    metrics = {
        "throughput": {"value": value, "reduction": "mean", "unit": "samples/sec", "values": [value]},
        "latency": {"value": 1e3 / value, "reduction": "mean", "unit": "ms", "values": [1e3 / value]},
    }
    return {
        "benchmark": variant.split("_batch")[0],
        "variant": variant,
        "params": {},
        "command": "fake",
        "repeat": repeat,
        "status": "passed",
        "reason": "",
        "start": 1767225600.0,
        "seconds": 1.0,
        "metrics": metrics,
        "problems": {},
        "log": {"stdout": f"{variant}/stdout", "stderr": f"{variant}/stderr"},
        "spec": {"file": "a.yml", "sha256": "0" * 64},
        "provenance": "p",
        **more,
    }


def log_folder(path, records, device="a <fast> device", commit="0123456789abcdef", kind="gpu"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    machine = {
        "commit": commit,
        "dirty": True,
        "device": {"kind": kind, "name": device, "count": 1, "driver": "1.2"},
        "cpu": {"name": "a processor", "cores": 4, "usable_cores": 2},
        "host": "h",
        "python": "3.11",
        "packages": {"jax": "0.1", "numpy": "2"},
        "hotloop": {"version": "0.1.0", "commit": commit, "dirty": False},
    }
    (path / "provenance.json").write_text(json.dumps({"p": machine}))
    return path


def repeats(variant, values, **more):
    return [record(variant, value, place, **more) for place, value in enumerate(values)]
