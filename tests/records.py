"""TFRecord files for tests: written at once, and their records found."""

from pathlib import Path

from hotloop.data.tfrecord import encode_record, index_until_fault
from hotloop.errors import DataError


def write_records(path, records):
    Path(path).write_bytes(b"".join(map(encode_record, records)))


def index_records(path):
    """Where the records of a file lie; a DataError where it has a fault."""
    index, fault = index_until_fault(path)
    if fault:
        raise DataError(fault)
    return index
