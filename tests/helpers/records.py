"""Writes TFRecords with Google's own protobuf: `example(**features)` is a message, `record(data)` frames it."""

import struct
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

LISTS = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def example_class() -> Any:
    """tf.train.Example, as its .proto file declares it."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {"bytes": field.TYPE_BYTES, "float": field.TYPE_FLOAT, "int64": field.TYPE_INT64}
    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(LISTS.items(), 1):
        values = file.message_type.add(name=name)
        values.field.add(name="value", number=1, label=field.LABEL_REPEATED, type=kinds[kind])
        feature.field.add(name=name, number=number, type=field.TYPE_MESSAGE, type_name=f".t.{name}", oneof_index=0)
    file.message_type.append(feature)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, type_name=".t.Feature")
    repeated = {"label": field.LABEL_REPEATED, "type": field.TYPE_MESSAGE}
    features.field.add(name="feature", number=1, type_name=".t.Features.FeatureEntry", **repeated)
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=field.TYPE_MESSAGE, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()


def record(data: bytes) -> bytes:
    def masked(part: bytes) -> bytes:
        crc = google_crc32c.value(part)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def example(**features: list[Any]) -> bytes:
    message = Example()
    for name, values in features.items():
        kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[type(values[0]) if values else int]
        getattr(message.features.feature[name], kind).value.extend(values)
        getattr(message.features.feature[name], kind).SetInParent()
    return message.SerializeToString()
