"""A file as a bounded stream of lines, whatever it is packed in and however it is damaged.

Logs of machines that just failed are cut off, half compressed, full of NUL bytes where a block was never written. All that
can be read is handed on, and what could not be is noted in `problems`, so that a reader can say what it has not seen.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import lzma
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

LINE_MAX = 64 * 1024
HEAD = 4096
WHOLE_MAX = 64 * 1024 * 1024
"""Bytes of a file that is read as a whole (JSON, metrics)."""
_UNPACKED_MAX = 16 * 1024**3
"""Bytes that come out of one compressed file at most: small files can unpack to more than there is time for."""
_CHUNK = 64 * 1024
_PATIENCE = 5.0
"""Seconds that a pipe may have no writer."""
_BREAKS = re.compile(rb"[\r\0]+")

_UNREADABLE = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd, which this version does not read: unpack it with `zstd -d` first",
    b"\x04\x22\x4d\x18": "compressed with lz4, which is not read: unpack it with `lz4 -d` first",
    b"PK\x03\x04": "a zip archive, which is not read: unpack it first",
    b"LPKSHHRH": "a journal of systemd: read it with `journalctl --file FILE -o json`, and give what that prints",
}


class _Unpacker(Protocol):
    """What bz2, lzma and our gzip have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """One member of a gzip file. The sum at its end is checked after all data was handed out, not instead of it."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._header = b""
        self._begun = False
        self._sum = 0
        self._size = 0
        self._tail = b""
        self._trailer = b""
        self.eof = False
        self.unused_data = b""

    @property
    def needs_input(self) -> bool:
        return not self._tail

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        if not self._begun:
            self._header += data
            length = _gzip_header(self._header)
            if length is None:
                if len(self._header) > _CHUNK:
                    raise zlib.error("the header of a gzip file does not end")
                return b""
            data, self._header, self._begun = self._header[length:], b"", True
        if self._inflate.eof:
            self._end(data)
            return b""
        out = self._inflate.decompress(self._tail + data, max(max_length, 0))
        self._tail = self._inflate.unconsumed_tail
        self._sum = zlib.crc32(out, self._sum)
        self._size += len(out)
        if self._inflate.eof:
            self._end(self._inflate.unused_data)
        return out

    def _end(self, data: bytes) -> None:
        self._tail = b""
        self._trailer += data
        if len(self._trailer) >= 8:
            self.eof, self.unused_data = True, self._trailer[8:]

    def check(self) -> str:
        """What is wrong with the sums at the end, or ""."""
        said = self._trailer[:8]
        right = self._sum.to_bytes(4, "little") + (self._size & 0xFFFFFFFF).to_bytes(4, "little")
        return "" if said == right else "its checksum is wrong: something in it is not what was written"


def _gzip_header(data: bytes) -> int | None:
    """Length of the header, or None where it is not whole yet (RFC 1952)."""
    if len(data) < 10:
        return None
    flags, at = data[3], 10
    if flags & 4:
        if len(data) < at + 2:
            return None
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (8, 16):  # a name, a comment
        if flags & flag:
            end = data.find(b"\0", at)
            if end < 0:
                return None
            at = end + 1
    at += 2 if flags & 2 else 0
    return at if at <= len(data) else None


_PACKED: dict[bytes, type[_Gzip | bz2.BZ2Decompressor | lzma.LZMADecompressor]] = {
    b"\x1f\x8b\x08": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
}


class Opened:
    """A file that is being read.

    Attributes:
        name: the path as given, or `-`.
        head: the first bytes of it, unpacked.
        packed: whether it is compressed.
        corrupt: whether something in it is not what was written, as far as it was unpacked; that it is cut off is not that.
        problems: what could not be read so far; complete when all lines were taken.

    Raises:
        OSError: it cannot be opened, or not even its first bytes can be read.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.name = "-" if path is None else str(path)
        self.problems: list[str] = []
        self.packed = False
        self.corrupt = False
        self._begun = b""
        self._stream: BinaryIO = sys.stdin.buffer if path is None else self._open(path)
        try:
            raw = self._read_raw(max(HEAD, 16))
            self.format = next((why for magic, why in _UNREADABLE.items() if raw.startswith(magic)), "")
            self._chunks = self._decoded(self._unpacked(raw))
            parts, size = list[bytes](), 0
            for chunk in self._chunks:
                parts.append(chunk)
                size += len(chunk)
                if size >= HEAD:
                    break
        except BaseException:
            self.close()
            raise
        self._first = b"".join(parts)
        self.head = self._first[:HEAD]

    def close(self) -> None:
        """Close it; standard input stays open."""
        if self.path is not None:
            self._stream.close()

    @property
    def binary(self) -> bool:
        """Whether it looks like no text: more than a tenth of its first bytes are none of a text's."""
        strange = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in self.head)
        return strange > len(self.head) / 10

    def sound(self) -> bool:
        """Whether nothing in a compressed file is other than written, told by unpacking it once more from the beginning.

        What is unpacked is handed on before its sum is known: a log of gigabytes is held by nobody. True for what is not
        compressed, which has no sum, and for a pipe, which can be read only once.
        """
        if not self.packed or self.path is None or not regular(self.path):
            return True
        try:
            again = Opened(self.path)
        except OSError:
            return False
        try:
            for _ in again._chunks:
                pass
        finally:
            again.close()
        return not again.corrupt

    def whole(self, limit: int = WHOLE_MAX) -> bytes:
        """All of it, up to a limit; beyond that it is a problem."""
        parts, size = [self._first], len(self._first)
        for chunk in self._chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                self.problems.append(f"only its first {limit >> 20} MiB were read")
                break
        return b"".join(parts)[:limit]

    def lines(self) -> Iterator[bytes]:
        """Its lines, without ends; longer ones are cut to 64 KiB. A run of NUL bytes ends a line as well.

        It does so because NULs stand where something was never written: what is before and after them must not be joined.
        """
        cut = nuls = 0
        for line, whole in _lines(self._all()):
            cut += not whole
            if b"\0" in line or b"\r" in line:
                nuls += b"\0" in line
                yield from (part for part in _BREAKS.split(line) if part)
            else:
                yield line
        if cut:
            self.problems.append(f"{cut} line(s) of it are longer than {LINE_MAX >> 10} KiB, and were read only so far")
        if nuls:
            self.problems.append(f"{nuls} line(s) of it have NUL bytes, where something was never written")

    def _all(self) -> Iterator[bytes]:
        yield self._first
        self._first = b""
        yield from self._chunks

    def _read_raw(self, size: int = _CHUNK) -> bytes:
        """Some bytes of the stream; b"" at its end.

        A first read that fails is the caller's; a later one ends the file and is a problem.
        """
        begun, self._begun = self._begun, b""
        return begun + self._stream.read(size)

    def _open(self, path: Path) -> BinaryIO:
        """The file, or what is written into a pipe; nothing that could be waited for without end."""
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError("it is a device, which may never end: give what it says as a file or through a pipe")
        if not stat.S_ISFIFO(mode):
            return path.open("rb")
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._begun = _written_into(file)
            os.set_blocking(file, True)
            return os.fdopen(file, "rb")
        except BaseException:
            os.close(file)
            raise

    def _raw(self, first: bytes) -> Iterator[bytes]:
        chunk = first
        while chunk:
            yield chunk
            try:
                chunk = self._read_raw()
            except (OSError, ValueError) as error:
                self.problems.append(f"it could not be read to its end ({error})")
                return

    def _skip_hole(self) -> None:
        """Go on where there is something: some logs (`lastlog`) have holes of gigabytes in which nothing was ever written."""
        try:
            here = self._stream.tell()
            self._stream.seek(os.lseek(self._stream.fileno(), here, os.SEEK_DATA))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                self._stream.seek(0, os.SEEK_END)
        except ValueError:  # no file of the system's
            return

    def _unpacked(self, first: bytes) -> Iterator[bytes]:
        kind = next((kind for magic, kind in _PACKED.items() if first.startswith(magic)), None)
        if kind is None:
            for chunk in self._raw(first):
                yield chunk
                if not chunk.strip(b"\0"):
                    self._skip_hole()
            return
        self.packed = True
        total, unpacker, made = 0, kind(), False
        try:
            for chunk in self._raw(first):
                for at in range(0, len(chunk), 1024):  # small pieces: what a damaged one held is lost
                    data = chunk[at : at + 1024]
                    while data or not unpacker.needs_input:
                        if made and unpacker.eof:
                            self._check(unpacker)
                            if not data.strip(b"\0"):  # padding of tapes
                                break
                            unpacker, made = kind(), False
                        out = unpacker.decompress(data, _CHUNK)
                        made, data = True, b""
                        total += len(out)
                        if total > _UNPACKED_MAX:
                            self.problems.append(f"only the first {_UNPACKED_MAX >> 30} GiB in it were read")
                            return
                        if out:
                            yield out
                        if unpacker.eof:
                            data = unpacker.unused_data
                            if not data:
                                break
        except (zlib.error, OSError, EOFError, ValueError, lzma.LZMAError) as error:
            self.problems.append(f"it is damaged where it is compressed, and was read only so far ({error})")
            self.corrupt = True
            return
        if not unpacker.eof:
            self.problems.append("it is cut off where it is compressed, and was read only so far")
        else:
            self._check(unpacker)

    def _check(self, unpacker: _Unpacker) -> None:
        wrong = unpacker.check() if isinstance(unpacker, _Gzip) else ""
        if wrong and wrong not in self.problems:
            self.problems.append(wrong)
            self.corrupt = True

    def _decoded(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """The same as UTF-8, where it is UTF-16."""
        first = next(chunks, b"")
        name = _utf16(first)
        if not name:
            yield first
            yield from chunks
            return
        decoder = codecs.getincrementaldecoder(name)(errors="replace")
        yield decoder.decode(first).encode("utf-8", "replace")
        for chunk in chunks:
            yield decoder.decode(chunk).encode("utf-8", "replace")
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _utf16(head: bytes) -> str:
    """The name of the encoding where this is UTF-16: by its mark, or by a NUL in most of every second place."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    half = len(head) // 2
    if half < 8:
        return ""
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if odd > 0.7 * half and even < 0.1 * half:
        return "utf-16-le"
    return "utf-16-be" if even > 0.7 * half and odd < 0.1 * half else ""


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines, each with whether it is whole; never more than a line and a chunk in memory."""
    rest, skipping = b"", False
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            if skipping:
                skipping = False
            else:
                line = rest + piece if rest else piece
                yield line[:LINE_MAX], len(line) <= LINE_MAX
            rest = b""
        if not skipping:
            rest += pieces[-1]
            if len(rest) > LINE_MAX:
                yield rest[:LINE_MAX], False
                rest, skipping = b"", True
    if rest:
        yield rest, True


def _written_into(pipe: int) -> bytes:
    """The first byte of a pipe, or none yet where somebody has it open to write.

    Raises:
        OSError: nobody has.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            first = os.read(pipe, 1)
        except BlockingIOError:
            return b""
        if first:
            return first
        if time.monotonic() > until:
            raise OSError(f"it is a pipe into which nobody wrote for {_PATIENCE:g} seconds")
        time.sleep(_PATIENCE / 100)


def regular(path: Path) -> bool:
    """Whether this is a file that can be read twice, not a pipe or a device."""
    return stat.S_ISREG(path.stat().st_mode)
