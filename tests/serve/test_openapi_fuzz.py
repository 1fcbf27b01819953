"""The described API, tried by a tool that nobody here wrote: schemathesis, for a minute."""

import subprocess
import sys

import pytest
from served_process import ServedProcess
from small_models import small, small_image, write_uncompared

SECONDS = 60
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.mark.slow
def test_schemathesis_finds_no_answer_that_is_not_described(tmp_path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    write_uncompared(tmp_path / "models", small(), small_image())
    with ServedProcess(tmp_path / "models") as served:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"http://127.0.0.1:{served.port}/openapi.json",
             "--max-time", str(SECONDS), "--continue-on-failure", "--checks", ",".join(CHECKS), "--warnings", "off",
             "--generation-database", "none", "--suppress-health-check", "all", "--request-timeout", "20"],
            cwd=tmp_path, capture_output=True, text=True, timeout=4 * SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        status, said = served.stop()
        assert status == 0 and "Traceback" not in said, said
