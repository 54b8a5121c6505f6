"""Reed-Solomon by ISA-L, called directly.

Plain buffers in and out, no copies, no headers, and ctypes lets go of the GIL: 4+2 at more than 10 GB/s a thread, next to which
zstd and disks are slow. Rejected: pyeclib, which holds the GIL for the whole call, adds a header to each piece and decodes
damaged ones to wrong data; its wheel brings a libisal, though, which is taken where the system has none (Debian: libisal2).

The code is systematic (the first k pieces are the data) with a Cauchy matrix, of which every k rows can be inverted: any k pieces
give all. It does not notice damage: pieces are verified by their checksums before they come here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata

from tiercache import errors
from tiercache.core.stripe import SHARDS_LIMIT
from tiercache.tiers.warm.loans import LOANS

Buffer = bytes | bytearray | memoryview

_SYSTEM_LIBRARY = "libisal.so.2"
_WHEEL, _WHEEL_LIBRARY = "pyeclib", "libisal"
_TABLE_BYTES = 32  # of one coefficient, as ec_init_tables makes them
_ERASURES_CACHED = 256


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI (Python 3.11 on): the address of a read-only buffer is to be had in no other way."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


class ErasureCode:
    """k data and m parity pieces of equal length. May be used by any number of threads at once."""

    def __init__(self, data_count: int, parity_count: int) -> None:
        assert data_count >= 1
        assert parity_count >= 0
        assert data_count + parity_count <= SHARDS_LIMIT
        self.data_count = data_count
        self.parity_count = parity_count
        self._library = library()
        rows_count = data_count + parity_count
        matrix = ctypes.create_string_buffer(rows_count * data_count)
        self._library.gf_gen_cauchy1_matrix(matrix, rows_count, data_count)
        self._rows = [matrix.raw[row * data_count : (row + 1) * data_count] for row in range(rows_count)]
        self._parity_tables = self._tables(self._rows[data_count:])
        self._erasure_tables = functools.lru_cache(_ERASURES_CACHED)(self._make_erasure_tables)

    def encode(self, pieces: Sequence[Buffer]) -> list[memoryview]:
        """The parity pieces of the k data pieces."""
        assert len(pieces) == self.data_count
        parity = [LOANS.take(len(pieces[0])) for _ in range(self.parity_count)]
        self._multiply(self._parity_tables, pieces, parity)
        return parity

    def reconstruct(self, present: Mapping[int, Buffer], wanted: Sequence[int]) -> dict[int, memoryview]:
        """The pieces `wanted`, by number, from k or more that are `present`; of more than k the first ones are used."""
        assert len(present) >= self.data_count, f"{len(present)} of {self.data_count} pieces"
        sources = tuple(sorted(present)[: self.data_count])
        tables = self._erasure_tables(sources, tuple(wanted))
        pieces = [LOANS.take(len(present[sources[0]])) for _ in wanted]
        self._multiply(tables, [present[number] for number in sources], pieces)
        return dict(zip(wanted, pieces, strict=True))

    def _make_erasure_tables(self, sources: tuple[int, ...], wanted: tuple[int, ...]) -> ctypes.Array[ctypes.c_char]:
        """Of the rows that lead from the pieces `sources` to those `wanted`: each one's row times the inverse."""
        count = self.data_count
        inverse = ctypes.create_string_buffer(count * count)
        rows = ctypes.create_string_buffer(b"".join(self._rows[number] for number in sources), count * count)
        if self._library.gf_invert_matrix(rows, inverse, count) != 0:
            raise AssertionError(f"the rows {sources} of a Cauchy matrix cannot be inverted")
        multiply = self._library.gf_mul
        products = []
        for number in wanted:
            row = bytearray(count)
            for column in range(count):
                for step, factor in enumerate(self._rows[number]):
                    row[column] ^= multiply(factor, inverse.raw[step * count + column])
            products.append(bytes(row))
        return self._tables(products)

    def _tables(self, rows: Sequence[bytes]) -> ctypes.Array[ctypes.c_char]:
        tables = ctypes.create_string_buffer(max(1, _TABLE_BYTES * self.data_count * len(rows)))
        if rows:
            self._library.ec_init_tables(self.data_count, len(rows), b"".join(rows), tables)
        return tables

    def _multiply(self, tables: ctypes.Array[ctypes.c_char], sources: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        length = len(sources[0])
        if length == 0 or not results:
            return
        with ExitStack() as held:
            from_addresses = _addresses(sources, length, held)
            to_addresses = _addresses(results, length, held)
            self._library.ec_encode_data(length, self.data_count, len(results), tables, from_addresses, to_addresses)


def _addresses(buffers: Sequence[Buffer], length: int, held: ExitStack) -> ctypes.Array[ctypes.c_void_p]:
    """A table of pointers; the buffers stay where they are until `held` is closed."""
    table = (ctypes.c_void_p * len(buffers))()
    for position, buffer in enumerate(buffers):
        view = _PyBuffer()
        _get_buffer(buffer, ctypes.byref(view), 0)
        held.callback(_release_buffer, ctypes.byref(view))
        assert view.len == length, f"pieces of {view.len} and {length} bytes"
        table[position] = view.buf
    return table


@functools.cache
def library() -> ctypes.CDLL:
    """libisal, of the system or of pyeclib's wheel. Raises SetupError."""
    found = _open_library()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    declarations = {
        "gf_gen_cauchy1_matrix": ([pointer, number, number], None),
        "gf_invert_matrix": ([pointer, pointer, number], number),
        "gf_mul": ([ctypes.c_ubyte, ctypes.c_ubyte], ctypes.c_ubyte),
        "ec_init_tables": ([number, number, pointer, pointer], None),
        "ec_encode_data": ([number, number, number, pointer, pointer, pointer], None),
    }
    for name, (arguments, result) in declarations.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found


def _open_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_SYSTEM_LIBRARY)
    except OSError:
        pass
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith(_WHEEL_LIBRARY):
            return ctypes.CDLL(str(file.locate()))
    raise errors.SetupError(
        f"erasure coding needs ISA-L ({_SYSTEM_LIBRARY})", hint=f"install libisal2 (Debian) or the Python package {_WHEEL}"
    )
