"""The texts of a column of a Parquet file, a few rows at a time, because a value stored once may occur in all of
them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.data.text import streams
from megajax.host import reading
from megajax.host.remote import RemoteFile

_ROWS = 256  # in memory at once
_ROWS_BYTES = 1 << 30  # that they may occupy there
_AT_ONCE = 1 << 24  # bytes of Arrow's texts converted to Python's at once
_EXPANSION = 1 << 28, 1000  # limit on the texts' bytes: a constant, plus a multiple of the file's size
_ROW = 512  # bytes that each row counts for, besides its text


def texts(
    file: Path | RemoteFile, size: int, key: str, flag: str, most: int, begin: int = 0, end: int = 0
) -> Iterator[tuple[str | reading.TooLong, int]]:
    """The texts of a column in the row groups from `begin` to `end` (0: to the last), each with the number of bytes
    read so far."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with contextlib.ExitStack() as stack:
            content = stack.enter_context(file.open()) if isinstance(file, RemoteFile) else file
            table = stack.enter_context(pq.ParquetFile(content))
            if key not in table.schema_arrow.names:
                names = ", ".join(f'"{name}"' for name in table.schema_arrow.names)
                raise UserError(f'{flag}: {file} has no column "{key}"; valid: one of {names}')
            kind = table.schema_arrow.field(key).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f'{flag}: {file}: column "{key}" has the type {kind}; valid: text')
            # Sizes of whole row groups: on damaged files, Arrow may crash when asked for those of a column.
            groups = [*map(table.metadata.row_group, range(table.metadata.num_row_groups))]
            sizes = [max(1, group.total_byte_size) for group in groups]
            wanted = range(begin, end or len(groups))
            done, unpacked = 0, _ROW * sum(groups[number].num_rows for number in wanted)
            allowed = _EXPANSION[0] + _EXPANSION[1] * size
            share = sum(sizes[number] for number in wanted) / max(1, sum(sizes))
            rows = max(1, min(_ROWS, _ROWS_BYTES // max(sizes, default=1)))
            for batch in table.iter_batches(batch_size=rows, row_groups=[*wanted], columns=[key]):
                done += len(batch)
                unpacked += batch.nbytes
                if unpacked > allowed * share:
                    problem = f"{table.metadata.num_rows} rows that repeat only a few texts"
                    raise UserError(f"{flag}: {file}: {problem}; valid: at most {allowed >> 20} MiB of texts")
                for text in _values(batch.column(0), most):
                    yield text or "", size * done // table.metadata.num_rows
    except UnicodeDecodeError as error:
        raise streams.Undecodable(f'a text in column "{key}" is not UTF-8: {error}') from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise streams.Undecodable(str(error).splitlines()[0]) from None


def row_groups(file: Path | RemoteFile) -> list[int]:
    """The bytes of each row group of a Parquet file; empty if it is damaged, which `texts` reports."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with contextlib.ExitStack() as stack:
            content = stack.enter_context(file.open()) if isinstance(file, RemoteFile) else file
            metadata = stack.enter_context(pq.ParquetFile(content)).metadata
            return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError):
        return []


def _values(column: Any, most: int) -> Iterator[str | reading.TooLong | None]:
    """The texts in an Arrow array, one at a time if they are large."""
    if column.nbytes <= min(_AT_ONCE, most):
        yield from column.to_pylist()
        return
    for value in column:
        length = value.as_buffer().size if value.is_valid else 0
        yield value.as_py() if length <= most else reading.too_long(most)
