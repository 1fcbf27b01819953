import pytest

from hotloop.bench import measure


@pytest.fixture(autouse=True)
def short_readings(monkeypatch):
    """As many readings of the machine's pace as ever, each of less work: no test asks how fast it is here."""
    monkeypatch.setattr(measure, "PACE_WORK", 200)
