"""TFRecord files and Examples, against published checksums, protobuf and tensorboardX."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data.tfrecord import (
    WireError,
    encode_record,
    masked_crc,
    put_run,
    put_varint,
    read_example,
    read_record,
    write_example,
)
from hotloop.errors import DataError, MissingExtra
from records import index_records, write_records


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next three: RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_are_the_published_ones_turned_by_fifteen_bits_plus_a_constant(data, crc):
    turned = crc >> 15 | crc << 17 & 0xFFFFFFFF
    assert masked_crc(data) == (turned + 0xA282EAD8) % 2**32


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(
        MissingExtra, match=r"checking TFRecord files needs google-crc32c: .*hotloop\[images\]"
    ):
        encode_record(b"")


def test_records_come_back_in_any_order(tmp_path):
    written = [b"", b"one", bytes(1000), b"\xff" * 77]
    write_records(tmp_path / "file", written)
    index = index_records(tmp_path / "file").tolist()
    assert [read_record(tmp_path / "file", *index[k], check=True) for k in (2, 0, 3, 1)] == [
        written[k] for k in (2, 0, 3, 1)
    ]


def test_a_file_of_tensorboardx_is_read(tmp_path):
    writer = pytest.importorskip("tensorboardX.record_writer").RecordWriter(str(tmp_path / "events"))
    writer.write(b"hello")
    writer.write(b"x" * 300)
    writer.close()
    index = index_records(tmp_path / "events")
    data = [read_record(tmp_path / "events", *place, check=True) for place in index.tolist()]
    assert data == [b"hello", b"x" * 300]
    assert (tmp_path / "events").read_bytes() == encode_record(b"hello") + encode_record(b"x" * 300)


def test_a_file_cut_anywhere_is_named_with_the_byte_where_its_last_record_begins(tmp_path):
    whole = encode_record(b"first") + encode_record(b"second")
    begins = len(encode_record(b"first"))
    path = tmp_path / "cut"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == begins:
            assert len(index_records(path)) == 1
            continue
        at = 0 if length < begins else begins
        with pytest.raises(DataError, match=rf"cut: byte {at}: the file ends in"):
            index_records(path)


@pytest.mark.parametrize("byte", range(12))
def test_a_wrong_byte_in_a_length_or_its_checksum_is_found(tmp_path, byte):
    whole = bytearray(encode_record(b"first") + encode_record(b"second"))
    at = len(encode_record(b"first"))
    whole[at + byte] ^= 1
    (tmp_path / "bad").write_bytes(whole)
    with pytest.raises(DataError, match=rf"bad: byte {at}: no record here"):
        index_records(tmp_path / "bad")


@pytest.mark.parametrize("byte", [0, 3, 6, 9])
def test_a_wrong_byte_in_the_data_or_its_checksum_is_found_when_asked_for(tmp_path, byte):
    whole = bytearray(encode_record(b"seventy"))
    whole[12 + byte] ^= 0x80
    (tmp_path / "bad").write_bytes(whole)
    ((start, length),) = index_records(tmp_path / "bad").tolist()
    read_record(tmp_path / "bad", start, length)
    with pytest.raises(DataError, match="bad: byte 12: a record of 7 bytes does not match"):
        read_record(tmp_path / "bad", start, length, check=True)


def test_a_file_that_shrank_after_it_was_indexed_is_reported(tmp_path):
    path = tmp_path / "file"
    write_records(path, [b"abcdefgh"])
    ((start, length),) = index_records(path).tolist()
    path.write_bytes(path.read_bytes()[:15])
    with pytest.raises(DataError, match="file: byte 12: the file ends"):
        read_record(path, start, length)


FEATURES = {
    "text": [b"tench", b"", b"\xff\x00"],
    "ints": np.array([0, 1, -1, 127, 128, 2**62, -(2**63), 2**63 - 1]),
    "floats": np.array([0.5, -1e30, 3.25], np.float32),
    "no bytes": [],
    "no ints": np.empty(0, np.int64),
    "no floats": np.empty(0, np.float32),
    "müde": np.array([7]),
}


def same(found, wanted):
    for name, values in wanted.items():
        if not len(values):
            assert not len(found[name]), name
        elif isinstance(values, list):
            assert found[name] == values
        else:
            assert found[name].dtype == values.dtype, name
            np.testing.assert_array_equal(found[name], values)
    return found.keys() == wanted.keys()


def test_an_example_comes_back():
    assert same(read_example(write_example(FEATURES)), FEATURES)


def test_only_the_wanted_features_are_read():
    found = read_example(write_example(FEATURES), ("ints", "absent"))
    assert same(found, {"ints": FEATURES["ints"]})


@pytest.fixture(scope="module")
def example_type():
    """tf.train.Example as protobuf itself understands it, with packed and with unpacked lists."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto

    def build(packed):
        name = "packed" if packed else "unpacked"
        file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")

        def add(message, number, label, kind, type_name=None, **options):
            one = message.field.add(name=f"f{number}", number=number, label=label, type=kind, **options)
            if type_name:
                one.type_name = f".{name}.{type_name}"
            return one

        for list_name, kind in (
            ("BytesList", field.TYPE_BYTES),
            ("FloatList", field.TYPE_FLOAT),
            ("Int64List", field.TYPE_INT64),
        ):
            one = add(file.message_type.add(name=list_name), 1, field.LABEL_REPEATED, kind)
            if kind != field.TYPE_BYTES:
                one.options.packed = packed
        feature = file.message_type.add(name="Feature")
        feature.oneof_decl.add(name="kind")
        for number, type_name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
            add(feature, number, field.LABEL_OPTIONAL, field.TYPE_MESSAGE, type_name, oneof_index=0)
        features = file.message_type.add(name="Features")
        entry = features.nested_type.add(name="F1Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
        value = entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE)
        value.type_name = f".{name}.Feature"
        add(features, 1, field.LABEL_REPEATED, field.TYPE_MESSAGE, "Features.F1Entry")
        add(
            file.message_type.add(name="Example"),
            1,
            field.LABEL_OPTIONAL,
            field.TYPE_MESSAGE,
            "Features",
        )
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.Example"))

    return build


@pytest.mark.parametrize("packed", [True, False])
def test_examples_of_protobuf_are_read(example_type, packed):
    message = example_type(packed)()
    for name, values in FEATURES.items():
        kind = 1 if isinstance(values, list) else 2 if values.dtype.kind == "f" else 3
        one = getattr(message.f1.f1[name], f"f{kind}")
        one.SetInParent()
        one.f1.extend(values if kind == 1 else values.tolist())
    assert same(read_example(message.SerializeToString()), FEATURES)


def test_protobuf_reads_our_examples(example_type):
    message = example_type(True)()
    message.ParseFromString(write_example(FEATURES))
    for name, values in FEATURES.items():
        kind = 1 if isinstance(values, list) else 2 if values.dtype.kind == "f" else 3
        assert message.f1.f1[name].WhichOneof("kind") == f"f{kind}"
        assert list(getattr(message.f1.f1[name], f"f{kind}").f1) == list(values)


def test_unknown_fields_are_passed_over():
    unknown = put_run(9, b"new") + put_varint(10 << 3) + b"\x05" + put_varint(11 << 3 | 1) + bytes(8)
    one = put_run(1, put_run(1, b"a") + put_run(2, put_run(3, put_run(1, b"\x07")) + unknown) + unknown)
    found = read_example(unknown + put_run(1, unknown + one) + unknown)
    assert same(found, {"a": np.array([7])})


def test_an_example_cut_anywhere_is_an_error_within_its_bytes():
    whole = write_example({"a": [b"abc"], "b": np.array([1, 300])})
    for length in range(1, len(whole)):
        with pytest.raises(WireError) as caught:
            read_example(whole[:length])
        assert 0 <= caught.value.at <= length


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_a_wire_error(data):
    try:
        read_example(data)
    except WireError as error:
        assert 0 <= error.at <= len(data)
