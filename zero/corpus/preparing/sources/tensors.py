"""Tensors of integers in files of torch.save, read without torch and without unpickling.

Since torch 1.6 such a file is a zip: `data.pkl` describes the object, `data/0`, `data/1`, ... hold the bytes of its
storages. The opcodes of `data.pkl` are interpreted here, and only those that describe a tensor are known: nothing is
imported or called by name.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from typing import Any, NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.files.parsing import reading

_STORAGES = {  # of torch, by the name in the description
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "UntypedStorage": "u1",
}
# torch and numpy have the same names for their types of integers.
_DTYPES = {f"torch {np.dtype(code).name}": code for code in ("u1", "i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8")}
_REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
_MARK = object()


class _Global(NamedTuple):
    """A name that the description refers to."""

    name: str


class _Storage(NamedTuple):
    """The bytes of a tensor, and their type."""

    key: str
    dtype: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensor(data: bytes, name: str) -> np.ndarray:
    """The only tensor of a file of torch.save, an integer array of at least one dimension.

    Raises:
      UserError: with `name`; the file holds anything else, or is not of this format.
    """
    if not data.startswith(b"PK"):
        raise UserError(f"{name}: expected a zip of torch.save (torch 1.6 or later); write it again with torch.save")
    with reading(f"{name}: not a complete file of torch.save; write it again", zipfile.BadZipFile, NotImplementedError):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (description,) = [entry for entry in archive.namelist() if entry.endswith("/data.pkl")]
            root = description.removesuffix("data.pkl")
            entries = {entry.filename: entry for entry in archive.infolist()}
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("its entries are compressed")
            if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
                raise ValueError("its byte order is not little")
            tensor = _interpret(archive.read(description), name)
            content = archive.read(f"{root}data/{tensor.storage.key}")
        values = np.frombuffer(content, tensor.storage.dtype)
        pairs = list(zip(tensor.shape, tensor.strides, strict=True))
        if any(size < 0 or stride < 0 for size, stride in pairs) or tensor.offset < 0:
            raise ValueError(f"a tensor of shape {tensor.shape} with strides {tensor.strides}")
        last = tensor.offset + sum((size - 1) * stride for size, stride in pairs)
        count = math.prod(tensor.shape)
        if count and (last >= len(values) or count > len(values)):
            raise ValueError(f"a tensor of shape {tensor.shape} and {len(values)} values")
        steps = [stride * values.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(values[tensor.offset :], tensor.shape, steps, writeable=False)
    return np.atleast_1d(np.array(view)) if count else np.zeros((1, 0), values.dtype)


def _interpret(description: bytes, name: str) -> _Tensor:
    """The tensor that a `data.pkl` describes."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(description):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case "MARK":
                stack.append(_MARK)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWFALSE" | "NEWTRUE" | "NONE":
                stack.append({"NEWFALSE": False, "NEWTRUE": True}.get(opcode.name))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = _marked(stack) if opcode.name == "TUPLE" else len(stack) - int(opcode.name[-1])
                items = tuple(stack[start:])
                del stack[start - (opcode.name == "TUPLE") :]
                stack.append(items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_Global(argument))
            case "STACK_GLOBAL":
                attribute = stack.pop()
                module = stack.pop()
                stack.append(_Global(f"{module} {attribute}"))
            case "BINPERSID":
                stack.append(_storage(stack.pop(), name))
            case "REDUCE":
                arguments = stack.pop()
                function = stack.pop()
                stack.append(_called(function, arguments, name))
            case other:
                raise UserError(f"{name}: expected one tensor of integers; found {_found(other, stack)}")
    (tensor,) = stack
    if not isinstance(tensor, _Tensor):
        raise UserError(f"{name}: expected one tensor of integers; found {_found('', stack)}")
    return tensor


def _marked(stack: list[Any]) -> int:
    """The place after the last mark."""
    return max(i for i, item in enumerate(stack) if item is _MARK) + 1


def _storage(identity: Any, name: str) -> _Storage:
    kind, storage, key, _, _ = identity
    module, _, attribute = storage.name.partition(" ")
    if kind != "storage" or module not in ("torch", "torch.storage") or attribute not in _STORAGES:
        raise UserError(f"{name}: expected a tensor of integers; found {storage.name.replace(' ', '.')}")
    return _Storage(str(key), _STORAGES[attribute])


def _called(function: Any, arguments: tuple[Any, ...], name: str) -> Any:
    """What a call makes: a tensor, or its empty dictionary of hooks."""
    called = function.name if isinstance(function, _Global) else type(function).__name__
    if called == "collections OrderedDict" and arguments == ():
        return None
    if called not in _REBUILD:
        raise UserError(f"{name}: refers to {called.replace(' ', '.')}, which is not called; expected one tensor")
    storage, offset, shape, strides, *rest = arguments
    if called.endswith("_v3"):
        dtype = rest[2].name
        if dtype not in _DTYPES:
            raise UserError(f"{name}: expected a tensor of integers; found {dtype.replace(' ', '.')}")
        storage = storage._replace(dtype=_DTYPES[dtype])
    return _Tensor(storage, offset, shape, strides)


def _found(opcode: str, stack: list[Any]) -> str:
    names = [item.name.replace(" ", ".") for item in stack if isinstance(item, _Global)]
    kinds = {"EMPTY_DICT": "a dictionary", "EMPTY_LIST": "a list", "BINFLOAT": "a number"}
    return ", ".join(names) or kinds.get(opcode) or opcode or "something else"
